"""Plans between random pairs of layouts move what the reference says, and not one byte more.

Run more examples with ``HYPOTHESIS_MAX_EXAMPLES=5000``; without it the tests stay fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pynixlkv.geometry import Geometry, KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import held_heads, read_sources

from .reference import Shape, Side, apply, check_rows, expected_bytes

PAIRED_AXES = [
    *("KBHND", "KBNHD", "BKHND", "BKNHD", "BHKND", "BNKHD", "BHNC", "BNHC", "LBHNC"),
    *("LKBHND", "BLHNC", "BLKNHD", "DNHBKL", "NCBH"),
]
LATENT_AXES = ["BND", "LBND", "BNHD", "BLND", "NBD"]

many = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Model:
    """What both sides agree on."""

    kv_heads: int | None
    num_layers: int
    head_dim: int
    itemsize: int
    interleave: int


class Ranks(NamedTuple):
    """A group's tensor-parallel size, and the ways in which it shares tokens."""

    size: int
    dcp: int


@st.composite
def models(draw) -> Model:
    return Model(
        kv_heads=draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8, 12])),
        num_layers=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 3)),
        itemsize=draw(st.sampled_from([1, 2, 4, 8])),
        interleave=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def groups(draw, kv_heads: int | None) -> Ranks:
    heads = kv_heads or 1
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]
    size = draw(st.sampled_from([*divisors, heads + 1, 2 * heads, 4 * heads]))
    copies = max(1, size // heads) if size % heads == 0 else 1
    return Ranks(size, draw(st.sampled_from([n for n in (1, 1, 2, 4) if copies % n == 0])))


@st.composite
def shapes(draw, model: Model, ranks: Ranks, rank: int, layers: tuple[int, ...]) -> Shape:
    axes = draw(st.sampled_from(LATENT_AXES if model.kv_heads is None else PAIRED_AXES))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    # A turn of the context-parallel deal never ends inside a block.
    block_size *= model.interleave // np.gcd(block_size, model.interleave)
    padded = draw(st.sets(st.sampled_from(axes), max_size=2))
    return Shape(
        axes=axes,
        layers=layers,
        heads=held_heads(rank, ranks.size, model.kv_heads),
        num_blocks=draw(st.integers(5, 8)),
        block_size=int(block_size),
        head_dim=model.head_dim,
        itemsize=model.itemsize,
        token_rank=rank % ranks.dcp,
        token_ranks=ranks.dcp,
        interleave=model.interleave,
        order="".join(draw(st.permutations(axes))) if draw(st.booleans()) else axes,
        before={axis: draw(st.integers(0, 2)) for axis in sorted(padded)},
        after={axis: draw(st.integers(0, 2)) for axis in sorted(padded)},
    )


@st.composite
def layer_sets(draw, model: Model) -> tuple[int, ...]:
    """A pipeline stage, whole models and scattered stages among them, in any order."""
    layers = draw(st.sets(st.integers(0, model.num_layers - 1), min_size=1))
    return tuple(draw(st.permutations(sorted(layers))))


class Tables(NamedTuple):
    """Block tables of one sequence, and the arguments that go with them."""

    local_blocks: list[int]
    remote_blocks: list[int]
    local_start: int
    remote_start: int
    num_tokens: int | None

    @property
    def positions(self) -> range | None:
        return None if self.num_tokens is None else range(self.num_tokens)

    @property
    def arguments(self) -> dict:
        return {
            "local_start": self.local_start,
            "remote_start": self.remote_start,
            "num_tokens": self.num_tokens,
        }


@st.composite
def tables(draw, local: Shape, remote: Shape, *, at_most: int = 5) -> Tables:
    """Tables that begin anywhere and reach the same position, which may be inside a block."""
    units = [shape.block_size * shape.token_ranks for shape in (local, remote)]
    starts = [unit * draw(st.integers(0, 3)) for unit in units]
    longest = min(start + at_most * unit for start, unit in zip(starts, units, strict=True))
    assume(longest > max(starts))
    end = draw(st.integers(max(starts) + 1, longest))
    counts = [-(-(end - start) // unit) for start, unit in zip(starts, units, strict=True)]
    num_tokens = end if draw(st.booleans()) else None
    blocks = []
    for shape, count in zip((local, remote), counts, strict=True):
        if num_tokens is not None:
            count = draw(st.integers(count, min(count + 1, shape.num_blocks)))
        pool = st.permutations(range(shape.num_blocks))
        order = draw(st.sampled_from(["any", "up", "down"]))
        chosen = draw(pool)[:count]
        blocks.append(chosen if order == "any" else sorted(chosen, reverse=order == "down"))
    return Tables(blocks[0], blocks[1], starts[0], starts[1], num_tokens)


def cache_of(side: Side, model: Model, ranks: Ranks, rank: int) -> KVCache:
    return KVCache.from_tensors(
        side.tensors,
        axes=side.shape.axes,
        kv_heads=model.kv_heads,
        tp=(rank, ranks.size),
        dcp=(rank % ranks.dcp, ranks.dcp),
        interleave=model.interleave,
        layers=side.shape.layers,
    )


def assert_same(buffers: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for buffer, wanted in zip(buffers, expected, strict=True):
        wrong = np.flatnonzero(buffer != wanted)
        assert not wrong.size, f"{wrong.size} wrong bytes, first at offsets {wrong[:8].tolist()}"


@many
@given(data=st.data())
def test_reading_from_every_source_completes_the_local_blocks(data) -> None:
    """The whole path of a reader: choose sources, plan each, apply each, compare every byte."""
    model = data.draw(models())
    local_ranks, remote_ranks = data.draw(groups(model.kv_heads)), data.draw(groups(model.kv_heads))
    rank = data.draw(st.integers(0, local_ranks.size - 1))
    layers = data.draw(layer_sets(model))
    remote_layers = data.draw(layer_sets(model))
    common = sorted(set(layers) & set(remote_layers))
    assume(common)
    local = Side(data.draw(shapes(model, local_ranks, rank, layers)), seed=1)
    max_bytes = data.draw(st.sampled_from([None, None, 1, 5, 8, 64]))
    sources = read_sources(
        model.kv_heads,
        local=(rank, local_ranks.size),
        remote_size=remote_ranks.size,
        local_dcp=local_ranks.dcp,
        remote_dcp=remote_ranks.dcp,
    )
    like = data.draw(shapes(model, remote_ranks, sources[0].rank, remote_layers))
    table = data.draw(tables(local.shape, like))
    local_cache = cache_of(local, model, local_ranks, rank)

    expected = [buffer.copy() for buffer in local.buffers]
    wholes = [buffer.copy() for buffer in local.buffers]
    moved_elements = moved_bytes = 0
    for number, source in enumerate(sources):
        # One layout and one table on the whole remote side; heads and tokens as each rank has them.
        shape = Shape(
            **{
                **vars(like),
                "heads": held_heads(source.rank, remote_ranks.size, model.kv_heads),
                "token_rank": source.rank % remote_ranks.dcp,
            }
        )
        remote = Side(shape, seed=10 + number)
        remote.fill(table.remote_blocks, table.remote_start)
        before = [buffer.copy() for buffer in remote.buffers]
        changed, moved = expected_bytes(
            local,
            remote,
            table.local_blocks,
            table.remote_blocks,
            local_start=table.local_start,
            remote_start=table.remote_start,
            positions=table.positions,
            heads=source.heads,
            layers=common,
        )
        for buffer, change, whole in zip(expected, changed, wholes, strict=True):
            buffer[change != whole] = change[change != whole]
        remote_cache = cache_of(remote, model, remote_ranks, source.rank)
        plan = TransferPlan(
            local_cache.geometry,
            Geometry.from_bytes(remote_cache.geometry.to_bytes()),
            heads=source.heads,
            layers=None if set(layers) <= set(remote_layers) else common,
            max_bytes=max_bytes,
        )
        here, there = plan.descriptors(table.local_blocks, table.remote_blocks, **table.arguments)
        check_rows(local, remote, here, there, max_bytes)
        assert here[:, 1].sum() == moved * model.itemsize
        apply(here, there)
        assert_same(remote.buffers, before)
        moved_elements += moved
        moved_bytes += int(here[:, 1].sum())
    assert_same(local.buffers, expected)

    # The sources together give all that the tables have in common, and nothing twice.
    unit = local.shape.block_size * local.shape.token_ranks
    remote_unit = like.block_size * like.token_ranks
    ends = [
        table.local_start + unit * len(table.local_blocks),
        table.remote_start + remote_unit * len(table.remote_blocks),
        *([table.num_tokens] if table.num_tokens is not None else []),
    ]
    positions = range(max(table.local_start, table.remote_start), min(ends))
    mine = [
        position
        for table_idx in range(len(table.local_blocks))
        for slot in range(local.shape.block_size)
        if (position := local.shape.position(table.local_start, table_idx, slot)) in positions
    ]
    per_token = len(common) * (2 if local.shape.has_values else 1) * model.head_dim
    assert moved_elements == len(mine) * per_token * len(local.shape.heads)
    assert moved_bytes == moved_elements * model.itemsize
