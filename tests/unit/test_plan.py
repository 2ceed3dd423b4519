"""TransferPlan by example: real bytes for a few pairs of layouts, and every refusal."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch

from pynixlkv.errors import PlanError
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan, physical_blocks
from pynixlkv.topology import read_sources
from pynixlkv.types import MemoryType, Operation

BLOCKS, HEADS, TOKENS, DIM = 6, 4, 8, 16


class Made:
    """A cache whose layers can be looked at as (block, kv, head, token, dim)."""

    def __init__(self, axes, *, layers=(0,), heads=HEADS, tokens=TOKENS, blocks=BLOCKS, **options):
        extents = {"K": 2, "B": blocks, "H": heads, "N": tokens, "D": DIM, "C": 2 * DIM}
        random = np.random.default_rng(len(axes) + tokens)
        shape = [extents[letter] for letter in axes]
        self.axes = axes
        self.tensors = {
            f"layer.{i}": random.integers(0, 2**16, shape).astype(np.uint16) for i in layers
        }
        self.cache = KVCache.from_tensors(
            self.tensors,
            axes=axes,
            **({"kv_heads": heads, "layers": list(layers)} | options),
        )
        self.geometry = self.cache.geometry

    def __getitem__(self, layer: int) -> np.ndarray:
        tensor, axes = self.tensors[f"layer.{layer}"], self.axes
        if "C" in axes:
            tensor = np.stack(np.split(tensor, 2, axis=-1))
            axes = "K" + axes.replace("C", "D")
        missing = [letter for letter in "BKHND" if letter not in axes]
        tensor = tensor[(None,) * len(missing)]
        axes = "".join(missing) + axes
        return tensor.transpose([axes.index(letter) for letter in "BKHND"])


def move(rows: tuple[np.ndarray, np.ndarray], operation: Operation = Operation.READ) -> None:
    for local, remote in zip(*(side.tolist() for side in rows), strict=True):
        assert local[1] == remote[1]
        pair = (local[0], remote[0])
        target, source = pair if operation == Operation.READ else pair[::-1]
        ctypes.memmove(target, source, local[1])


def read(local: Made, remote: Made, *tables, plan_options=None, **options) -> TransferPlan:
    plan = TransferPlan(local.geometry, remote.geometry, **(plan_options or {}))
    move(plan.descriptors(*tables, **options))
    return plan


def plan_of_equals(**options) -> TransferPlan:
    return TransferPlan(Made("KBHND", **options).geometry, Made("KBHND", **options).geometry)


def test_equal_layouts_move_whole_blocks() -> None:
    local, remote = Made("KBHND", layers=(0, 1)), Made("KBHND", layers=(0, 1), tokens=TOKENS)
    before = local[1][4].copy()
    plan = read(local, remote, [5, 0], [2, 3])
    for layer in (0, 1):
        assert (local[layer][5] == remote[layer][2]).all()
        assert (local[layer][0] == remote[layer][3]).all()
    assert (local[1][4] == before).all()
    assert plan.groups == ("kv",)
    assert plan.memory == (MemoryType.DRAM, MemoryType.DRAM)
    assert repr(plan).startswith("<TransferPlan kv:")


def test_heads_come_from_the_ranks_that_hold_them() -> None:
    local = Made("KBHND", heads=4, kv_heads=4)
    remotes = [Made("BNHC", heads=2, kv_heads=4, tp=(rank, 2)) for rank in (0, 1)]
    for source in read_sources(4, local=(0, 1), remote_size=2):
        read(local, remotes[source.rank], [1], [3], plan_options={"heads": source.heads})
    assert (local[0][1][:, :2] == remotes[0][0][3]).all()
    assert (local[0][1][:, 2:] == remotes[1][0][3]).all()


def test_writing_moves_the_other_way() -> None:
    local, remote = Made("KBHND"), Made("BKNHD", tokens=4, blocks=12)
    plan = TransferPlan(local.geometry, remote.geometry)
    rows = plan.descriptors([2], [7, 1], operation=Operation.WRITE)
    move(rows, Operation.WRITE)
    assert (remote[0][7] == local[0][2][:, :, :4]).all()
    assert (remote[0][1] == local[0][2][:, :, 4:]).all()
    with pytest.raises(PlanError, match="remote block 7 at index 1 would be written twice"):
        plan.descriptors([2], [7, 7], operation=Operation.WRITE)
    assert len(plan.descriptors([2], [7, 7])[0])
    with pytest.raises(PlanError, match="local block 2 at index 1 would be written twice"):
        plan.descriptors([2, 2], [0, 1, 2, 3])


def test_positions_decide_which_blocks_meet() -> None:
    local, remote = Made("KBHND"), Made("KBHND", tokens=4, blocks=12)
    before = local[0].copy()
    # Here from position 8 on, there from 4 on; 19 tokens in all.
    read(local, remote, [3, 5], [9, 8, 7, 6], num_tokens=19, local_start=8, remote_start=4)
    assert (local[0][3][:, :, :4] == remote[0][8]).all()
    assert (local[0][3][:, :, 4:] == remote[0][7]).all()
    assert (local[0][5][:, :, :3] == remote[0][6][:, :, :3]).all()
    assert (local[0][5][:, :, 3:] == before[5][:, :, 3:]).all()


def test_a_pipeline_stage_takes_its_layers() -> None:
    local = Made("KBHND", layers=range(4))
    stages = [Made("BNHC", layers=(0, 1)), Made("BNHC", layers=(2, 3))]
    for stage in stages:
        layers = stage.geometry.groups[0].layers
        read(local, stage, [0], [1], plan_options={"layers": layers})
        for layer in layers:
            assert (local[layer][0] == stage[layer][1]).all()
    assert len(read(stages[1], local, [2], [3]).descriptors([2], [3])[0])
    assert (stages[1][3][2] == local[3][3]).all()
    stages_cache = KVCache.combine(
        Made("KBHND", layers=(0,), group="a").cache, Made("KBHND", layers=(1,), group="b").cache
    ).geometry
    only_first = TransferPlan(stages_cache, stages_cache, layers=[0]).describe().groups[1]
    assert (only_first.runs_per_block, only_first.shortest_run, only_first.longest_run) == (0, 0, 0)
    scattered = TransferPlan(local.geometry, local.geometry, layers=[3, 0, 1])
    assert scattered.describe().groups[0].bytes_per_block == 3 * 2 * HEADS * TOKENS * DIM * 2


def groups(seed: int) -> tuple[KVCache, Made, Made, np.ndarray]:
    full = Made("KBHND", group="full")
    latent = Made("BND", kv_heads=None, heads=1, layers=(7,), group="latent")
    state = np.random.default_rng(seed).integers(0, 255, (3, 40)).astype(np.uint8)
    scratch = KVCache.from_tensors({"ssm": state}, axes="BD", kv_heads=None, group="state")
    return KVCache.combine(full.cache, latent.cache, scratch), full, latent, state


def test_groups_have_tables_of_their_own() -> None:
    local, full, latent, state = groups(1)
    remote, other_full, other_latent, other_state = groups(2)
    plan = TransferPlan(local.geometry, remote.geometry)
    assert plan.groups == ("full", "latent", "state")
    rows = plan.descriptors(
        {"full": [0, 1], "latent": [4], "state": [2]},
        {"full": [5, 4], "latent": [3], "state": [0]},
        num_tokens={"full": 11, "latent": 24},
        local_start={"latent": 16},
        remote_start={"latent": 16},
    )
    move(rows)
    assert (full[0][0] == other_full[0][5]).all()
    assert (full[0][1][:, :, :3] == other_full[0][4][:, :, :3]).all()
    assert (latent[7][4] == other_latent[7][3]).all()
    assert (state[2] == other_state[0]).all()
    # One number for all: state has no positions.
    tables = (
        {"full": [0], "latent": [4], "state": [2]},
        {"full": [5], "latent": [3], "state": [0]},
    )
    positions: dict[str, Any] = {"local_start": 16, "remote_start": 16}
    assert len(plan.descriptors(*tables, num_tokens=24, **positions)[0]) == 4
    with pytest.raises(
        PlanError, match="group 0: num_tokens is 25, but the local table ends at 24"
    ):
        plan.descriptors(*tables, num_tokens=25, **positions)
    some = TransferPlan(local.geometry, remote.geometry, groups=["state", "full", "state"])
    assert some.groups == ("state", "full")
    assert len(some.descriptors({"full": [], "state": [1]}, {"full": [], "state": [1]})[0]) == 1
    with pytest.raises(PlanError, match="would be written twice"):
        some.descriptors({"full": [], "state": [1, 1]}, {"full": [], "state": [1, 2]})
    with pytest.raises(PlanError, match="the tables cover different tokens: local"):
        some.descriptors({"full": [], "state": [1, 2]}, {"full": [], "state": [1]})


def test_groups_of_one_pool_must_not_share_blocks() -> None:
    pool = Made("KBHND", group="full")
    window = KVCache.from_tensors(
        {"w": pool.tensors["layer.0"]}, axes="KBHND", kv_heads=4, group="window"
    )
    local = KVCache.combine(pool.cache, window).geometry
    remote = KVCache.combine(
        Made("KBHND", group="full").cache, Made("KBHND", group="window").cache
    ).geometry
    plan = TransferPlan(local, remote)
    plan.descriptors({"full": [1], "window": [2]}, {"full": [1], "window": [1]})
    with pytest.raises(PlanError, match="group 1: local block 1 at index 0 would be written twice"):
        plan.descriptors({"full": [1], "window": [1]}, {"full": [1], "window": [1]})


def test_shuffled_contiguous_blocks_are_few_rows() -> None:
    shape = (2, 15_100, 1, 1, 1)
    caches = [np.zeros(shape, np.uint8) for _ in range(2)]
    local, remote = (
        KVCache.from_tensors({"x": c}, axes="KBHND", kv_heads=1).geometry for c in caches
    )
    plan = TransferPlan(local, remote)
    order = np.random.default_rng(0).permutation(15_000)
    for ids in (np.arange(15_000), np.arange(15_000)[::-1], order):
        rows, others = plan.descriptors(ids, ids + 100)
        assert rows[:, 1].tolist() == [15_000, 15_000]
        assert others[0, 0] == caches[1].__array_interface__["data"][0] + 100


def test_max_bytes_cuts_after_merging() -> None:
    local, remote = Made("KBHND"), Made("KBHND")
    block = HEADS * TOKENS * DIM * 2
    plan = TransferPlan(local.geometry, remote.geometry, max_bytes=block + 100)
    rows, _ = plan.descriptors([0, 1], [3, 4])
    assert rows[:, 1].tolist() == [block + 100, block - 100] * 2
    assert plan.describe().groups[0].best_runs_per_block == 2


def test_threads_may_share_a_plan() -> None:
    local, remote = Made("KBHND"), Made("BNHC")
    plan = TransferPlan(local.geometry, remote.geometry)
    expected = plan.descriptors([0, 3, 5], [1, 0, 4])
    seen = []

    def work() -> None:
        seen.extend(plan.descriptors([0, 3, 5], [1, 0, 4]) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 200
    for rows in seen:
        assert all((a == b).all() for a, b in zip(rows, expected, strict=True))


def test_coverage_says_what_only_one_side_has() -> None:
    local, remote = Made("KBHND"), Made("KBHND", tokens=4, blocks=12)
    plan = TransferPlan(local.geometry, remote.geometry)
    more_here = plan.coverage([0, 1, 2], [0, 1, 2])
    assert (more_here.tokens, more_here.local, more_here.remote) == (range(12), range(2), range(3))
    assert (more_here.local_only, more_here.remote_only) == ((2,), ())
    with pytest.raises(
        PlanError, match=r"cover different tokens: local \[0, 24\), remote \[0, 12\)"
    ):
        plan.descriptors([0, 1, 2], [0, 1, 2])
    assert plan.descriptors([0, 1, 2], [0, 1, 2], num_tokens=12)[0][:, 1].sum() == 12 * 2 * 4 * 32
    prefix = plan.coverage([3], range(8), local_start=24, num_tokens=30)
    assert (prefix.tokens, prefix.local, prefix.remote) == (range(24, 30), range(1), range(6, 8))
    assert prefix.remote_only == tuple(range(6))
    nothing = plan.coverage([], [1, 2])
    assert (nothing.tokens, nothing.local_only, nothing.remote_only) == (range(0), (), (0, 1))
    apart = plan.coverage([1], [2], remote_start=16)
    assert (len(apart.tokens), apart.local_only, apart.remote_only) == (0, (0,), (0,))
    # Nothing in common, from a position inside a block on.
    inside = plan.coverage([1], [], remote_start=4)
    assert (len(inside.tokens), inside.local_only, inside.remote_only) == (0, (0,), ())
    with pytest.raises(PlanError, match="local block 6 at index 0"):
        plan.coverage([6], [0, 1])


def test_coverage_of_several_groups_names_one() -> None:
    local, *_ = groups(1)
    plan = TransferPlan(local.geometry, local.geometry)
    assert plan.coverage([0], [1], group="latent").tokens == range(8)
    assert plan.coverage([0], [1, 2], group="state", local_start=7).remote_only == (1,)
    with pytest.raises(PlanError, match=r"say which group: the plan has \['full', 'latent'"):
        plan.coverage([0], [1])
    with pytest.raises(PlanError, match="group 'ssm' is not in the plan"):
        plan.coverage([0], [1], group="ssm")


def test_describe() -> None:
    plan = TransferPlan(Made("KBHND").geometry, Made("BNHC").geometry)
    (group,) = plan.describe().groups
    per_block = 2 * HEADS * TOKENS * DIM * 2
    assert group.bytes_per_block == per_block
    assert group.runs_per_block == 2 * HEADS * TOKENS
    assert (group.shortest_run, group.longest_run) == (32, 32)
    assert group.best_runs_per_block == 1
    assert str(plan.describe()) == (
        "kv: 2048 bytes per block in 64 runs of 32 to 32 bytes; 1 in the best layout"
    )
    same = plan_of_equals()
    cost = same.describe([0, 1, 3], [2, 3, 5])
    assert (cost.num_bytes, cost.num_runs, cost.num_descriptors) == (3 * per_block, 6, 4)
    assert str(cost).endswith("6144 bytes: 6 runs -> 4 descriptors")
    with pytest.raises(PlanError, match="both block tables or neither"):
        same.describe([0])


def test_descriptors_into_buffers_of_the_caller() -> None:
    here, there = Made("KBHND"), Made("KBNHD")
    plan = TransferPlan(here.geometry, there.geometry)
    out = (np.full((1000, 3), 7, np.uint64), np.full((999, 3), 7, np.uint64))
    for tables in (([0, 1, 3], [2, 3, 5]), ([5], [0]), ([], []), ([4, 0, 1, 2], [2, 3, 1, 5])):
        expected = plan.descriptors(*tables)
        rows = plan.descriptors(*tables, out=out)
        for got, buffer, wanted in zip(rows, out, expected, strict=True):
            assert got.base is buffer
            assert np.array_equal(got, wanted)
            assert (buffer[-1] == 7).all()


def test_groups_that_take_turns_in_memory_into_buffers() -> None:
    """Rows that are written, found out of order, and written again."""
    pools = [np.zeros((BLOCKS, 2, 2, HEADS, TOKENS, DIM), np.uint16) for _ in range(2)]
    caches = [
        KVCache.combine(
            *(
                KVCache.from_tensors({"x": pool[:, i]}, axes="BKHND", kv_heads=HEADS, group=group)
                for i, group in enumerate("ab")
            )
        )
        for pool in pools
    ]
    plan = TransferPlan(caches[0].geometry, caches[1].geometry)
    tables = {"a": [0, 2, 1], "b": [4, 1, 3]}, {"a": [1, 2, 3], "b": [5, 4, 3]}
    out = (buffer(6, 3), buffer(6, 3))
    rows = plan.descriptors(*tables, out=out)
    block = pools[0][0, 0].nbytes
    assert ((rows[0][:, 0] - pools[0].ctypes.data) // block).tolist() == [0, 2, 3, 4, 7, 9]
    for got, array, wanted in zip(rows, out, plan.descriptors(*tables), strict=True):
        assert got.base is array
        assert np.array_equal(got, wanted)


def buffer(*shape: int, kind: Any = np.uint64) -> np.ndarray:
    return np.zeros(shape, kind)


def read_only() -> np.ndarray:
    made = buffer(9, 3)
    made.flags.writeable = False
    return made


def unaligned() -> np.ndarray:
    return np.zeros(9 * 24 + 1, np.uint8)[1:].view(np.uint64).reshape(9, 3)


BOTH = buffer(17, 3)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ((buffer(5, 3), buffer(9, 3)), "out has 5 local and 9 remote rows; .* room for 6 of each"),
        ((buffer(9, 3), buffer(0, 3)), "out has 9 local and 0 remote rows; .* room for 6 of each"),
        ((buffer(9, 2), buffer(9, 3)), r"the local array of out is uint64 of shape \(9, 2\); exp"),
        ((buffer(9, 3), buffer(27)), r"the remote array of out is uint64 of shape \(27,\); exp"),
        ((buffer(9, 3), buffer(9, 3, kind=np.int64)), "remote array of out is int64 of shape"),
        ((buffer(9, 3, kind=">u8"), buffer(9, 3)), "local array of out is >u8 of shape"),
        ((buffer(9, 4)[:, :3], buffer(9, 3)), r"local array .* \(9, 3\), not C-contiguous; exp"),
        ((buffer(9, 3), buffer(18, 3)[::2]), r"remote array .* \(9, 3\), not C-contiguous; exp"),
        ((buffer(9, 3), unaligned()), r"remote array of out is .* \(9, 3\), not aligned; exp"),
        ((read_only(), buffer(9, 3)), r"local array of out is .* \(9, 3\), read-only; expected"),
        (
            (buffer(9, 3), [[0, 0, 0]] * 9),
            r"is list; .* make it with np.empty\(\(n, 3\), np.uint64",
        ),
        ((BOTH, BOTH), "the arrays of out overlap; give the local and the remote rows one each"),
        ((BOTH[:9], BOTH[8:]), "the arrays of out overlap"),
        ((buffer(9, 3),), r"out is a tuple of 1; expected a tuple of two arrays, \(local, "),
        (buffer(2, 9, 3), "out is ndarray; expected a tuple of two arrays"),
        (5, "out is int; expected a tuple of two arrays"),
    ],
)
def test_buffers_that_do_not_fit(out, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of_equals().descriptors([0, 2, 4], [0, 2, 4], out=out)
    if isinstance(out, tuple):
        assert not any(np.any(array) for array in out)


def test_buffers_may_adjoin() -> None:
    plan, both = plan_of_equals(), buffer(12, 3)
    plan.descriptors([0, 2, 4], [0, 2, 4], out=(both[:6], both[6:]))
    assert both[:, 1].tolist() == [HEADS * TOKENS * DIM * 2] * 12


def test_physical_blocks() -> None:
    assert physical_blocks([3, 5], 4).tolist() == [12, 13, 14, 15, 20, 21, 22, 23]
    assert physical_blocks([], 2).tolist() == []
    assert physical_blocks([3, 5], 1).tolist() == [3, 5]
    with pytest.raises(PlanError, match="ratio is 0"):
        physical_blocks([1], 0)
    with pytest.raises(PlanError, match="logical_blocks has shape"):
        physical_blocks([1.0], 2)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.uint32, np.uint64, torch.int64])
def test_tables_of_any_integers(kind) -> None:
    plan = plan_of_equals()
    if isinstance(kind, torch.dtype):
        table: Any = torch.tensor([1, 2], dtype=kind)
    else:
        table = np.array([[1, 9], [2, 9]], kind)[:, 0]
    expected = plan.descriptors([1, 2], (1, 2))
    assert all(
        (a == b).all() for a, b in zip(plan.descriptors(table, table), expected, strict=True)
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((0, True), "group 'kv': local_blocks holds True at index 1; expected integers"),
        ([-1], "local block -1 at index 0 must be from 0 to 5"),
        ([0, 6], "local block 6 at index 1 must be from 0 to 5"),
        ([2**31], "local block 2147483648 at index 0"),
        (np.array([2**63], np.uint64), "holds 9223372036854775808 at index 0, which is no block"),
    ],
)
def test_tables_that_are_none(table, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of_equals().descriptors(table, [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": -1}, "num_tokens is -1; expected 0 to"),
        ({"num_tokens": 1.0}, "num_tokens is 1.0; expected an integer number of tokens"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"num_tokens": 2**60}, "num_tokens is 1152921504606846976; expected 0 to"),
        ({"num_tokens": 17}, "num_tokens is 17, but the local table ends at 16"),
        ({"local_start": 4}, "local_start is 4, must be a multiple of the 8 tokens"),
        ({"remote_start": -8}, "remote_start is -8; expected 0 to"),
        ({"remote_start": 8}, "cover different tokens: local .0, 16., remote .8, 24."),
        ({"num_tokens": {"x": 1}}, r"num_tokens names \['x'\]; the plan has groups \['kv'\]"),
        ({"local_start": 2**60 - 4}, "local_start is"),
        ({"operation": "WRITE"}, "operation is 'WRITE'"),
    ],
)
def test_options_that_do_not_fit(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of_equals().descriptors([0, 1], [0, 1], **options)


def test_tables_by_group() -> None:
    local, *_ = groups(1)
    plan = TransferPlan(local.geometry, local.geometry)
    with pytest.raises(PlanError, match=r"local_blocks is one table, but the plan has groups"):
        plan.descriptors([0], [0])
    with pytest.raises(PlanError, match=r"local_blocks has no table for \['state'\]"):
        plan.descriptors({"full": [], "latent": []}, {})
    tables = {"full": [], "latent": [], "state": []}
    with pytest.raises(PlanError, match=r"remote_blocks names \['ssm'\]"):
        plan.descriptors(tables, tables | {"ssm": []})
    one = TransferPlan(local.geometry, local.geometry, groups=["full"])
    assert len(one.descriptors({"full": [0]}, [1])[0]) == 2


@pytest.mark.parametrize(
    ("remote", "options", "message"),
    [
        ({"heads": 8, "kv_heads": 8}, {}, "cannot be matched: kv.kv_heads is 4 here and 8 there"),
        ({"dtype": "bfloat16"}, {}, "kv.dtype is 'uint16' here and 'bfloat16' there"),
        ({"opaque_axes": "N"}, {}, r"kv.opaque_axes is \[\] here and \['N'\] there"),
        ({"group": "x"}, {}, r"the groups differ: local has \['kv'\], remote \['x'\]"),
        ({"group": "x"}, {"groups": ["kv"]}, r"groups \['kv'\] are not in the remote cache"),
        ({}, {"groups": ["x"]}, r"groups \['x'\] are not in the local cache, which has \['kv'\]"),
        ({}, {"groups": []}, r"groups is empty; expected some of \['kv'\]"),
        (
            {"heads": 2, "kv_heads": 4, "tp": (1, 2)},
            {},
            "remote side does not hold layer 0, kv 0, head 0, dim 0",
        ),
        (
            {"heads": 2, "kv_heads": 4, "tp": (1, 2)},
            {"heads": range(4)},
            r"heads \[0, 1\] of group 'kv' are not held by the remote side; rank 1 of 2 holds 2",
        ),
        ({}, {"heads": [4]}, r"heads \[4\] of group 'kv' are not held by the local side"),
        ({}, {"heads": []}, "heads is empty"),
        ({}, {"heads": [0.5]}, "heads has shape"),
        ({"layers": (0, 1)}, {"layers": [1]}, r"layers \[1\] are not held by the local side"),
        ({"layers": (1,)}, {"layers": [0]}, r"layers \[0\] are not held by the remote side"),
        ({"layers": (1,)}, {}, "does not hold layer 0"),
        ({"dcp": (1, 2)}, {"max_bytes": 0}, "max_bytes is 0"),
        ({}, {"max_bytes": True}, "max_bytes is True"),
        ({}, {"max_bytes": 1.5}, "max_bytes is 1.5"),
        ({}, {"max_bytes": "5"}, "max_bytes is '5'"),
        ({}, {"heads": 1}, "heads is 1; expected integers"),
    ],
)
def test_sides_that_cannot_be_planned(remote, options, message) -> None:
    with pytest.raises(PlanError, match=message):
        TransferPlan(Made("KBHND").geometry, Made("KBHND", **remote).geometry, **options)


def test_context_parallel_ranks_need_common_tokens() -> None:
    ranks = [Made("BKHND", dcp=(rank, 2), interleave=4) for rank in (0, 1)]
    with pytest.raises(PlanError, match="have no tokens in common"):
        TransferPlan(ranks[0].geometry, ranks[1].geometry)
    local = Made("KBHND", blocks=4)
    for rank, remote in enumerate(ranks):
        assert remote.geometry.groups[0].block_tokens == 16
        read(local, remote, [2, 0], [5])
        assert (local[0][2][:, :, 4 * rank : 4 * rank + 4] == remote[0][5][:, :, :4]).all()
        assert (local[0][0][:, :, 4 * rank : 4 * rank + 4] == remote[0][5][:, :, 4:]).all()


def test_heads_of_replicated_caches() -> None:
    latents = [Made("BND", kv_heads=None, heads=1, tp=(rank, 4)) for rank in (0, 3)]
    read(latents[0], latents[1], [1], [2], plan_options={"heads": range(1)})
    assert (latents[0][0][1] == latents[1][0][2]).all()
    with pytest.raises(PlanError, match=r"heads \[4\] of group 'kv' are not held"):
        TransferPlan(latents[0].geometry, latents[1].geometry, heads=[4])


def test_one_kind_of_memory_per_side() -> None:
    class OnDevice(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda:0")

    host = torch.zeros(5, 4, 8, 32)
    device = torch.zeros(5, 4, 8, 32).as_subclass(OnDevice)
    mixed = KVCache.from_tensors({"a": host, "b": device}, axes="BHNC", kv_heads=4).geometry
    with pytest.raises(PlanError, match=r"the local side mixes \['DRAM', 'VRAM'\] memory"):
        TransferPlan(mixed, mixed)
    assert len(mixed.spans) == 2


def test_opaque_pages_split_by_head_and_not_by_token() -> None:
    local = Made("BHNC", opaque_axes="N")
    remote = Made("BHNC", heads=2, kv_heads=4, tp=(1, 2), opaque_axes="N")
    read(local, remote, [3, 1], [0, 5], num_tokens=9, plan_options={"heads": range(2, 4)})
    assert (local[0][3][:, 2:] == remote[0][0]).all()
    assert (local[0][1][:, 2:] == remote[0][5]).all()
    smaller = Made("BHNC", tokens=4, opaque_axes="N")
    with pytest.raises(PlanError, match="token axis is opaque, so blocks must hold the same"):
        TransferPlan(local.geometry, smaller.geometry)
    with pytest.raises(PlanError, match="token axis is opaque, so its head axis must be the"):
        TransferPlan(
            Made("BNHC", opaque_axes="N").geometry,
            Made("BNHC", heads=2, kv_heads=4, tp=(1, 2), opaque_axes="N").geometry,
            heads=[2, 3],
        )


def test_sides_that_are_no_geometry() -> None:
    with pytest.raises(PlanError, match="local is a NoneType; expected a Geometry"):
        TransferPlan(None, None)  # type: ignore[arg-type]


def test_entries_beyond_what_moves_may_repeat() -> None:
    plan = plan_of_equals(tokens=4, blocks=8)
    padded = plan.descriptors([5, 6, 0, 0], [1, 2, 0, 0], num_tokens=7)
    plain = plan.descriptors([5, 6], [1, 2], num_tokens=7)
    assert all((a == b).all() for a, b in zip(padded, plain, strict=True))
    with pytest.raises(PlanError, match="written twice"):
        plan.descriptors([5, 5, 0, 0], [1, 2, 0, 0], num_tokens=7)
