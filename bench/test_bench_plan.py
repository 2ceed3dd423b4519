"""What it costs to turn block tables into descriptors, beside numpy and beside NIXL's own lists.

Every case checks its result. How to read the numbers: README.md.
"""

from __future__ import annotations

import logging
import pickle
import platform
import tracemalloc
from dataclasses import dataclass
from importlib import metadata

import numpy as np
import pytest

from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan

NUM_LAYERS = 80
POOL_BLOCKS = 8192
TABLE_BLOCKS = 6250  # times 80 layers, times K and V: 1,000,000
BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 16, 1, 8
HALF_BYTES = BLOCK_SIZE * NUM_HEADS * HEAD_DIM * 2


def make_cache(num_layers: int, num_blocks: int) -> KVCache:
    """A cache with K and V apart: two regions per layer, a block of each is one run."""
    shape = (2, num_blocks, NUM_HEADS, BLOCK_SIZE, HEAD_DIM)
    tensors = {f"layer.{i}": np.empty(shape, np.float16) for i in range(num_layers)}
    return KVCache.from_tensors(tensors, axes="KBHND", kv_heads=NUM_HEADS)


def bases(cache: KVCache) -> np.ndarray:
    """Return the address of block 0 of each layer's K and V, in the order of layers."""
    (group,) = cache.geometry.groups
    return np.array(
        [region.address + kv * region.kv.stride for region in group.regions for kv in range(2)],
        np.uint64,
    )


@dataclass(frozen=True)
class Workload:
    """Two caches, scattered tables, and a plan between them."""

    local: KVCache
    remote: KVCache
    plan: TransferPlan
    local_blocks: np.ndarray
    remote_blocks: np.ndarray

    @property
    def num_descriptors(self) -> int:
        return 2 * NUM_LAYERS * len(self.local_blocks)

    def cut(self, num_blocks: int) -> Workload:
        return Workload(
            self.local,
            self.remote,
            self.plan,
            self.local_blocks[:num_blocks],
            self.remote_blocks[:num_blocks],
        )


def scattered_tables() -> tuple[np.ndarray, np.ndarray]:
    """Two random tables without a pair of blocks that adjoins another on both sides."""
    random = np.random.default_rng(7)
    while True:
        here, there = (random.permutation(POOL_BLOCKS)[:TABLE_BLOCKS] for _ in range(2))
        order = np.argsort(here)
        joins = (np.diff(here[order]) == 1) & (np.diff(there[order]) == 1)
        if not joins.any():
            return here, there


@pytest.fixture(scope="module")
def workload() -> Workload:
    local, remote = (make_cache(NUM_LAYERS, POOL_BLOCKS) for _ in range(2))
    plan = TransferPlan(local.geometry, remote.geometry)
    return Workload(local, remote, plan, *scattered_tables())


def numpy_by_row(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The vectorised path for any layout: expand all rows, sort them, merge neighbours."""
    step = np.uint64(HALF_BYTES)
    here, there = (
        (bases(cache)[:, None] + blocks.astype(np.uint64) * step).reshape(-1)
        for cache, blocks in (
            (work.local, work.local_blocks),
            (work.remote, work.remote_blocks),
        )
    )
    order = np.argsort(here, kind="stable")
    here, there = here[order], there[order]
    joins = (np.diff(here) == step) & (np.diff(there) == step)
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.diff(np.append(first, len(here))).astype(np.uint64) * step
    device = np.zeros(len(first), np.uint64)
    return (
        np.stack([here[first], lengths, device], axis=1),
        np.stack([there[first], lengths, device], axis=1),
    )


def numpy_by_block(work: Workload, out=None) -> tuple[np.ndarray, np.ndarray]:
    """The fastest numpy we know, for this layout only: sort and merge one table, then repeat it."""
    step = np.uint64(HALF_BYTES)
    order = np.argsort(work.local_blocks)
    here, there = work.local_blocks[order], work.remote_blocks[order]
    joins = (np.diff(here) == 1) & (np.diff(there) == 1)
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.diff(np.append(first, len(here))).astype(np.uint64) * step
    region_order = np.argsort(bases(work.local))
    sides = []
    for side, (cache, blocks) in enumerate(((work.local, here), (work.remote, there))):
        shape = (2 * NUM_LAYERS, len(first), 3)
        rows = np.empty(shape, np.uint64) if out is None else out[side].reshape(shape)
        region_bases = bases(cache)[region_order]
        np.add(region_bases[:, None], blocks[first].astype(np.uint64) * step, out=rows[:, :, 0])
        rows[:, :, 1] = lengths
        rows[:, :, 2] = 0
        sides.append(rows.reshape(-1, 3))
    return sides[0], sides[1]


def pynixlkv_rows(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    return work.plan.descriptors(work.local_blocks, work.remote_blocks)


BUFFERS = (
    np.empty((2 * NUM_LAYERS * TABLE_BLOCKS, 3), np.uint64),
    np.empty((2 * NUM_LAYERS * TABLE_BLOCKS, 3), np.uint64),
)


def pynixlkv_into_buffers(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    return work.plan.descriptors(work.local_blocks, work.remote_blocks, out=BUFFERS)


def numpy_into_buffers(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    return numpy_by_block(work, BUFFERS)


@pytest.fixture(scope="module")
def nixl_agent():
    api = pytest.importorskip("nixl_cu12._api", reason="needs the nixl-cu12 wheel and torch")
    logging.getLogger("nixl_cu12").setLevel(logging.ERROR)
    return api.nixl_agent("bench-plan", api.nixl_agent_config(backends=[]))


def numpy_and_nixl(work: Workload, agent) -> tuple[object, object]:
    """Rows from numpy, then NIXL's own lists from them."""
    here, there = numpy_by_row(work)
    return agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")


def pynixlkv_and_nixl(work: Workload, agent) -> tuple[object, object]:
    """Rows from a plan, then NIXL's own lists from them."""
    here, there = pynixlkv_rows(work)
    return agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")


def tuples_and_nixl(work: Workload, agent) -> tuple[object, object]:
    """Rows as tuples made in loops, then NIXL's own lists, as connectors without arrays do."""
    sides = []
    pairs = sorted(zip(work.local_blocks.tolist(), work.remote_blocks.tolist(), strict=True))
    regions = sorted(zip(bases(work.local).tolist(), bases(work.remote).tolist(), strict=True))
    for side in range(2):
        rows = [
            (region[side] + pair[side] * HALF_BYTES, HALF_BYTES, 0)
            for region in regions
            for pair in pairs
        ]
        sides.append(agent.get_xfer_descs(rows, "DRAM"))
    return sides[0], sides[1]


def note(benchmark, rows: int, work: Workload, **more: object) -> None:
    benchmark.extra_info.update(
        descriptors=rows,
        bytes=work.num_descriptors * HALF_BYTES,
        layout="KBHND, K and V apart",
        layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        transport=None,
        numpy=np.__version__,
        pynixlkv=metadata.version("pynixlkv"),
        machine=platform.machine(),
        **more,
    )


def run(benchmark, function, *args, rounds: int = 11):
    return benchmark.pedantic(function, args=args, rounds=rounds, iterations=1, warmup_rounds=1)


@pytest.mark.benchmark(group="1,000,000 descriptors")
@pytest.mark.parametrize(
    "path",
    [pynixlkv_rows, numpy_by_block, numpy_by_row, pynixlkv_into_buffers, numpy_into_buffers],
)
def test_scattered_blocks(benchmark, workload, path) -> None:
    """Rows for both sides; all paths give the same bytes."""
    here, there = run(benchmark, path, workload)
    expected = numpy_by_row(workload)
    assert here.tobytes() == expected[0].tobytes()
    assert there.tobytes() == expected[1].tobytes()
    assert len(here) == workload.num_descriptors == 1_000_000
    assert here.nbytes == there.nbytes == 24 * len(here)
    note(benchmark, len(here), workload)


@pytest.mark.benchmark(group="1,000,000 descriptors as NIXL lists")
@pytest.mark.parametrize("path", [pynixlkv_and_nixl, numpy_and_nixl, tuples_and_nixl])
def test_scattered_blocks_as_nixl_lists(benchmark, workload, nixl_agent, path) -> None:
    """Lists of NIXL for both sides; the rows in them are compared byte by byte."""
    lists = run(benchmark, path, workload, nixl_agent, rounds=2)
    expected = numpy_by_row(workload)
    for side, rows in zip(lists, expected, strict=True):
        # NIXL's serialised form holds the rows as they lie in memory.
        assert rows.tobytes() in pickle.dumps(side)
        assert side.descCount() == len(rows) == 1_000_000
    note(benchmark, lists[0].descCount(), workload, nixl=metadata.version("nixl-cu12"))


@pytest.mark.benchmark(group="cost per row")
@pytest.mark.parametrize("num_descriptors", [40_000, 200_000, 1_000_000])
def test_cost_is_linear_in_rows(benchmark, workload, num_descriptors) -> None:
    """Compare the times of the three sizes: they should be as 1 to 5 to 25."""
    part = workload.cut(num_descriptors // (2 * NUM_LAYERS))
    here, _ = run(benchmark, pynixlkv_rows, part)
    assert len(here) == part.num_descriptors == num_descriptors
    note(benchmark, len(here), part)


def test_memory_is_24_bytes_per_row_and_side(workload) -> None:
    """Peak of the arrays while rows are made, without what numpy keeps otherwise."""
    tracemalloc.start()
    try:
        here, _ = pynixlkv_rows(workload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    tables = 4 * 8 * len(workload.local_blocks)
    assert peak <= 2 * 24 * workload.num_descriptors + tables + 100_000
    assert here.nbytes == 24 * len(here)


@pytest.mark.benchmark(group="making a plan")
@pytest.mark.parametrize("num_blocks", [1_000, 30_000, 1_000_000])
def test_making_a_plan_does_not_depend_on_the_pool(benchmark, num_blocks) -> None:
    """The three times should be equal."""
    shape = (2, num_blocks, 1, 1, 1)
    caches = [
        KVCache.from_tensors(
            {f"layer.{i}": np.empty(shape, np.float16) for i in range(NUM_LAYERS)},
            axes="KBHND",
            kv_heads=1,
        )
        for _ in range(2)
    ]
    geometries = [cache.geometry for cache in caches]
    plan = run(benchmark, TransferPlan, *geometries, rounds=20)
    # One block of each layer's K and V.
    here, _ = plan.descriptors([num_blocks - 1], [0])
    assert len(here) == 2 * NUM_LAYERS
    benchmark.extra_info.update(num_blocks=num_blocks, layers=NUM_LAYERS)


@pytest.mark.benchmark(group="merging 15,000 contiguous pairs")
@pytest.mark.parametrize("order", ["in order", "reversed", "shuffled"])
def test_merging_wins_in_any_order(benchmark, order) -> None:
    """Contiguous blocks on both sides are one run per region, however the tables list them."""
    num_blocks = 15_000
    local, remote = (make_cache(1, 16_000) for _ in range(2))
    plan = TransferPlan(local.geometry, remote.geometry)
    pairs = np.arange(num_blocks)
    if order == "reversed":
        pairs = pairs[::-1]
    elif order == "shuffled":
        pairs = np.random.default_rng(3).permutation(num_blocks)
    here, there = run(benchmark, plan.descriptors, pairs + 7, pairs + 900, rounds=10)
    for rows, cache, first in ((here, local, 7), (there, remote, 900)):
        expected = [
            [base + first * HALF_BYTES, num_blocks * HALF_BYTES, 0]
            for base in bases(cache).tolist()
        ]
        assert rows.tolist() == expected
    benchmark.extra_info.update(pairs=num_blocks, descriptors=len(here))
