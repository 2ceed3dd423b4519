"""Plans between random pairs of layouts move exactly the bytes of a slow reference.

Run more examples with ``HYPOTHESIS_MAX_EXAMPLES=5000``; without it the tests stay fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pynixlkv.errors import PlanError
from pynixlkv.geometry import Geometry, KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import held_heads, read_sources
from pynixlkv.types import Operation

from .reference import Shape, Side, apply, check_rows, expected_bytes

PAIRED_AXES = ["KBHND", "KBNHD", "BKHND", "BKNHD", "BHKND", "BNKHD", "BHNC", "BNHC", "LBHNC"]
LATENT_AXES = ["BND", "LBND", "BNHD"]
# Letters for any other order.
PAIRED_LETTERS = ["KBHND", "LKBHND", "BHNC", "LBHNC"]
LATENT_LETTERS = ["BND", "LBND", "LBNHD"]

many = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Model:
    """The facts that both sides share."""

    kv_heads: int | None
    num_layers: int
    head_dim: int
    itemsize: int
    interleave: int


class Ranks(NamedTuple):
    """Tensor- and context-parallel sizes of a group."""

    size: int
    dcp: int


@st.composite
def models(draw) -> Model:
    return Model(
        kv_heads=draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8, 12])),
        num_layers=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 3)),
        itemsize=draw(st.sampled_from([1, 2, 4, 8])),
        interleave=draw(st.sampled_from([1, 2, 4])),
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
    is_latent = model.kv_heads is None
    heads = held_heads(rank, ranks.size, model.kv_heads)
    if draw(st.booleans()):
        axes = draw(st.sampled_from(LATENT_AXES if is_latent else PAIRED_AXES))
    else:
        letters = draw(st.sampled_from(LATENT_LETTERS if is_latent else PAIRED_LETTERS))
        axes = "".join(draw(st.permutations(letters)))
        if len(heads) == 1 and draw(st.booleans()):
            axes = axes.replace("H", "")
    # In the same order in memory, in another, or with all layers in one storage.
    kind = draw(st.sampled_from(["as is", "permuted", "one storage"]))
    letters = axes if kind != "one storage" or "L" in axes else "L" + axes
    order = axes if kind == "as is" else "".join(draw(st.permutations(letters)))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    # A turn of the context-parallel deal never ends inside a block.
    interleave = model.interleave if ranks.dcp > 1 else 1
    block_size *= interleave // gcd(block_size, interleave)
    padded = sorted(draw(st.sets(st.sampled_from(axes), max_size=2)))
    return Shape(
        axes=axes,
        layers=layers,
        heads=heads,
        num_blocks=draw(st.integers(5, 8)),
        block_size=block_size,
        head_dim=model.head_dim,
        itemsize=model.itemsize,
        token_rank=rank % ranks.dcp,
        token_ranks=ranks.dcp,
        interleave=interleave,
        order=order,
        before={axis: draw(st.integers(0, 2)) for axis in padded},
        after={axis: draw(st.integers(0, 2)) for axis in padded},
    )


@st.composite
def layer_sets(draw, model: Model) -> tuple[int, ...]:
    """A pipeline stage, whole models and scattered stages among them, in any order."""
    layers = draw(st.sets(st.integers(0, model.num_layers - 1), min_size=1))
    return tuple(draw(st.permutations(sorted(layers))))


class Tables(NamedTuple):
    """Block tables of one sequence and their positions."""

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
        interleave=side.shape.interleave,
        layers=side.shape.layers,
    )


def expected_after_reading(local: Side, remote: Side, table: Tables, **options):
    return expected_bytes(
        local,
        remote,
        table.local_blocks,
        table.remote_blocks,
        local_start=table.local_start,
        remote_start=table.remote_start,
        **({"positions": table.positions} | options),
    )


def assert_same(buffers: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for buffer, wanted in zip(buffers, expected, strict=True):
        wrong = np.flatnonzero(buffer != wanted)
        assert not wrong.size, f"{wrong.size} wrong bytes, first at offsets {wrong[:8].tolist()}"


@many
@given(data=st.data())
def test_reading_from_every_source_completes_the_local_blocks(data) -> None:
    """Choose sources, plan and apply each, and compare every byte."""
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

    moved_elements = moved_bytes = 0
    for number, source in enumerate(sources):
        # All remote ranks share a layout and a table, and differ in heads and tokens.
        shape = replace(
            like,
            heads=held_heads(source.rank, remote_ranks.size, model.kv_heads),
            token_rank=source.rank % remote_ranks.dcp,
        )
        remote = Side(shape, seed=10 + number)
        remote.fill(table.remote_blocks, table.remote_start)
        before = [buffer.copy() for buffer in remote.buffers]
        expected, moved = expected_after_reading(
            local, remote, table, heads=source.heads, layers=common
        )
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
        assert_same(local.buffers, expected)
        assert_same(remote.buffers, before)
        moved_elements += moved
        moved_bytes += int(here[:, 1].sum())

    # Together the sources cover all that the tables share, once.
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


class Pair(NamedTuple):
    """Two single ranks with equal contents and a plan between them."""

    model: Model
    local: Side
    remote: Side
    plan: TransferPlan
    max_bytes: int | None


@st.composite
def pairs(draw, *, same_blocks: bool = False) -> Pair:
    """Whole caches on both sides, in different layouts."""
    model = draw(models())
    alone = Ranks(1, 1)
    layers = tuple(range(model.num_layers))
    here, there = (draw(shapes(model, alone, 0, layers)) for _ in range(2))
    if same_blocks:
        there = replace(there, block_size=here.block_size)
    local, remote = Side(here, seed=1), Side(there, seed=2)
    max_bytes = draw(st.sampled_from([None, None, 3, 16]))
    plan = TransferPlan(
        cache_of(local, model, alone, 0).geometry,
        cache_of(remote, model, alone, 0).geometry,
        max_bytes=max_bytes,
    )
    return Pair(model, local, remote, plan, max_bytes)


@many
@given(data=st.data())
def test_writing_moves_the_same_the_other_way(data) -> None:
    _, local, remote, plan, max_bytes = data.draw(pairs())
    table = data.draw(tables(local.shape, remote.shape))
    local.fill(table.local_blocks, table.local_start)
    before = [buffer.copy() for buffer in local.buffers]
    back = Tables(
        table.remote_blocks,
        table.local_blocks,
        table.remote_start,
        table.local_start,
        table.num_tokens,
    )
    expected, _ = expected_after_reading(remote, local, back)
    rows = plan.descriptors(
        table.local_blocks, table.remote_blocks, **table.arguments, operation=Operation.WRITE
    )
    check_rows(local, remote, rows[0], rows[1], max_bytes)
    apply(*rows, write=True)
    assert_same(remote.buffers, expected)
    assert_same(local.buffers, before)


@many
@given(data=st.data())
def test_the_order_of_block_pairs_changes_nothing(data) -> None:
    _, local, remote, plan, _ = data.draw(pairs(same_blocks=True))
    count = data.draw(st.integers(1, 5))
    local_blocks = data.draw(st.permutations(range(local.shape.num_blocks)))[:count]
    shift = data.draw(st.integers(0, remote.shape.num_blocks - 1))
    remote_blocks = [(block + shift) % remote.shape.num_blocks for block in local_blocks]
    assume(len(set(remote_blocks)) == count)
    rows = plan.descriptors(local_blocks, remote_blocks)
    in_order = sorted(zip(local_blocks, remote_blocks, strict=True))
    again = plan.descriptors(*(list(blocks) for blocks in zip(*in_order, strict=True)))
    assert rows[0].tolist() == again[0].tolist()
    assert rows[1].tolist() == again[1].tolist()


BUFFERS = (np.zeros((100_000, 3), np.uint64), np.zeros((100_000, 3), np.uint64))


@many
@given(data=st.data())
def test_buffers_of_the_caller_get_the_same_rows(data) -> None:
    """The same buffers for plans of all sizes, each with exactly the room that it needs."""
    _, local, remote, plan, max_bytes = data.draw(pairs())
    table = data.draw(tables(local.shape, remote.shape))
    blocks = (table.local_blocks, table.remote_blocks)
    cost = plan.describe(*blocks, **table.arguments)
    size = cost.num_runs + (cost.num_bytes // max_bytes if max_bytes else 0)
    for buffer in BUFFERS:
        buffer[size] = 7
    out = (BUFFERS[0][:size], BUFFERS[1][:size])
    rows = plan.descriptors(*blocks, **table.arguments, out=out)
    expected = plan.descriptors(*blocks, **table.arguments)
    for got, wanted, buffer in zip(rows, expected, BUFFERS, strict=True):
        assert got.tolist() == wanted.tolist()
        assert got.base is buffer
        assert got.ctypes.data == buffer.ctypes.data
        assert (buffer[size] == 7).all()
    with pytest.raises(PlanError, match=f"room for {size} of each"):
        plan.descriptors(*blocks, **table.arguments, out=(out[0], out[1][1:]))


@many
@given(data=st.data())
def test_coverage_says_what_can_be_moved(data) -> None:
    """Tables of any length: coverage agrees with a naive count and can be moved."""
    _, local, remote, plan, max_bytes = data.draw(pairs())
    sides = (local.shape, remote.shape)
    starts = [shape.block_size * data.draw(st.integers(0, 3)) for shape in sides]
    blocks = [
        data.draw(st.permutations(range(shape.num_blocks)))[: data.draw(st.integers(0, 5))]
        for shape in sides
    ]
    num_tokens = data.draw(st.one_of(st.none(), st.integers(0, 40)))

    def positions_of(side: int, idx: int) -> set[int]:
        first = starts[side] + idx * sides[side].block_size
        return set(range(first, first + sides[side].block_size))

    covered = [
        set().union(*(positions_of(side, idx) for idx in range(len(blocks[side]))))
        for side in range(2)
    ]
    common = covered[0] & covered[1]
    if num_tokens is not None:
        common &= set(range(num_tokens))
    touched = [
        [idx for idx in range(len(blocks[side])) if positions_of(side, idx) & common]
        for side in range(2)
    ]

    coverage = plan.coverage(
        *blocks, num_tokens=num_tokens, local_start=starts[0], remote_start=starts[1]
    )
    assert set(coverage.tokens) == common
    assert list(coverage.local) == touched[0]
    assert list(coverage.remote) == touched[1]
    for side, only in enumerate((coverage.local_only, coverage.remote_only)):
        assert sorted([*only, *touched[side]]) == list(range(len(blocks[side])))

    # Cut the tables to it and move.
    kept = [[blocks[side][idx] for idx in touched[side]] for side in range(2)]
    if common:
        starts = [starts[side] + touched[side][0] * sides[side].block_size for side in range(2)]
    table = Tables(kept[0], kept[1], starts[0], starts[1], coverage.tokens.stop)
    remote.fill(table.remote_blocks, table.remote_start)
    expected, _ = expected_after_reading(local, remote, table, positions=coverage.tokens)
    rows = plan.descriptors(*kept, **table.arguments)
    check_rows(local, remote, rows[0], rows[1], max_bytes)
    apply(*rows)
    assert_same(local.buffers, expected)


@many
@given(data=st.data())
def test_the_description_adds_up(data) -> None:
    model, local, remote, plan, _ = data.draw(pairs(same_blocks=True))
    table = data.draw(tables(local.shape, remote.shape))
    rows, _ = plan.descriptors(table.local_blocks, table.remote_blocks, **table.arguments)
    description = plan.describe(table.local_blocks, table.remote_blocks, **table.arguments)
    assert description.num_bytes == rows[:, 1].sum()
    assert description.num_descriptors == len(rows)
    (group,) = description.groups
    elements = model.num_layers * (2 if local.shape.has_values else 1) * model.head_dim
    elements *= len(local.shape.heads) * local.shape.block_size
    assert group.bytes_per_block == elements * model.itemsize
    assert group.shortest_run * group.runs_per_block <= group.bytes_per_block
    assert group.longest_run * group.runs_per_block >= group.bytes_per_block
    assert group.shortest_run % model.itemsize == 0
    assert 1 <= group.best_runs_per_block <= group.bytes_per_block


@many
@given(data=st.data())
def test_an_opaque_token_axis_moves_whole_blocks(data) -> None:
    """Pages that can be split by head but not by token: a tail is rounded up to the block."""
    model = replace(data.draw(models()), interleave=1)
    kv_heads = data.draw(st.sampled_from([2, 4, 6]))
    model = replace(model, kv_heads=kv_heads)
    size, remote_size = (data.draw(st.sampled_from([1, 2, 2 * kv_heads])) for _ in range(2))
    block_size = data.draw(st.integers(1, 5))
    rank = data.draw(st.integers(0, size - 1))
    layers = tuple(range(model.num_layers))

    def side_of(rank: int, size: int, seed: int) -> tuple[Side, KVCache]:
        shape = Shape(
            axes="BHNC",
            layers=layers,
            heads=held_heads(rank, size, kv_heads),
            num_blocks=6,
            block_size=block_size,
            head_dim=model.head_dim,
            itemsize=model.itemsize,
            # Axes outside the token axis may differ.
            order=data.draw(st.sampled_from(["BHNC", "HBNC", "LBHNC", "BLHNC", "BHLNC"])),
        )
        side = Side(shape, seed)
        cache = KVCache.from_tensors(
            side.tensors,
            axes="BHNC",
            kv_heads=kv_heads,
            tp=(rank, size),
            layers=layers,
            opaque_axes="N",
        )
        return side, cache

    local, local_cache = side_of(rank, size, 1)
    table = data.draw(tables(local.shape, local.shape))
    for source in read_sources(kv_heads, local=(rank, size), remote_size=remote_size):
        remote, remote_cache = side_of(source.rank, remote_size, 2)
        remote.fill(table.remote_blocks, table.remote_start)
        end = table.num_tokens
        whole_blocks = None if end is None else range(-(-end // block_size) * block_size)
        expected, _ = expected_after_reading(
            local, remote, table, positions=whole_blocks, heads=source.heads
        )
        plan = TransferPlan(local_cache.geometry, remote_cache.geometry, heads=source.heads)
        rows = plan.descriptors(table.local_blocks, table.remote_blocks, **table.arguments)
        check_rows(local, remote, *rows, None)
        apply(*rows)
        assert_same(local.buffers, expected)


def test_layers_of_one_group_may_have_strides_of_their_own() -> None:
    """Layers that adjoin only at block 0 are one run there and two elsewhere."""
    local = np.zeros((2, 2, 4), np.uint8)
    memory = np.arange(1, 81, dtype=np.uint8)
    # Blocks of layer 0 are at 0 and 12, of layer 1 at 4 and 32.
    remote = {
        "layer.0": np.lib.stride_tricks.as_strided(memory, (2, 4), (12, 1)),
        "layer.1": np.lib.stride_tricks.as_strided(memory[4:], (2, 4), (28, 1)),
    }
    plan = TransferPlan(
        KVCache.from_tensors({"all": local}, axes="BLD", kv_heads=None).geometry,
        KVCache.from_tensors(remote, axes="BD", kv_heads=None).geometry,
    )
    rows = plan.descriptors([0, 1], [0, 1])
    assert rows[0][:, 1].tolist() == [8, 4, 4]
    apply(*rows)
    for layer, array in enumerate(remote.values()):
        assert local[:, layer].tolist() == array.tolist()
