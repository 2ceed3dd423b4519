"""Every kind of cache between random engines, byte by byte: heads of their own, state, scales, …

A model is a list of bundles, each of which some layers hold: fields that have one block table. The
reference knows elements by their identity; numpy does the indexing. The engines differ in all that
may differ: tensor- and pipeline-parallel sizes, block sizes, order of dimensions, one tensor for
all fields of a layer or one each, and how layers are grouped.

Run more examples with ``HYPOTHESIS_MAX_EXAMPLES=5000``.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pynixlkv.connector.metadata import ParallelSizes
from pynixlkv.connector.scheduler import GroupSpec, cut_table
from pynixlkv.connector.tp_mapping import num_readers, ranks_to_tell, transfer_slices
from pynixlkv.errors import KVCorruptError, LayoutError, PlanError
from pynixlkv.geometry import Geometry, KVCache, Part
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import held_heads

from .reference import apply
from .test_plan_properties import many

GUARD = 64
NULL = 0
NUM_BLOCKS = 9


@dataclass(frozen=True)
class Field:
    """One thing that a layer holds."""

    kind: str
    kv_heads: int | None
    planes: int
    dim: int


@dataclass(frozen=True)
class Bundle:
    """Fields that use one block table, and the layers that have them."""

    name: str
    fields: tuple[Field, ...]
    layers: tuple[int, ...]
    tokens: int
    """Tokens per state; 0 for one slot per request."""
    itemsize: int
    knows_heads: bool = True


def draw_model(rng: random.Random) -> list[Bundle]:
    """Draw some kinds of caches, and layers for each."""
    heads = rng.choice([2, 4, 8])
    dim = lambda: rng.randint(1, 3)  # noqa: E731
    kinds = {
        "full": ([Field("kv", heads, 2, dim())], 1),
        "window": ([Field("kv", rng.choice([1, 2, 4]), 2, dim())], 1),
        "latent": ([Field("latent", None, 1, dim())], rng.choice([1, 4])),
        "page": ([Field("data", heads, 2, 4), Field("scales", heads, 2, 1)], 1),
        "conv": (
            [Field("x", heads, 3, dim()), Field("B", 2, 3, 2), Field("C", None, 3, 2)],
            0,
        ),
        "ssm": ([Field("ssm", heads, 1, 5)], 0),
    }
    chosen = rng.sample(sorted(kinds), rng.randint(1, 3))
    bundles, first = [], 0
    for name in chosen:
        fields, tokens = kinds[name]
        layers = tuple(range(first, first + rng.randint(1, 2)))
        first = layers[-1] + 1
        itemsize = rng.choice([1, 2, 4])
        bundles.append(Bundle(name, tuple(fields), layers, tokens, itemsize, rng.random() < 0.5))
    return bundles


def draw_size(rng: random.Random, model: list[Bundle]) -> int:
    """Draw a tensor-parallel size that all heads can be cut or replicated to."""
    counts = [f.kv_heads for bundle in model for f in bundle.fields if f.kv_heads]
    likely = (1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 16)
    sizes = [n for n in likely if all(h % n == 0 or n % h == 0 for h in counts)]
    return rng.choice(sizes)


@dataclass
class Layout:
    """How all ranks of an engine lay out a bundle."""

    block_size: int
    is_page: bool
    outside: str
    order: list[int]
    pad: int
    groups: list[tuple[int, ...]]
    letters: dict[str, str]
    tables: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    rule: GroupSpec = field(default_factory=lambda: GroupSpec(1))
    whole_tables: list[list[int]] = field(default_factory=list)
    """As an engine keeps them: with placeholders, and scratch slots behind."""


def draw_layout(rng: random.Random, bundle: Bundle, *, is_plain: bool) -> Layout:
    """Draw a layout; a plain one is a page whose parts have all dimensions but the block."""
    letters = {}
    outside = ["B"]
    common = {f.planes for f in bundle.fields}
    is_page = len(bundle.fields) > 1 and (is_plain or rng.random() < 0.6)
    inside = ["K"] if max(common) > 1 else []
    inside += ["N"] if bundle.tokens else []
    for letter in list(inside):
        if is_page and not is_plain and rng.random() < 0.5:
            inside.remove(letter)
            outside.append(letter)
    for each in bundle.fields:
        own = [*inside, "H", "D"] if is_page else [*inside, "H", "D", "B"]
        rng.shuffle(own)
        letters[each.kind] = "".join(own)
    outside += ["P"]
    rng.shuffle(outside)
    cut = rng.randint(0, len(bundle.layers))
    groups = [part for part in (bundle.layers[:cut], bundle.layers[cut:]) if part]
    return Layout(
        block_size=rng.choice([1, 2, 3, 4]) if bundle.tokens else 1,
        is_page=is_page,
        outside="".join(outside),
        order=rng.sample(range(5), 5),
        pad=rng.randint(0, 2),
        groups=groups,
        letters=letters,
    )


def draw_tables(rng: random.Random, bundle: Bundle, layout: Layout, end: int, slots: int) -> None:
    """Draw a block table, and where it begins, for each group of layers."""
    unit = layout.block_size * bundle.tokens
    by_position = slots == 1 and rng.random() < 0.5
    per_slot = rng.randint(1, 4)
    layout.rule = GroupSpec(unit)
    if not bundle.tokens:
        layout.rule = GroupSpec(0, null_block=NULL, slots=slots)
        if by_position:
            layout.rule = GroupSpec(0, state_tokens=per_slot, null_block=NULL)
    for _ in layout.groups:
        blocks = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
        if bundle.tokens:
            needed = -(-end // unit)
            first = rng.randint(max(0, needed - len(blocks)), needed - 1)
            layout.tables.append(blocks[: needed - first])
            layout.starts.append(first * unit)
            layout.whole_tables.append([NULL] * first + layout.tables[-1])
            continue
        scratch = blocks[slots : slots + rng.randint(0, 2)]
        nulls = [NULL] * (-(-end // per_slot) - 1 if by_position else rng.randint(0, 3))
        state = blocks[:slots] if by_position else [blocks[0], *nulls[1:], *blocks[1:slots]]
        layout.whole_tables.append([*nulls, *state, *scratch])
        layout.tables.append(blocks[:slots])
        layout.starts.append(0)


class Tensors:
    """The memory of one bundle on one rank."""

    def __init__(
        self, bundle: Bundle, layout: Layout, tp: tuple[int, int], layers: set[int], seed: int
    ) -> None:
        self.bundle, self.layout, self.tp = bundle, layout, tp
        self.layers = [layer for layer in bundle.layers if layer in layers]
        garbage = np.random.default_rng(seed)
        self.buffers: list[np.ndarray] = []
        self.arrays: dict[tuple[int, str], np.ndarray] = {}
        self.begin: dict[str, int] = {}
        self.heads = {f.kind: held_heads(*tp, f.kv_heads) for f in bundle.fields}
        self.sizes = sizes = {f.kind: self.extents(f) for f in bundle.fields}
        for layer in self.layers:
            if layout.is_page:
                length = 0
                for each in bundle.fields:
                    self.begin[each.kind] = length
                    length += prod(sizes[each.kind][x] for x in layout.letters[each.kind])
                extents = {**sizes[bundle.fields[0].kind], "P": length}
                shape = [extents[x] for x in layout.outside]
                self.arrays[layer, ""] = self.allocate(garbage, shape)
            else:
                for each in bundle.fields:
                    shape = [sizes[each.kind][x] for x in layout.letters[each.kind]]
                    self.arrays[layer, each.kind] = self.allocate(garbage, shape)

    def allocate(self, garbage: np.random.Generator, shape: list[int]) -> np.ndarray:
        """Return an array of garbage between guards, its dimensions in an order of their own."""
        order = [dim for dim in self.layout.order if dim < len(shape)]
        extents = [shape[dim] for dim in order]
        extents[-1] += self.layout.pad
        nbytes = prod(extents) * self.bundle.itemsize
        buffer = garbage.integers(0, 256, nbytes + 2 * GUARD, np.uint8)
        self.buffers.append(buffer)
        whole = buffer[GUARD : GUARD + nbytes].view(f"u{self.bundle.itemsize}").reshape(extents)
        return whole[..., : shape[order[-1]]].transpose(np.argsort(order))

    def extents(self, each: Field) -> dict[str, int]:
        return {
            "B": NUM_BLOCKS,
            "K": each.planes,
            "N": self.layout.block_size,
            "H": len(self.heads[each.kind]),
            "D": each.dim,
        }

    def cache(self, fault: str = "") -> list[KVCache]:
        """Describe each group of layers that this rank has."""
        caches = []
        for index, members in enumerate(self.layout.groups):
            layers = [layer for layer in members if layer in self.layers]
            if not layers:
                continue
            name = f"{self.bundle.name}{index}"
            options: dict[str, Any] = {"tp": self.tp, "layers": layers, "table": name}
            options["tokens_per_state"] = max(self.bundle.tokens, 1)
            if self.layout.is_page:
                fields = list(self.bundle.fields)
                if fault == "wrong range of channels":
                    fields[1:] = fields[:0:-1]
                parts = []
                for each, real in zip(fields, self.bundle.fields, strict=True):
                    letters = self.layout.letters[real.kind]
                    if fault == "scales of another head" and each.kind == "scales":
                        letters = letters[::-1]
                    sizes = {
                        x: n for x, n in self.extents(each).items() if x in letters and x != "H"
                    }
                    parts.append(Part(each.kind, letters, sizes, each.kv_heads))
                caches.append(
                    KVCache.from_parts(
                        {str(layer): self.arrays[layer, ""] for layer in layers},
                        axes=self.layout.outside,
                        parts=parts,
                        group=name,
                        kind=self.bundle.name,
                        **options,
                    )
                )
                continue
            for each in self.bundle.fields:
                is_one = each.kv_heads is not None and len(self.heads[each.kind]) == 1
                guesses = is_one and not self.bundle.knows_heads
                caches.append(
                    KVCache.from_tensors(
                        {str(layer): self.arrays[layer, each.kind] for layer in layers},
                        axes=self.layout.letters[each.kind],
                        kv_heads=self.tp[1] if guesses else each.kv_heads,
                        has_exact_heads=not guesses,
                        group=f"{name}.{each.kind}",
                        kind=f"{self.bundle.name}.{each.kind}",
                        **options,
                    )
                )
        return caches

    def elements(self):
        """Yield (layer, kind, plane, head, position, dim) of all in the tables, and its place."""
        for index, members in enumerate(self.layout.groups):
            start, table = self.layout.starts[index], self.layout.tables[index]
            for layer, each in itertools.product(members, self.bundle.fields):
                if layer not in self.layers:
                    continue
                for (entry, block), slot, plane, (at, head), dim in itertools.product(
                    enumerate(table),
                    range(self.layout.block_size),
                    range(each.planes),
                    enumerate(self.heads[each.kind]),
                    range(each.dim),
                ):
                    position = entry
                    if self.bundle.tokens:
                        state = entry * self.layout.block_size + slot
                        position = start + state * self.bundle.tokens
                    where = {"B": block, "K": plane, "N": slot, "H": at, "D": dim}
                    yield (
                        (layer, each.kind, plane, head, position, dim),
                        self.place(each, where),
                        (layer if self.layout.is_page else (layer, each.kind)),
                    )

    def place(self, each: Field, where: dict[str, int]) -> tuple[int, ...]:
        """Return the index of an element in its array."""
        letters, sizes = self.layout.letters[each.kind], self.sizes[each.kind]
        if self.layout.is_page:
            inside = 0
            for letter in letters:
                inside = inside * sizes[letter] + where[letter]
            where = {**where, "P": self.begin[each.kind] + inside}
            return tuple(where[letter] for letter in self.layout.outside)
        return tuple(where[letter] for letter in letters)

    def array(self, key: int | tuple[int, str]) -> np.ndarray:
        return self.arrays[key] if isinstance(key, tuple) else self.arrays[key, ""]

    def value(self, identity: tuple) -> int:
        layer, kind, plane, head, position, dim = identity
        number = (((layer * 8 + plane) * 64 + head) * 4096 + position) * 64 + dim
        number = number * 8 + sum(map(ord, kind)) % 8 + 1
        return (number * 0x9E3779B97F4A7C15 % 2**64) >> (64 - 8 * self.bundle.itemsize)


@dataclass
class Rank:
    """One rank of an engine."""

    place: tuple[int, int]
    tensors: list[Tensors]
    cache: KVCache

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry.from_bytes(self.cache.geometry.to_bytes())


class Engine:
    """An engine's ranks, which lay out their caches alike."""

    def __init__(
        self,
        rng: random.Random,
        model: list[Bundle],
        end: int,
        slots: int,
        seed: int,
        *,
        is_plain: bool = False,
    ) -> None:
        self.sizes = ParallelSizes(tp=draw_size(rng, model), pp=rng.choice([1, 1, 2]))
        if is_plain:
            self.sizes = ParallelSizes()
        self.layouts = [draw_layout(rng, bundle, is_plain=is_plain) for bundle in model]
        for bundle, layout in zip(model, self.layouts, strict=True):
            draw_tables(rng, bundle, layout, end, slots)
        layers = sorted(layer for bundle in model for layer in bundle.layers)
        if len(layers) < self.sizes.pp:
            self.sizes = ParallelSizes(tp=self.sizes.tp)
        middle = rng.randint(1, len(layers) - 1) if self.sizes.pp == 2 else len(layers)
        self.ranks: list[Rank] = []
        self.model = model
        for stage, held in enumerate([layers[:middle], layers[middle:]][: self.sizes.pp]):
            for rank in range(self.sizes.tp):
                seed += 1
                self.ranks.append(self.make((stage, rank), set(held), seed))

    def make(self, place: tuple[int, int], layers: set[int], seed: int, fault: str = "") -> Rank:
        tensors = [
            Tensors(bundle, layout, (place[1], self.sizes.tp), layers, seed)
            for bundle, layout in zip(self.model, self.layouts, strict=True)
        ]
        caches = [cache for each in tensors for cache in each.cache(fault)]
        return Rank(place, tensors, KVCache.combine(*caches))

    def tables(self, names, end: int) -> tuple[dict, dict]:
        """Return the block tables and the starts of some groups, cut as a connector does."""
        tables, starts = {}, {}
        for bundle, layout in zip(self.model, self.layouts, strict=True):
            for index in range(len(layout.groups)):
                for name in names:
                    if name.split(".")[0] == f"{bundle.name}{index}":
                        tables[name], starts[name] = cut_table(
                            layout.rule, layout.whole_tables[index], layout.starts[index], end
                        )
        return tables, starts


def fill(engine: Engine) -> None:
    for rank in engine.ranks:
        for tensors in rank.tensors:
            for identity, index, key in tensors.elements():
                tensors.array(key)[index] = tensors.value(identity)


def read(consumer: Engine, mine: Rank, producer: Engine, theirs: Rank, end: int) -> None:
    """Read all that one rank gets from another, and compare digests."""
    for part in transfer_slices(
        mine.cache.geometry,
        mine.place,
        consumer.sizes,
        theirs.geometry,
        theirs.place,
        producer.sizes,
    ):
        plan = TransferPlan(
            mine.cache.geometry,
            theirs.geometry,
            groups=part.groups,
            heads=part.heads,
            layers=part.layers,
        )
        local, local_starts = consumer.tables([name for name, _ in plan.pairs], end)
        remote, remote_starts = producer.tables([name for _, name in plan.pairs], end)
        positions: dict[str, Any] = {
            "num_tokens": end,
            "local_start": local_starts,
            "remote_start": remote_starts,
        }
        apply(*plan.descriptors(local, remote, **positions))
        scopes = plan.digest_scopes(local, remote, **positions)
        digest = theirs.cache.digest(remote, start=remote_starts, scopes=scopes)
        plan.verify(mine.cache, digest, local, start=local_starts, scopes=scopes)


def begins(engine: Engine, bundle: int, layer: int) -> int:
    """Return the position from which the table of a layer's group begins."""
    layout = engine.layouts[bundle]
    return next(s for g, s in zip(layout.groups, layout.starts, strict=True) if layer in g)


def expected(consumer: Engine, mine: Rank, producer: Engine, end: int) -> list[np.ndarray]:
    """Return what the buffers of a rank have to be after it has read from all ranks."""
    found = []
    for number, tensors in enumerate(mine.tensors):
        before = [buffer.copy() for buffer in tensors.buffers]
        for identity, index, key in tensors.elements():
            layer, position = identity[0], identity[4]
            if not tensors.bundle.tokens or begins(producer, number, layer) <= position < end:
                tensors.array(key)[index] = tensors.value(identity)
        found += [buffer.copy() for buffer in tensors.buffers]
        for buffer, old in zip(tensors.buffers, before, strict=True):
            buffer[:] = old
    return found


def check(consumer: Engine, producer: Engine, end: int) -> None:
    """Read with every rank, compare every byte of both engines, and who tells whom."""
    fill(producer)
    tellers: Counter[tuple[int, int]] = Counter()
    kept = [b.copy() for rank in producer.ranks for t in rank.tensors for b in t.buffers]
    for mine in consumer.ranks:
        wanted = expected(consumer, mine, producer, end)
        groups = mine.cache.geometry.groups
        told = ranks_to_tell(groups, mine.place, consumer.sizes, producer.sizes)
        tellers.update(told)
        for theirs in producer.ranks:
            if theirs.place in told:
                read(consumer, mine, producer, theirs, end)
        buffers = [buffer for tensors in mine.tensors for buffer in tensors.buffers]
        for buffer, right in zip(buffers, wanted, strict=True):
            wrong = np.flatnonzero(buffer != right)
            assert not wrong.size, f"rank {mine.place}: {wrong.size} wrong bytes, at {wrong[:8]}"
    for rank in producer.ranks:
        groups = rank.cache.geometry.groups
        expects = num_readers(groups, rank.place, producer.sizes, consumer.sizes)
        assert tellers[rank.place] == expects, f"rank {rank.place} waits for {expects} readers"
    after = [b for rank in producer.ranks for t in rank.tensors for b in t.buffers]
    for old, new in zip(kept, after, strict=True):
        assert np.array_equal(old, new), "the producer's memory was written"


@many
@given(seed=st.integers(0, 2**32))
def test_every_kind_moves_between_any_two_engines(seed: int) -> None:
    rng = random.Random(seed)
    model = draw_model(rng)
    end, slots = rng.randint(1, 12), rng.randint(1, 2)
    engines = [Engine(rng, model, end, slots, seed=100 * side) for side in range(2)]
    check(engines[0], engines[1], end)


def model_with(name: str) -> list[Bundle]:
    """Return a model of one bundle of this name."""
    drawn = (bundle for seed in itertools.count() for bundle in draw_model(random.Random(seed)))
    return [next(bundle for bundle in drawn if bundle.name == name)]


def page_engines(name: str) -> list[Engine]:
    """Return two engines of one rank, whose layers hold several fields in one page."""
    rng = random.Random(1)
    model = model_with(name)
    return [Engine(rng, model, 7, 1, seed=side, is_plain=True) for side in range(2)]


@pytest.mark.parametrize(
    ("name", "fault"), [("conv", "wrong range of channels"), ("page", "scales of another head")]
)
def test_a_page_that_is_described_wrongly_is_caught(name: str, fault: str) -> None:
    consumer, producer = page_engines(name)
    check(consumer, producer, 7)
    producer.ranks[0] = producer.make((0, 0), set(range(9)), 5, fault)
    with pytest.raises(AssertionError, match="wrong bytes"):
        check(consumer, producer, 7)


def test_a_null_that_is_written_is_caught() -> None:
    consumer, producer = page_engines("conv")
    check(consumer, producer, 7)
    for engine in (consumer, producer):
        (layout,) = engine.layouts
        layout.rule = GroupSpec(0)
        layout.whole_tables = [[NULL, *table] for table in layout.tables]
    with pytest.raises(AssertionError, match="wrong bytes"):
        check(consumer, producer, 7)


@pytest.mark.parametrize("name", ["full", "latent", "page", "conv", "ssm"])
def test_digests_find_one_wrong_element_of_any_kind(name: str) -> None:
    rng, model = random.Random(1), model_with(name)
    engine = Engine(rng, model, 7, 1, seed=3)
    fill(engine)
    rank = engine.ranks[0]
    tables, starts = engine.tables(rank.cache.geometry.names, 7)
    clean = rank.cache.digest(tables, start=starts)
    (tensors,) = rank.tensors
    identity, index, key = rng.choice(list(tensors.elements()))
    tensors.array(key)[index] ^= 1
    with pytest.raises(KVCorruptError, match=f"layer {identity[0]}"):
        rank.cache.digest(tables, start=starts).check(clean)


def zeros(*shape: int) -> dict[str, np.ndarray]:
    return {"0": np.zeros(shape, np.uint8)}


def state(group: str = "state", **options) -> KVCache:
    return KVCache.from_tensors(zeros(4, 8), axes="BD", kv_heads=None, group=group, **options)


def pages(group: str = "kv", block_size: int = 4, **options) -> KVCache:
    options = {"kv_heads": 2, **options}
    return KVCache.from_tensors(zeros(4, 2, block_size, 8), axes="BHND", group=group, **options)


def parts_of(*sizes: int, tensor: np.ndarray, axes: str = "BP", letters: str = "D") -> KVCache:
    parts = [Part(str(i), letters, {"D": size}, None) for i, size in enumerate(sizes)]
    return KVCache.from_parts({"0": tensor}, axes=axes, parts=parts)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: parts_of(3, 4, tensor=np.zeros((4, 8))), "P has 8 elements, the parts .* 7"),
        (lambda: parts_of(3, 6, tensor=np.zeros((4, 8))), r"shape \(6,\) from 3 on does not fit"),
        (lambda: parts_of(8, tensor=np.zeros((4, 8)), axes="BD"), "expected one dimension P"),
        (
            lambda: parts_of(8, tensor=np.zeros((2, 4, 2)), axes="PBP"),
            "expected one dimension P",
        ),
        (
            lambda: parts_of(8, tensor=np.zeros((4, 2, 8))[..., :4], axes="BPP"),
            "is not contiguous in dimensions 1 to 2, which hold parts",
        ),
        (
            lambda: parts_of(8, tensor=np.zeros((4, 8)), letters="NHD"),
            "part '0' has axes 'NHD' .*expected a size for each letter but H",
        ),
        (lambda: state(tokens_per_state=4), "tokens_per_state needs a token axis"),
        (lambda: pages(tokens_per_state=0), "cannot be sent|tokens per state is 0"),
        (
            lambda: pages(tokens_per_state=2, dcp=(0, 2)),
            "a state of 2 tokens cannot be dealt to 2 context ranks",
        ),
        (lambda: pages(has_exact_heads=False), "kv_heads is 2, an upper bound; expected tp=1"),
        (
            lambda: KVCache.combine(pages("a", kind="kv"), pages("b", kind="kv")),
            "groups 'a' and 'b' both hold 'kv' of layer 0",
        ),
        (
            lambda: KVCache.combine(pages(), state(table="kv")),
            "'state' shares table 'kv', but of the two only one has a token axis",
        ),
    ],
)
def test_what_cannot_be_described_is_refused(make, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


def test_groups_of_one_table_are_at_different_bytes() -> None:
    memory = np.zeros((4, 8), np.uint8)
    options: dict[str, Any] = {"axes": "BD", "kv_heads": None, "table": "t"}
    halves = [
        KVCache.from_tensors({"0": memory[:, at : at + 4]}, group=str(at), **options)
        for at in (0, 2)
    ]
    with pytest.raises(LayoutError, match="overlap in memory, and their groups share a block tab"):
        KVCache.combine(*halves)


def test_a_region_is_of_the_tensor_that_has_its_elements() -> None:
    narrow = np.zeros((4, 4, 8), np.uint8)
    tensors = {"narrow": narrow, "wide": narrow.view(np.float16)}
    cache = KVCache.combine(
        *(
            KVCache.from_tensors({"0": t}, axes="BND", kv_heads=None, group=name, kind=name)
            for name, t in tensors.items()
        )
    )
    for group in cache.geometry.groups:
        (region,) = group.regions
        assert cache.owner_of(region, group.element_bytes) is tensors[group.name]


def test_attention_and_the_parts_of_state_lie_in_one_pool() -> None:
    memory = np.zeros((4, 32), np.uint8)
    parts = [Part("x", "D", {"D": 24}, None), Part("B", "D", {"D": 8}, None)]
    cache = KVCache.combine(
        KVCache.from_tensors({"0": memory.reshape(4, 4, 8)}, axes="BND", kv_heads=None),
        KVCache.from_parts({"1": memory}, axes="BP", parts=parts, group="conv", layers=[1]),
    ).geometry
    other = np.ones((8, 32), np.uint8)
    theirs = KVCache.combine(
        KVCache.from_tensors({"0": other[:4].reshape(4, 4, 8)}, axes="BND", kv_heads=None),
        KVCache.from_parts({"1": other[4:]}, axes="BP", parts=parts, group="conv", layers=[1]),
    ).geometry
    plan = TransferPlan(cache, theirs)
    apply(*plan.descriptors({"kv": [1], "conv": [3]}, {"kv": [0], "conv": [2]}))
    assert memory.sum(axis=1).tolist() == [0, 32, 0, 32]
    for tables in ({"kv": [1], "conv": [1]}, {"kv": [1], "conv": [2, 2]}):
        with pytest.raises(PlanError, match="would be written twice"):
            plan.descriptors(tables, {"kv": [0], "conv": [2, 3][: len(tables["conv"])]})


def test_what_the_two_sides_mean_by_a_group_must_agree() -> None:
    whole = pages(kv_heads=2).geometry
    for other, text in (
        (pages(tokens_per_state=2).geometry, "kv.tokens_per_state is 1 here and 2 there"),
        (pages(kv_heads=4, tp=(0, 2)).geometry, "kv.kv_heads is 2 here and 4 there"),
    ):
        with pytest.raises(PlanError, match=text):
            TransferPlan(whole, other)


def test_one_table_is_of_blocks_of_one_size() -> None:
    cache = KVCache.combine(pages("a", table="t"), pages("b", block_size=2, table="t")).geometry
    plan = TransferPlan(cache, cache)
    plan.descriptors({"a": [1], "b": [1, 2]}, {"t": [1], "b": [0, 3]})
    with pytest.raises(PlanError, match="groups 'a' and 'b', whose blocks hold 4 and 2 tokens"):
        plan.descriptors([1], [1])


def test_a_group_without_selected_layers_moves_nothing() -> None:
    def kv(group: str, *layers: int) -> KVCache:
        tensors = {str(layer): np.zeros((4, 4, 8), np.uint8) for layer in layers}
        return KVCache.from_tensors(
            tensors, axes="MLA", kv_heads=None, layers=layers, group=group, kind="kv"
        )

    local = KVCache.combine(kv("a", 0), kv("b", 1, 2)).geometry
    remote = KVCache.combine(kv("x", 0, 1), kv("y", 2)).geometry
    plan = TransferPlan(local, remote)
    assert plan.pairs == [("a", "x"), ("b", "x"), ("b", "y")]
    some = TransferPlan(local, remote, layers=[0])
    rows, _ = some.descriptors({"a": [1], "b": [2]}, {"x": [3]})
    assert rows[:, 1].tolist() == [32]
