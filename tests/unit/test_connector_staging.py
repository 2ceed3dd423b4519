"""Host blocks: handed out whole or not at all, sent only after the copies into them have ended."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from spoiled import SpoiledVerification
from toy_world import FakeEvent

from pynixlkv import KVCache, TransferPlan
from pynixlkv.connector import (
    ConnectorConfig,
    ConnectorScheduler,
    ConnectorWorker,
    EndState,
    GroupSpec,
    KVTransferParams,
    RequestInfo,
    receiver,
)
from pynixlkv.connector.staging import HostBlockPool, HostStaging, TensorCopy, make_host_tensors
from pynixlkv.errors import ConfigError, LayoutError, PlanError, PoolExhausted, StateError
from pynixlkv.testing import FakeAgent, FakeNetwork

DEVICE_BLOCKS, HOST_BLOCKS, DEADLINE_S = 8, 5, 30.0
AXES = "KBHND"
OPTIONS = {"axes": AXES, "kv_heads": 2}


class DelayedCopy:
    """Copies when it is told to."""

    def __init__(self, copy):
        self._copy = copy
        self._waiting = []
        self.num_begun = 0

    def __call__(self, *tables):
        event = FakeEvent()
        self._waiting.append((event, tables))
        self.num_begun += 1
        return event

    def finish(self, count=None):
        """Make the copies that wait, or the first of them."""
        for event, tables in self._waiting[:count]:
            self._copy(*tables)
            event.is_done = True
        del self._waiting[:count]


class Rank:
    """A device cache (ordinary memory here) that is staged through a host cache."""

    def __init__(self, seed, copy=None):
        rng = np.random.default_rng(seed)
        shape = (2, DEVICE_BLOCKS, 2, 4, 8)
        self.device = {f"layer.{i}": rng.integers(0, 1000, shape, dtype=np.int32) for i in range(3)}
        self.host = make_host_tensors(self.device, axes=AXES, num_blocks=HOST_BLOCKS)
        self.copy = DelayedCopy(TensorCopy((self.device, self.host, AXES)))
        self.staging = HostStaging(
            KVCache.from_tensors(self.device, **OPTIONS),
            KVCache.from_tensors(self.host, **OPTIONS),
            copy or self.copy,
        )

    def device_block(self, block):
        return np.stack([tensor[:, block] for tensor in self.device.values()])

    def host_block(self, block):
        return np.stack([tensor[:, block] for tensor in self.host.values()])


@pytest.fixture
def rank():
    return Rank(1)


@pytest.fixture
def other_rank():
    return Rank(2)


# --- the pool -------------------------------------------------------------------------------------


def test_a_pool_that_is_too_small_says_so():
    pool = HostBlockPool([4])
    with pytest.raises(PoolExhausted, match=r"\(5,\) host blocks .* \(4,\) are, of \(4,\)"):
        pool.allocate([5])
    assert pool.num_free == (4,)
    assert sorted(pool.allocate([4])[0]) == [0, 1, 2, 3]


def test_all_groups_or_none():
    pool = HostBlockPool([4, 2])
    with pytest.raises(PoolExhausted):
        pool.allocate([3, 3])
    assert pool.num_free == (4, 2)
    assert not pool.has_free([3, 3])
    assert pool.has_free([4, 2])
    assert pool.can_hold([4, 2])
    assert not pool.can_hold([4, 3])
    assert pool.allocate([3, 0]) == ((0, 1, 2), ())
    assert pool.num_free == (1, 2)


def test_freeing_twice_is_an_error_and_frees_nothing():
    pool = HostBlockPool([4, 2])
    blocks = pool.allocate([2, 1])
    for wrong in (((0, 1, 3), (0,)), ((0, 0), (0,)), ((0,), (1,)), ((-1,), ())):
        with pytest.raises(StateError, match="freed twice, or were never"):
            pool.free(wrong)
        assert pool.num_free == (2, 1)
    pool.free(blocks)
    assert pool.num_free == (4, 2)
    with pytest.raises(StateError, match=r"host blocks \[0, 1\] of group 0"):
        pool.free(blocks)


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3], [1, -1]])
def test_counts_that_do_not_fit_the_groups(counts):
    pool = HostBlockPool([4, 2])
    with pytest.raises(ConfigError, match="expected 2 of at least 0"):
        pool.allocate(counts)


@pytest.mark.parametrize("sizes", [[], [0], [3, -1]])
def test_pools_that_cannot_be(sizes):
    with pytest.raises(ConfigError, match="num_blocks is"):
        HostBlockPool(sizes)


def test_no_block_is_handed_out_twice_between_threads():
    pool = HostBlockPool([24])
    owners = [None] * 24

    def use(me):
        for _ in range(200):
            (blocks,) = pool.allocate([3])
            for block in blocks:
                assert owners[block] is None
                owners[block] = me
            for block in blocks:
                assert owners[block] == me
                owners[block] = None
            pool.free((blocks,))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    assert pool.num_free == (24,)


# --- staging --------------------------------------------------------------------------------------


def test_staged_blocks_hold_the_bytes_once_the_event_is_done(rank):
    event = rank.staging.stage("d2h", ((6, 2),), ((0, 4),))
    assert not event.query()
    rank.copy.finish()
    assert event.query()
    assert np.array_equal(rank.host_block(0), rank.device_block(6))
    assert np.array_equal(rank.host_block(4), rank.device_block(2))
    assert not rank.host_block(1).any()


def test_host_blocks_are_not_reused_while_a_copy_runs(rank):
    for start in (
        lambda: rank.staging.stage("d2h", ((1,),), ((0,),)),
        lambda: rank.staging.stage("h2d", ((1,),), ((0,),)),
    ):
        event = start()
        with pytest.raises(StateError, match="has not ended"):
            rank.staging.stage("d2h", ((2,),), ((0,),))
        rank.copy.finish()
        assert event.query()


def test_blocks_can_be_used_again_after_a_copy_that_fails(rank):
    failing = True

    def copy(*tables):
        if failing:
            raise RuntimeError("the device is lost")
        return rank.copy(*tables)

    staging = Rank(1, copy).staging
    with pytest.raises(RuntimeError, match="the device is lost"):
        staging.stage("d2h", ((1,),), ((0,),))
    failing = False
    event = staging.stage("d2h", ((1,),), ((0,),))
    rank.copy.finish()
    assert event.query()


def test_a_copy_that_fails_later_is_told_by_its_event():
    event = FakeEvent()
    event.error = RuntimeError("an error of the stream")
    copied = Rank(1, lambda *_: event).staging.stage("d2h", ((1,),), ((0,),))
    with pytest.raises(RuntimeError, match="of the stream"):
        copied.query()


@pytest.mark.parametrize(
    ("device", "host", "text"),
    [
        (((8,),), ((0,),), "device block 8 at position 0 of group 'kv' is outside 0 to 7"),
        (((0, -1),), ((0, 1),), "device block -1 at position 1"),
        (((0,),), ((5,),), "host block 5 at position 0"),
        (((0, 1),), ((0,),), "2 device blocks and 1 host blocks"),
        (((0, 1),), ((3, 3),), "each block that is written once"),
        (((0,), (0,)), ((0,),), "2 block tables for 1 groups"),
    ],
)
def test_tables_that_do_not_fit(rank, device, host, text):
    with pytest.raises(PlanError, match=text):
        rank.staging.stage("d2h", device, host)


def test_caches_that_are_not_alike(rank):
    other = KVCache.from_tensors({"a": np.zeros((2, 5, 2, 4, 8), np.int32)}, **OPTIONS)
    with pytest.raises(ConfigError, match="differ in more than"):
        HostStaging(rank.staging.device_cache, other, rank.copy)


def test_from_device_to_device_through_the_hosts(rank, other_rank):
    """Both ends staged, the transfer between the host caches, every byte compared."""
    expected = [rank.device_block(b) for b in (7, 0, 3)]
    before = [other_rank.device_block(b) for b in range(DEVICE_BLOCKS)]
    network = FakeNetwork()
    with FakeAgent("consumer", network) as consumer, FakeAgent("producer", network) as producer:
        producer.register(rank.staging.host_cache)
        consumer.register(other_rank.staging.host_cache)
        peer = consumer.connect(producer.hello(rank.staging.host_cache))
        plan = TransferPlan(other_rank.staging.host_cache.geometry, peer.geometry)

        sending, receiving = HostBlockPool([HOST_BLOCKS]), HostBlockPool([HOST_BLOCKS])
        theirs, mine = sending.allocate([3]), receiving.allocate([3])
        rank.staging.stage("d2h", ((7, 0, 3),), theirs)
        rank.copy.finish()
        consumer.read(peer, plan, mine[0], theirs[0]).wait(DEADLINE_S)
        event = other_rank.staging.stage("h2d", ((1, 6, 4),), mine)
        other_rank.copy.finish()
        assert event.query()
        receiving.free(mine)
        sending.free(theirs)
    received = dict(zip((1, 6, 4), expected, strict=True))
    for block in range(DEVICE_BLOCKS):
        assert np.array_equal(other_rank.device_block(block), received.get(block, before[block]))


def test_many_copies_overlap(rank):
    events = [rank.staging.stage("d2h", ((i,),), ((i,),)) for i in range(HOST_BLOCKS)]
    assert not any(event.query() for event in events)
    rank.copy.finish(1)
    assert [event.query() for event in events] == [True] + [False] * (HOST_BLOCKS - 1)
    rank.copy.finish()
    assert all(event.query() for event in events)


# --- host tensors ---------------------------------------------------------------------------------


def test_host_tensors_keep_the_order_in_memory():
    base = np.zeros((6, 4, 2, 2, 8), np.float16)  # blocks of tokens of K and V of heads
    permuted = base.transpose(2, 0, 3, 1, 4)
    made = make_host_tensors({"a": permuted}, axes="KBHND", num_blocks=3)["a"]
    assert made.shape == (2, 3, 2, 4, 8)
    assert made.strides == permuted.strides
    assert made.dtype == np.float16


def test_host_tensors_of_torch_and_of_pairs():
    pair = tuple(torch.zeros(6, 4, 2, 8, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    made = make_host_tensors({"a": pair}, axes="BHND", num_blocks=9)
    for tensor in made["a"]:
        assert tensor.shape == (9, 2, 4, 8)
        assert tensor.stride() == pair[0].stride()
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_pinned() == torch.cuda.is_available()
    pair[1][5] = 7
    TensorCopy(({"a": pair}, made, "BHND"))("d2h", ((5, 0),), ((8, 1),))
    assert (made["a"][1][8] == 7).all()
    assert not made["a"][0].any()
    TensorCopy(({"a": pair}, made, "BHND"))("h2d", ((2,),), ((8,),))
    assert (pair[1][2] == 7).all()


def test_host_tensors_of_two_groups():
    tables = ((1, 2), (0,))
    groups = {
        "BHND": {"a": np.arange(3 * 2 * 4 * 2).reshape(3, 2, 4, 2)},
        "MLA": {"b": np.arange(2 * 4 * 5, dtype=np.int16).reshape(2, 4, 5)},
    }
    hosts = {axes: make_host_tensors(t, axes=axes, num_blocks=2) for axes, t in groups.items()}
    copy = TensorCopy(*((groups[axes], hosts[axes], axes) for axes in groups))
    assert copy("d2h", tables, ((0, 1), (1,))).query()
    assert np.array_equal(hosts["BHND"]["a"], groups["BHND"]["a"][1:])
    assert np.array_equal(hosts["MLA"]["b"][1], groups["MLA"]["b"][0])


def test_host_tensors_that_cannot_be():
    array = np.zeros((2, 3, 4))
    for axes in ("HND", "KHN", "BH"):
        with pytest.raises(LayoutError, match="B among them"):
            make_host_tensors({"a": array}, axes=axes, num_blocks=3)
    with pytest.raises(LayoutError, match="num_blocks is 0"):
        make_host_tensors({"a": array}, axes="MLA", num_blocks=0)
    with pytest.raises(LayoutError, match="not the same"):
        TensorCopy(({"a": array}, {"b": array}, "MLA"))
    with pytest.raises(LayoutError, match="expected the CPU"):
        TensorCopy(({"a": torch.zeros(2, 3, 4, device="meta")}, {"a": array}, "MLA"))


# --- in the connector -----------------------------------------------------------------------------


class Engine:
    """An engine whose device memory is staged: scheduler and worker around a `Rank`."""

    def __init__(self, name, seed, network, hellos, **config):
        self.rank = Rank(seed)
        self.agent = FakeAgent(name, network)
        self.pool = HostBlockPool([HOST_BLOCKS])
        self.worker = ConnectorWorker(
            self.agent,
            engine_id=name,
            background=False,
            config=ConnectorConfig(**config),
            fetch=lambda _, *, engine_id, ranks, timeout: dict.fromkeys(ranks, hellos[engine_id]),
        )
        staging = self.rank.staging
        metadata = self.worker.register_kv_caches(staging.device_cache, staging=staging)
        hellos[name] = metadata.hello
        self.scheduler = ConnectorScheduler(
            name, [GroupSpec(4)], address=("127.0.0.1", 1), host_pool=self.pool
        )

    def step(self):
        self.worker.start_load_kv(self.scheduler.build_connector_meta())
        self.worker.poll()
        finished = self.worker.get_finished()
        self.scheduler.update_finished(
            sent=finished.sent, received=finished.received, failed=finished.failed
        )
        return finished

    def close(self):
        self.worker.shutdown()
        self.agent.close()


@contextmanager
def handing_over(**config):
    """A producer and a consumer, which is about to receive blocks 7, 0, 3 in its 1, 6, 4."""
    network, hellos = FakeNetwork(), {}
    with (
        closing(Engine("producer", 1, network, hellos)) as producer,
        closing(Engine("consumer", 2, network, hellos, **config)) as consumer,
    ):
        asked = RequestInfo("p", 12, KVTransferParams(do_remote_decode=True))
        keeps, params = producer.scheduler.request_finished(asked, ((7, 0, 3),), 12)
        assert keeps
        request = RequestInfo("c", 12, KVTransferParams.from_dict(params))
        assert consumer.scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
        consumer.scheduler.update_state_after_alloc(request, ((1, 6, 4),), 0, 12)
        consumer.request = request
        yield producer, consumer


def test_a_request_is_readable_only_when_its_copy_has_ended():
    with handing_over() as (producer, consumer):
        expected = [producer.rank.device_block(b) for b in (7, 0, 3)]
        for _ in range(50):  # the copy to the producer's host has not ended
            producer.step()
            assert not consumer.step()
        producer.rank.copy.finish()
        deadline = time.monotonic() + DEADLINE_S
        while not consumer.rank.copy.num_begun:  # until the copy from the consumer's host begins
            assert time.monotonic() < deadline
            producer.step()
            assert not consumer.step()
        assert not consumer.step()
        consumer.rank.copy.finish()
        received, sent = set(), set()
        while not (received and sent):
            assert time.monotonic() < deadline
            sent |= producer.step().sent
            received |= consumer.step().received
        for block, bytes_of_it in zip((1, 6, 4), expected, strict=True):
            assert np.array_equal(consumer.rank.device_block(block), bytes_of_it)
        assert producer.pool.num_free == consumer.pool.num_free == (HOST_BLOCKS,)


def test_blocks_of_an_aborted_request_are_kept_while_the_copy_to_them_runs():
    with handing_over() as (producer, consumer):
        deadline = time.monotonic() + DEADLINE_S
        while not consumer.rank.copy.num_begun:
            assert time.monotonic() < deadline
            producer.step()
            producer.rank.copy.finish()
            assert not consumer.step()
        aborted = (consumer.request, ((1, 6, 4),), 12)
        assert consumer.scheduler.request_finished(*aborted) == (True, None)
        for _ in range(50):
            assert not consumer.step()
        assert consumer.pool.num_free != (HOST_BLOCKS,)
        consumer.rank.copy.finish()
        while not (failed := consumer.step().failed):
            assert time.monotonic() < deadline
        assert failed["c"].state is EndState.ABORTED
        assert consumer.pool.num_free == (HOST_BLOCKS,)


def test_who_waits_for_an_end_is_woken_by_it():
    with handing_over() as (producer, consumer), ThreadPoolExecutor(1) as executor:
        assert not consumer.worker.get_finished(0.01)
        waiting = executor.submit(consumer.worker.get_finished, DEADLINE_S)
        for each in (consumer, producer):
            each.worker.start_load_kv(each.scheduler.build_connector_meta())
        while not waiting.done():
            for each in (producer, consumer):
                each.rank.copy.finish()
                each.worker.poll()
        assert waiting.result().received == {"c"}
        assert not consumer.worker.get_finished()


def test_wrong_bytes_are_found_in_host_blocks_and_not_copied_to_the_device(monkeypatch):
    monkeypatch.setattr(receiver, "Verification", SpoiledVerification)
    monkeypatch.setattr(SpoiledVerification, "count", 1)
    with handing_over(checksums="all") as (producer, consumer):
        deadline = time.monotonic() + DEADLINE_S
        failed = {}
        while not failed:
            assert time.monotonic() < deadline
            producer.step()
            producer.rank.copy.finish()
            failed = consumer.step().failed
        assert (failed["c"].state, failed["c"].blocks) == (EndState.CORRUPT, ((1, 6, 4),))
        assert consumer.rank.copy.num_begun == 0
        assert consumer.pool.num_free == (HOST_BLOCKS,)
