"""Faults of layout and tensor-parallel arithmetic that users of this kind of software have met."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pynixlkv.connector.metadata import ParallelSizes
from pynixlkv.connector.tp_mapping import TransferSlice, transfer_slices
from pynixlkv.errors import IncompatibleLayoutError, PlanError
from pynixlkv.geometry import Geometry, KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import Source, expected_readers, read_sources

from .reference import apply


def cache(array: np.ndarray, axes: str, kv_heads: int | None, tp=(0, 1), **more) -> KVCache:
    return KVCache.from_tensors({"layer": array}, axes=axes, kv_heads=kv_heads, tp=tp, **more)


def offsets(rows: np.ndarray, array: np.ndarray) -> list[tuple[int, int]]:
    """Return (byte offset into the array, length) of each row."""
    return [(address - array.ctypes.data, length) for address, length, _ in rows.tolist()]


def test_replicated_heads_need_no_smaller_blocks() -> None:
    """Four KV heads, producers on 4 ranks, consumers on 8: each consumer reads whole blocks."""
    producer, consumer = (np.zeros((2, 8, 1, 16, 32), np.float16) for _ in range(2))
    for rank in range(8):
        (source,) = read_sources(4, local=(rank, 8), remote_size=4)
        assert source == Source(rank // 2, range(rank // 2, rank // 2 + 1))
        local = cache(consumer, "KBHND", 4, (rank, 8))
        remote = cache(producer, "KBHND", 4, (source.rank, 4))
        plan = TransferPlan(local.geometry, remote.geometry, heads=source.heads)
        block_bytes = 16 * 32 * 2
        here, there = plan.descriptors([5], [3])
        assert offsets(here, consumer) == [(i * block_bytes, block_bytes) for i in (5, 13)]
        assert offsets(there, producer) == [(i * block_bytes, block_bytes) for i in (3, 11)]


def test_no_descriptor_reaches_beyond_the_region() -> None:
    """Two KV heads from 1 rank to 4: two readers for each head, and no address past the end."""
    producer = np.zeros((2, 8, 2, 16, 32), np.float16)
    blocks = list(range(8))
    read_by = {}
    for rank in range(4):
        consumer = np.zeros((2, 8, 1, 16, 32), np.float16)
        (source,) = read_sources(2, local=(rank, 4), remote_size=1)
        plan = TransferPlan(
            cache(consumer, "KBHND", 2, (rank, 4)).geometry,
            cache(producer, "KBHND", 2).geometry,
            heads=source.heads,
        )
        _, there = plan.descriptors(blocks, blocks)
        ends = [offset + length for offset, length in offsets(there, producer)]
        assert max(ends) <= producer.nbytes
        assert len(there) == 2 * 8
        read_by.setdefault(source.heads, []).append(rank)
    assert read_by == {range(1): [0, 1], range(1, 2): [2, 3]}
    assert len(expected_readers(2, local=(0, 1), remote_size=4)) == 4


def test_head_slices_are_taken_inside_k_and_inside_v() -> None:
    """K and V inside each block: rank 1 of 2 takes the second half of K and the second of V."""
    producer = np.zeros((8, 2, 4, 16, 32), np.float16)
    consumer = np.zeros((8, 2, 2, 16, 32), np.float16)
    plan = TransferPlan(
        cache(consumer, "BKHND", 4, (1, 2)).geometry, cache(producer, "BKHND", 4).geometry
    )
    block, length = 6, producer[0].nbytes
    _, there = plan.descriptors([2], [block])
    quarter = length // 4
    assert offsets(there, producer) == [
        (block * length + quarter, quarter),
        (block * length + 3 * quarter, quarter),
    ]


def test_heads_and_tokens_of_equal_number_are_not_mixed_up() -> None:
    """Sixteen heads and sixteen tokens: HND to NHD still puts each element where it belongs."""
    heads, tokens = np.meshgrid(range(16), range(16), indexing="ij")
    producer = np.zeros((2, 4, 16, 16, 1), np.int32)
    producer[:, 3, :, :, 0] = heads * 1000 + tokens
    consumer = np.full((2, 4, 16, 16, 1), -1, np.int32)
    plan = TransferPlan(
        cache(consumer, "KBNHD", 16).geometry, cache(producer, "KBHND", 16).geometry
    )
    apply(*plan.descriptors([1], [3]))
    expected = np.full_like(consumer, -1)
    for token in range(16):
        for head in range(16):
            expected[:, 1, token, head] = head * 1000 + token
    np.testing.assert_array_equal(consumer, expected)


def test_packed_content_gives_both_k_and_v_of_the_heads() -> None:
    """K and V side by side in the last dimension: rank 1 of 2 gets both, of the heads from H/2."""
    num_heads, dim = 4, 3
    numbers = np.arange(4 * 8 * num_heads * 2 * dim, dtype=np.int32)
    producer = numbers.reshape(4, 8, num_heads, 2 * dim)
    consumer = np.full((4, 8, num_heads // 2, 2 * dim), -1, np.int32)
    plan = TransferPlan(
        cache(consumer, "BNHC", num_heads, (1, 2)).geometry,
        cache(producer, "BNHC", num_heads).geometry,
    )
    apply(*plan.descriptors([0], [2]))
    np.testing.assert_array_equal(consumer[0], producer[2, :, num_heads // 2 :])
    assert (consumer[1:] == -1).all()


def test_every_layer_and_block_has_a_descriptor_of_its_own() -> None:
    """Two attention layers and one of state: as many descriptors as there are blocks of layers."""
    num_blocks = 5
    attention = [np.zeros((num_blocks, 2, 4, 6), np.float16) for _ in range(2)]
    state = np.zeros((num_blocks, 48), np.float16)
    joined = KVCache.combine(
        KVCache.from_tensors(
            {f"layer.{i}": array for i, array in enumerate(attention)},
            axes="BHNC",
            kv_heads=2,
            group="attention",
        ),
        cache(state, "BD", None, layers=[2], group="state"),
    )
    plan = TransferPlan(joined.geometry, joined.geometry, max_bytes=48 * 2)
    every = {"attention": list(range(num_blocks)), "state": list(range(num_blocks))}
    rows, _ = plan.descriptors(every, every)
    expected = {
        (array[block].__array_interface__["data"][0], 48 * 2, 0)
        for array in (*attention, state)
        for block in range(num_blocks)
    }
    assert len(rows) == 3 * num_blocks
    assert {tuple(row) for row in rows.tolist()} == expected


def test_state_that_one_side_lacks_is_an_error_at_once() -> None:
    """Groups kv and swa against kv, swa and ssm: no plan; with kv chosen, a plan of that."""

    def make(*names: str) -> tuple[dict[str, np.ndarray], KVCache]:
        arrays = {name: np.zeros((4, 16, 8), np.int32) for name in names}
        return arrays, KVCache.combine(
            *(cache(array, "BND", None, group=name) for name, array in arrays.items())
        )

    sent, producer = make("kv", "swa")
    received, consumer = make("kv", "swa", "ssm")
    for pair in ((consumer, producer), (producer, consumer)):
        with pytest.raises(PlanError, match="ssm"):
            TransferPlan(pair[0].geometry, pair[1].geometry)

    sent["kv"][2] = 7
    plan = TransferPlan(consumer.geometry, producer.geometry, groups=["kv"])
    apply(*plan.descriptors({"kv": [1]}, {"kv": [2]}))
    assert (received["kv"][1] == 7).all()
    assert not received["swa"].any()
    assert not received["ssm"].any()


def latent_pair(num_blocks: int, block_size: int) -> tuple[np.ndarray, np.ndarray, TransferPlan]:
    local, remote = (np.zeros((num_blocks, block_size, 4), np.int32) for _ in range(2))
    plan = TransferPlan(cache(local, "BND", None).geometry, cache(remote, "BND", None).geometry)
    return local, remote, plan


def test_a_prefix_hit_drops_blocks_at_the_front() -> None:
    """Blocks for positions 0 to 7 on one side, 5 to 7 asked for: 5, 6, 7 move, in that order."""
    local, remote, plan = latent_pair(32, 1)
    producer_blocks = [20, 21, 22, 23, 24, 25, 26, 27]
    remote[producer_blocks] = np.arange(8).reshape(8, 1, 1)
    apply(*plan.descriptors([9, 3, 14], producer_blocks, local_start=5))
    assert local[[9, 3, 14], 0, 0].tolist() == [5, 6, 7]
    assert np.count_nonzero(local) == 3 * 4
    coverage = plan.coverage([9, 3, 14], producer_blocks, local_start=5)
    assert coverage.remote == range(5, 8)


@pytest.mark.parametrize("wrong", [((0, 2), "local"), ((3, 4), "local"), ((0, 2), "remote")])
def test_a_cache_of_another_rank_is_refused(wrong: tuple[tuple[int, int], str]) -> None:
    """Rank 1 of 2 on both sides; one names another rank, or a group of another size."""
    place, side = wrong

    def make(tp: tuple[int, int]) -> Geometry:
        latent = cache(np.zeros((4, 8, 6)), "BND", None)  # of every rank
        heads = cache(np.zeros((4, 4 // tp[1], 8, 6)), "BHNC", 4, tp, group="heads")
        return KVCache.combine(latent, heads).geometry

    def slices(**others: tuple[int, int]) -> list[TransferSlice]:
        sides = [make(others.get(name, (1, 2))) for name in ("local", "remote")]
        place = (0, 1), ParallelSizes(tp=2)
        return transfer_slices(sides[0], *place, sides[1], *place)

    assert [part.heads for part in slices()] == [None, (2, 3)]
    message = rf"heads.tp of the {side} side is {re.escape(f'{place} here and (1, 2) there')}"
    with pytest.raises(IncompatibleLayoutError, match=message):
        slices(**{side: place})


def test_targets_are_chosen_from_the_front() -> None:
    """Three blocks allocated, nothing computed, two to fetch: the first two are the targets."""
    local, remote, plan = latent_pair(32, 16)
    c, d, e = 11, 4, 19
    remote[[1, 2]] = [[[1]], [[2]]]
    coverage = plan.coverage([c, d, e], [1, 2])
    assert coverage.local == range(2)
    assert coverage.local_only == (2,)
    apply(*plan.descriptors([c, d, e], [1, 2], num_tokens=2 * 16))
    assert local[[c, d, e], 0, 0].tolist() == [1, 2, 0]


def test_the_tail_of_the_last_block_stays_behind() -> None:
    """A prompt of 70 tokens in blocks of 64: two blocks, the second with 6 valid tokens."""
    local, remote, plan = latent_pair(8, 64)
    remote[:] = 1
    rows, _ = plan.descriptors([2, 5], [1, 4], num_tokens=70)
    apply(rows, plan.descriptors([2, 5], [1, 4], num_tokens=70)[1])
    token_bytes = 4 * 4
    assert offsets(rows, local) == [
        (2 * 64 * token_bytes, 64 * token_bytes),
        (5 * 64 * token_bytes, 6 * token_bytes),
    ]
    assert local[2].all()
    assert local[5, :6].all()
    assert np.count_nonzero(local) == 70 * 4
    assert plan.coverage([2, 5], [1, 4], num_tokens=70).tokens == range(70)
