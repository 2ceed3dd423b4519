"""Faults of request life cycles that others have met: leases, aborts, completion, failure."""

from __future__ import annotations

import re
import threading

import msgspec
import numpy as np
import pytest
from toy_engine import POISON, Model, ToyRequest
from toy_pair import (
    BEATS_5,
    BEATS_10,
    arrives,
    connect,
    early_params,
    errors,
    failed,
    pair,
    received,
    sent,
    start,
    start_early,
)
from toy_world import DEADLINE_S, FakeEvent, World

from pynixlkv.connector import messages, verification
from pynixlkv.connector import worker as worker_module
from pynixlkv.connector.messages import ConsumerRank
from pynixlkv.connector.metadata import (
    ConnectorConfig,
    EndState,
    KVTransferParams,
    Lease,
    ParallelSizes,
    RequestInfo,
)
from pynixlkv.connector.scheduler import ConnectorScheduler, GroupSpec
from pynixlkv.errors import (
    ConfigError,
    HandshakeError,
    IncompatibleLayoutError,
    LeaseExpired,
    PeerLostError,
    RankNotFound,
    TransferTimeout,
)
from pynixlkv.testing import FakeAgent
from pynixlkv.transfer import TransferResult

MLA = Model(kv_heads=None)
BLOCKS_OF_16 = {"block_size": 16}


def complete(world, prefill, decode, num_tokens=12):
    """Compute the rest of a prompt that is computed in chunks, and hand it over."""
    prefill.layer_events = {}
    prefill.compute("p1", num_tokens)
    world.round()
    assert prefill.hand_over("p1")
    arrives(world, decode)


def test_a_full_prefix_hit_releases_the_producer_once():
    with pair() as (world, prefill, decode):
        inbox = world.listen("P")
        params = prefill.prefill("p1", 7, 12)
        assert start(world, decode, params, num_tokens=12, num_computed=12) == 0
        world.until(sent(world))
        world.quiet()
        assert inbox.releases() == [(0, "p1")]
        assert decode.stats.transfers == 0
        assert not decode.scheduler._receiving


def test_a_prompt_shorter_than_a_block_is_not_handed_over():
    sides = {"producer": BLOCKS_OF_16, "consumer": BLOCKS_OF_16}
    with pair(partial_blocks=False, **sides) as (world, prefill, decode):
        free = list(prefill.free)
        inbox = world.listen("P")
        assert prefill.prefill("p1", 7, 5) is None
        assert sorted(prefill.free) == free
        world.quiet()
        assert not inbox.messages
        assert world.num_fetches == 0
        # The other way round: the producer has a block, the consumer's prompt has none.
        info = RequestInfo("d1", 5, KVTransferParams.from_dict(prefill.prefill("p2", 7, 16)))
        assert decode.scheduler.get_num_new_matched_tokens(info, 0) == (0, False)


def test_only_whole_blocks_of_all_groups_are_handed_over():
    config = ConnectorConfig(partial_blocks=False)
    scheduler = ConnectorScheduler(
        "P", [GroupSpec(16), GroupSpec(24), GroupSpec(0)], address=("h", 1), config=config
    )
    info = RequestInfo("p1", 100, KVTransferParams(do_remote_decode=True))
    _, params = scheduler.request_finished(info, (tuple(range(7)), tuple(range(5)), (3,)), 100)
    assert params["remote_num_tokens"] == 96
    assert [len(table) for table in params["remote_block_ids"]] == [6, 4, 1]


def test_notices_carry_the_producers_request_id():
    producer, consumer = {"tp": 2, "axes": "BND"}, {"axes": "BND"}
    with pair(model=MLA, producer=producer, consumer=consumer) as (world, prefill, decode):
        inbox = world.listen("P")
        start(world, decode, prefill.prefill("r-aaaa", 7, 13), request_id="r-bbbb")
        arrives(world, decode, "r-bbbb")
        world.until(sent(world, "r-aaaa"))
        assert sorted(inbox.releases()) == [(0, "r-aaaa"), (1, "r-aaaa")]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_reader_that_comes_after_expiry_finds_out(mode):
    with pair(mode, lease_duration=0.2) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        blocks = list(prefill.requests["p1"].blocks)
        world.round()
        world.clock.now += 0.4
        world.until(sent(world))
        for rank in prefill.ranks:
            rank.write(99, blocks, range(13))
        start(world, decode, params)
        world.until(failed(world))
        assert world.end_of("D", "d1") == [EndState.EXPIRED]
        assert isinstance(errors(world)[0], LeaseExpired)
        (end,) = world.outcomes["D"].failed["d1"]
        assert end.blocks == (tuple(decode.requests["d1"].blocks),)
        assert "d1" not in world.outcomes["D"].received


def test_blocks_that_are_reused_while_they_are_read_are_found_out():
    config = {"lease_duration": 0.2, "heartbeat_interval": 0.1, "missed_heartbeats": 100}
    with pair(**config) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        blocks = list(prefill.requests["p1"].blocks)
        world.round()
        # Half of the bytes still move.
        reads = world.before_reads("D", world.network.pause)
        world.network.drop_notifications("P.0.0", 100)
        start(world, decode, params)
        world.until(lambda: reads)
        world.clock.now += 0.4
        prefill.step()  # the word moves on
        for rank in prefill.ranks:
            rank.write(99, blocks, range(13))
        world.network.resume("P.0.0")
        world.until(failed(world))
        assert world.end_of("D", "d1") == [EndState.EXPIRED]


def test_an_invented_lease_is_never_a_success():
    with pair(transfer_timeout=30) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        world.round()
        slot, token = params["lease"].split("-")
        forged = {"d1": f"{slot}-{int(token, 16) - 2:x}", "d2": f"{slot}-{int(token, 16) + 2:x}"}
        forged["d3"] = f"99999999-{token}"
        for request_id, lease in forged.items():
            decode.arrive(request_id, 7, 13, {**params, "lease": lease})
            decode.schedule(request_id)
        start(world, decode, params, request_id="d4")
        world.until(received(world, "d4"))
        world.until(failed(world, "d3"))
        assert "99999999" in str(errors(world, "d3")[0])
        world.pass_time(31)
        assert world.end_of("D", "d1") == [EndState.EXPIRED]
        assert world.end_of("D", "d2") == [EndState.FAILED]  # it was never granted


def test_nothing_is_read_for_longer_than_its_request_may_take():
    with pair(transfer_timeout=30) as (world, prefill, decode):
        timeouts = []

        def read(*args, timeout, **options):
            timeouts.append(timeout)
            return agent_read(*args, timeout=timeout, **options)

        agent = decode.ranks[0].agent
        agent_read, agent.read = agent.read, read
        start(world, decode, prefill.prefill("p1", 7, 13))
        arrives(world, decode)
        assert set(timeouts) == {30}  # of its lease and of its blocks


def test_log_records_name_the_request_and_the_peer(caplog):
    with pair(lease_duration=0.2) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        world.round()
        world.clock.now += 0.4
        world.until(sent(world))
        start(world, decode, params)
        world.until(failed(world))
    named = {(r.request, r.peer) for r in caplog.records if hasattr(r, "request")}
    assert named == {("p1", ""), ("d1", "P")}


def test_nothing_is_read_before_the_lease_is_granted():
    with pair() as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        blocks = prefill.requests["p1"].blocks
        prefill.ranks[0].poison(blocks)  # the device has not computed it yet
        prefill.event = FakeEvent()
        start(world, decode, params)
        world.until(lambda: decode.stats.peers)
        world.quiet()
        assert not world.outcomes["D"].received
        prefill.ranks[0].write(7, blocks, range(13))
        prefill.event.is_done = True
        world.pass_time(0.1)
        arrives(world, decode)
        assert decode.stats.transfers == 1


def test_heartbeats_extend_a_lease_and_silence_ends_it():
    with pair(**BEATS_10, transfer_timeout=1000) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        begin = world.clock.now
        decode.arrive("d1", 7, 13, params)  # queued, not scheduled
        world.until(lambda: decode.stats.peers)
        world.quiet()
        for _ in range(10):
            world.pass_time(10)
        assert world.clock.now == begin + 100
        world.network.drop_notifications("P.0.0", 10**6)
        world.pass_time(29.9)
        assert prefill.stats.live_leases == 1
        world.pass_time(0.1)
        world.until(sent(world))
        assert prefill.stats.leases == {"expired": 1}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_dead_peer_fails_its_requests_and_can_come_back(mode, how):
    with pair(mode, **BEATS_10, transfer_timeout=1000) as (world, prefill, decode):
        connect(world, prefill, decode)
        world.until(lambda: prefill.stats.consumers)
        world.quiet()  # an answer that came later would count as a sign of life
        again = prefill.prefill("p2", 7, 13)
        if how == "killed":
            world.kill("P")
        else:
            world.network.drop_notifications("P.0.0", 10**6)
            world.network.pause("P.0.0")
        start(world, decode, again)
        for _ in range(4):
            world.pass_time(10)
        assert world.count("D", "peers_lost") == 1
        if how == "killed":
            world.until(failed(world))
            assert isinstance(errors(world)[0], (PeerLostError, HandshakeError))
            prefill = world.engine("P")
        else:
            # What it does with the blocks is not known before it answers.
            world.network.drop_notifications("P.0.0", 0)
            world.network.resume("P.0.0")
            world.pass_time(10)
            world.until(failed(world))
            assert isinstance(errors(world)[0], PeerLostError)
        start(world, decode, prefill.prefill("p3", 5, 13), request_id="d3", prompt=5)
        arrives(world, decode, "d3")


def test_a_waiting_request_is_aborted_while_nobody_hears_of_it():
    with pair(**BEATS_10) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        lease = Lease.parse(params["lease"])
        decode.arrive("d1", 7, 13, params)
        world.until(lambda: decode.stats.peers)
        world.quiet()
        world.network.drop_notifications("P.0.0", 10**6)
        decode.finish("d1")
        world.pass_time(29.9)
        assert not world.outcomes["P"].sent
        world.pass_time(10)
        assert world.outcomes["P"].sent == {"p1"}
        free = sorted(prefill.free)
        late = messages.Release(ConsumerRank("D", (0, 0), ParallelSizes()), [("p1", lease)])
        world.deliver("P", "D.0.0", late)
        world.quiet()
        assert sorted(prefill.free) == free
        assert world.count("P", "late_notifications") == 1


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_request_that_is_rejected_unseen_is_released(mode):
    with pair(mode) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        info = RequestInfo("d1", 13, KVTransferParams.from_dict(params))
        assert decode.scheduler.request_finished(info, ((),), 0, is_complete=False) == (False, None)
        world.until(sent(world))
        assert world.leases("P") == [0]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_abort_before_the_workers_know_of_it_is_a_release(mode):
    with pair(mode) as (world, prefill, decode):
        inbox = world.listen("P")
        start(world, decode, prefill.prefill("p1", 7, 13))
        decode.finish("d1")
        assert "d1" not in decode.requests
        world.until(sent(world))
        world.quiet()
        assert inbox.releases() == [(0, "p1")]
        assert not inbox.of(messages.Push)


def test_nothing_is_received_into_blocks_that_a_step_still_uses():
    with pair() as (world, prefill, decode):
        start(world, decode, prefill.prefill("p1", 7, 13))
        rank, blocks = decode.ranks[0], decode.requests["d1"].blocks
        decode.event = event = FakeEvent()
        world.until(lambda: rank.worker.stats.snapshot().peers)
        world.quiet()
        rank.write(3, blocks, range(13))  # the step in flight
        world.quiet()
        assert rank.holds(3, blocks, range(13))
        assert not world.outcomes["D"].received
        event.is_done = True
        arrives(world, decode)


def test_a_step_that_fails_fails_what_waits_for_it():
    with pair() as (world, prefill, decode):
        start(world, decode, prefill.prefill("p1", 7, 13))
        decode.event = FakeEvent()
        decode.event.error = RuntimeError("device lost")
        world.until(failed(world))
        assert str(errors(world)[0]) == "device lost"


def test_several_failures_of_a_request_are_one_end():
    with pair(producer={"tp": 2}) as (world, prefill, decode):
        connect(world, prefill, decode)
        params = prefill.prefill("p2", 7, 13)

        def stop(name):
            world.network.fail_next(name, 1)
            world.network.pause(name)

        reads = world.before_reads("D", stop)
        start(world, decode, params)
        world.until(lambda: len(reads) == 2)
        world.network.resume("P.0.0")
        world.until(lambda: decode.stats.transfer_failures)
        world.quiet()
        assert not world.outcomes["D"].failed  # the other may still move bytes
        world.network.resume("P.0.1")
        world.until(failed(world))
        world.quiet()  # the toy engine checks that nothing is reported twice
        assert world.end_of("D", "d1") == [EndState.FAILED]
        assert decode.stats.ends == {"received": 1, "failed": 1}


def test_a_completion_that_comes_twice_is_counted():
    with pair(consumer={"tp": 2}) as (world, prefill, _):
        params = prefill.prefill("p1", 7, 13)
        lease = Lease.parse(params["lease"])
        world.round()

        def release(rank):
            reader = ConsumerRank("D", (0, rank), ParallelSizes(tp=2))
            world.deliver("P", f"D.0.{rank}", messages.Release(reader, [("p1", lease)]))

        release(0)
        release(0)
        world.quiet()
        assert not world.outcomes["P"].sent
        assert world.count("P", "duplicate_notifications") == 1
        release(1)
        world.until(sent(world))
        release(1)
        world.quiet()
        assert world.count("P", "late_notifications") == 1


def test_a_push_that_ends_twice_is_received_once():
    with pair("push") as (world, prefill, decode):
        inbox = world.listen("D")
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.until(received(world))
        (end,) = inbox.of(messages.PushDone)
        world.deliver("D", "P.0.0", end)
        world.quiet()
        assert world.count("D", "late_notifications") == 1


def test_a_failing_post_at_the_producer_is_told_at_once():
    with pair("push", lease_duration=30) as (world, prefill, decode):
        connect(world, prefill, decode)
        begin = world.clock.now
        params = prefill.prefill("p2", 7, 13)
        world.network.fail_next("D.0.0")
        start(world, decode, params)
        world.until(failed(world))
        assert world.clock.now == begin
        assert "injected" in str(errors(world)[0])


def test_an_exception_in_a_message_handler_ends_the_request(monkeypatch):
    with pair("push") as (world, prefill, decode):
        agent = prefill.ranks[0].agent

        def write(peer, *_args, **_options):
            raise PeerLostError("remote disconnect", peer=peer.name)

        monkeypatch.setattr(agent, "write", write)
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.until(failed(world))
        assert world.end_of("D", "d1") == [EndState.FAILED]
        assert "remote disconnect" in str(errors(world)[0])


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_peer_that_dies_takes_only_its_own_requests(mode):
    with World(mode) as world:
        victim, other, decode = world.engine("V"), world.engine("P"), world.engine("D")
        for name, engine in (("v", victim), ("p", other)):
            start(world, decode, engine.prefill(f"{name}0", 7, 4), request_id=name, num_tokens=4)
        world.until(lambda: world.outcomes["D"].received == {"v", "p"})
        two = [victim.prefill(f"v{i}", i, 13) for i in (1, 2)]
        for name in ("V.0.0", "P.0.0", "D.0.0"):
            world.network.set_delay(name, 0.02)
        for i, params in enumerate(two, 1):
            start(world, decode, params, request_id=f"d{i}", prompt=i)
        start(world, decode, other.prefill("p3", 3, 13), request_id="d3", prompt=3)
        world.round()
        world.round()
        world.kill("V")
        world.pass_time(5)  # a consumer that waits for a push gets no notice
        world.until(
            lambda: len(world.outcomes["D"].failed) + len(world.outcomes["D"].received) == 5
        )
        assert set(world.outcomes["D"].failed) == {"d1", "d2"}
        assert decode.holds("d3")


def test_a_failed_part_is_not_counted_as_loaded():
    with pair(producer={"tp": 4}) as (world, prefill, decode):
        connect(world, prefill, decode)
        before = decode.stats.transfers
        params = prefill.prefill("p2", 7, 13)

        def stop(name):
            world.network.pause(name)
            if name == "P.0.2":
                world.network.fail_next(name)

        reads = world.before_reads("D", stop)
        start(world, decode, params)
        world.until(lambda: len(reads) == 4)
        for rank in (0, 1, 3):
            world.network.resume(f"P.0.{rank}")
        world.until(lambda: decode.stats.transfers == before + 3)
        world.network.resume("P.0.2")
        world.until(failed(world))
        stats = decode.stats
        assert stats.transfers == before + 3
        assert stats.transfer_failures == {"failed": 1}
        assert stats.ends == {"received": 1, "failed": 1}


def test_a_producer_that_fails_before_the_transfer_says_so():
    with pair("push") as (world, prefill, decode):
        # The consumer does not wait for the prefill: it knows only the producer.
        start_early(world, prefill, decode)
        info = RequestInfo("p1", 13, KVTransferParams(do_remote_decode=True))
        keeps, params = prefill.scheduler.request_finished(info, ((0, 1),), 8, is_complete=False)
        assert (keeps, params) == (False, None)
        begin = world.clock.now
        world.until(failed(world))
        assert world.clock.now == begin
        assert "gave the request up" in str(errors(world)[0])


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_end_is_final_and_noise_is_harmless(mode):
    with pair(mode) as (world, prefill, decode):
        inbox = world.listen("D")
        connect(world, prefill, decode)
        params = prefill.prefill("p2", 7, 13)
        slow = "P.0.0" if mode == "pull" else "D.0.0"
        world.network.set_delay(slow, 0.02)
        start(world, decode, params)
        world.until(lambda: prefill.num_running or decode.num_running)
        decode.finish("d1")  # and the transfer goes on to its good end
        world.until(failed(world))
        assert world.end_of("D", "d1") == [EndState.ABORTED]
        for end in inbox.of(messages.PushDone):
            world.deliver("D", "P.0.0", messages.PushDone(end.push_id, False, ""))
        good = messages.encode(messages.CancelPush(1))
        unknown = good.replace(b"cancel_push", b"cancel_pull")
        with FakeAgent("stranger", world.network) as stranger:
            peer = stranger.connect(decode.hellos[0, 0])
            for data in (b"XYZ", b"", b"\xc1", b"\x80", unknown, good[:-1]):
                stranger.notify(peer, data)
            world.until(lambda: world.count("D", "foreign_notifications") == 6)
        world.quiet()
        assert "d1" not in world.outcomes["D"].received
        start(world, decode, prefill.prefill("p3", 5, 13), request_id="d3", prompt=5)
        world.until(received(world, "d3"))


def test_a_lost_release_costs_a_lease_and_no_more():
    with pair(lease_duration=30, checksums="off") as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        world.before_reads("D", lambda name: world.network.drop_notifications(name, 10**6))
        start(world, decode, params)
        world.until(received(world))
        assert not world.outcomes["P"].sent
        world.pass_time(30)
        world.until(sent(world))


@pytest.mark.parametrize("lost", ["attach", "push", "push end", "beat", "beat answer", "stop"])
def test_no_single_lost_notice_hangs_a_push(lost):
    with pair("push", **BEATS_5, transfer_timeout=300) as (world, prefill, decode):
        at_p, at_d = world.listen("P"), world.listen("D")
        if lost == "attach":
            world.network.drop_notifications("P.0.0", 1)
        else:
            connect(world, prefill, decode)
            world.quiet()
        params = prefill.prefill("p1", 7, 13)
        if lost == "beat":
            world.network.drop_notifications("P.0.0", 1)
        elif lost == "push":
            world.round()
            world.pass_time(5)
            world.network.drop_notifications("P.0.0", 2)
        elif lost == "beat answer":
            world.network.drop_notifications("D.0.0", 1)
        start(world, decode, params)
        if lost == "push end":
            world.network.set_delay("D.0.0", 0.02)
            world.until(lambda: prefill.num_running)
            world.network.drop_notifications("D.0.0", 1)
        if lost == "stop":
            world.network.pause("D.0.0")
            world.until(lambda: prefill.num_running)
            world.network.drop_notifications("P.0.0", 1)
            decode.finish("d1")
            world.quiet()
            world.network.resume("D.0.0")
        for _ in range(4):
            world.pass_time(5)
        if lost == "stop":
            world.until(failed(world))
            assert world.end_of("D", "d1") == [EndState.ABORTED]
        else:
            arrives(world, decode)
        world.until(sent(world))
        assert at_p.of(messages.Push)
        assert at_d.of(messages.PushDone)


def test_nothing_is_heard_from_the_producer_at_all():
    with pair("push", **BEATS_5, transfer_timeout=12) as (world, prefill, decode):
        world.network.drop_notifications("P.0.0", 10**6)
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.until(lambda: decode.stats.peers)
        world.pass_time(12)
        world.until(failed(world))
        assert isinstance(errors(world)[0], TransferTimeout)


def test_blocks_that_are_appended_between_steps_are_sent_too():
    with pair("push") as (world, prefill, decode):
        start_early(world, prefill, decode, num_tokens=11)
        prefill.begin("p1", 7, 11)
        prefill.compute("p1", 8)
        world.until(lambda: decode.ranks[0].holds(7, decode.requests["d1"].blocks, range(8)))
        assert not world.outcomes["D"].received
        complete(world, prefill, decode, 11)
        rank = prefill.ranks[0]
        snapshot = rank.worker.stats.snapshot()
        assert snapshot.transfers == 4  # two chunks of two layers
        assert snapshot.bytes == len(rank.layers) * 11 * 2 * 4 * 8 * 2


def test_an_engine_that_does_not_serve_all_of_its_ranks_is_named():
    with pair(producer={"tp": 2}) as (world, prefill, decode):
        full = world.book["P"]
        world.book["P"] = {(0, 0): full[0, 0]}
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.until(failed(world))
        (error,) = errors(world)
        assert isinstance(error, RankNotFound)
        assert error.missing == [(0, 1)]
        assert error.available == [(0, 0)]


def test_hand_offs_whose_lists_do_not_pair_up_are_refused():
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "P",
        "remote_request_id": "p1",
        "remote_host": "h",
        "remote_port": 1,
        "remote_block_ids": [[1], [2]],
        "remote_starts": [0],
        "remote_num_tokens": 4,
        "lease": "0-7",
        "lease_duration": 30.0,
    }
    with pytest.raises(ConfigError, match="remote_starts has 1 entries, remote_block_ids 2"):
        KVTransferParams.from_dict(params)


def test_block_tables_stay_small_on_the_wire():
    # Tables of 15,000 blocks, and of as many in any order, in the message that carries them.
    for blocks in (range(15_000), np.random.default_rng(0).permutation(15_000).tolist()):
        push = messages.Push(
            consumer=ConsumerRank("D", (0, 0), ParallelSizes()),
            request_id="p1",
            lease=None,
            push_id=1,
            blocks=(tuple(blocks),),
            starts=(0,),
            block_sizes=(16,),
            num_tokens=15_000 * 16,
        )
        data = messages.encode(push)
        assert len(data) < 64_000
        assert messages.decode(data) == push


def test_the_number_of_descriptors_is_counted():
    layers = 48
    with pair(model=Model(layers=layers, kv_heads=1, dim=2)) as (world, prefill, decode):
        start(world, decode, prefill.prefill("p1", 7, 4), num_tokens=4)
        world.until(received(world))
        assert decode.stats.descriptors == 2 * layers


# ---- what happens on the way to the cases above


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_abort_while_bytes_move_is_reported_when_they_are_quiet(mode):
    with pair(mode) as (world, prefill, decode):
        connect(world, prefill, decode)
        params = prefill.prefill("p1", 7, 13)
        if mode == "pull":
            reads = world.before_reads("D", world.network.pause)
        else:
            world.network.pause("D.0.0")
        start(world, decode, params)
        world.until(lambda: reads if mode == "pull" else prefill.num_running)
        if mode == "pull":  # one that was not posted yet would be quiet at once
            (read,) = decode.ranks[0].worker._receiver._requests["d1"].transfers
            world.until(lambda: TransferResult(*read._native.result).batches)
        decode.finish("d1")
        world.quiet()
        assert not world.outcomes["D"].failed
        world.network.resume("P.0.0" if mode == "pull" else "D.0.0")
        world.until(failed(world))
        blocks = decode.requests["d1"].blocks
        decode.ranks[0].poison(blocks)
        world.until(sent(world))
        world.quiet()
        assert (decode.ranks[0].read(blocks, range(16)) == 0xDEAD).all()
        assert decode.scheduler._settled == {"d0"}
        assert not decode.scheduler._receiving


def test_a_push_that_is_asked_for_in_an_earlier_life_is_not_written_in_the_next():
    with pair("push") as (world, prefill, decode):
        start_early(world, prefill, decode)
        world.kill("D")
        decode = world.engine("D")
        start(world, decode, prefill.prefill("p0", 3, 4), request_id="d0", prompt=3, num_tokens=4)
        arrives(world, decode, "d0")
        prefill.prefill("p1", 7, 13)
        world.quiet()
        assert not prefill.stats.pushes
        untouched = [b for b in range(16) if b not in decode.requests["d0"].blocks]
        assert (decode.ranks[0].read(untouched, range(4 * len(untouched))) == 0xDEAD).all()


def test_a_request_that_is_preempted_is_pushed_anew():
    with pair("push") as (world, prefill, decode):
        start_early(world, prefill, decode, num_tokens=12)
        prefill.begin("p1", 7, 12)
        prefill.compute("p1", 8)
        world.network.pause("D.0.0")
        world.until(lambda: prefill.num_running)
        taken = prefill.preempt("p1")
        prefill.ranks[0].write(99, taken, range(8))  # another request has the blocks
        world.quiet()
        prefill.compute("p1", 4)
        world.round()
        prefill.compute("p1", 12)
        world.round()
        assert prefill.hand_over("p1")
        world.quiet()
        world.network.resume("D.0.0")
        arrives(world, decode)


@pytest.fixture
def pushing():
    """A world with a producer that is asked for a request before it begins, and a consumer."""
    with pair("push") as (world, prefill, decode):
        start_early(world, prefill, decode, num_tokens=12)
        prefill.begin("p1", 7, 12)
        yield world, prefill, decode


def launch(world, prefill, until):
    """Launch a chunk on a device that has not begun with it; returns the events of its layers."""
    prefill.layer_events = {layer: FakeEvent() for layer in prefill.ranks[0].layers}
    prefill.compute("p1", until)
    world.step("P")
    prefill.ranks[0].poison(prefill.requests["p1"].blocks)
    world.quiet()
    return prefill.layer_events


def test_a_layer_is_written_when_the_device_has_finished_it(pushing):
    world, prefill, decode = pushing
    events = launch(world, prefill, 8)
    blocks = prefill.requests["p1"].blocks
    assert (decode.ranks[0].read(decode.requests["d1"].blocks, range(12)) == 0xDEAD).all()
    for layer, event in events.items():
        prefill.ranks[0].write(7, blocks, range(8), layers=[layer])
        event.is_done = True

    world.until(lambda: decode.ranks[0].holds(7, decode.requests["d1"].blocks, range(8)))
    complete(world, prefill, decode)
    assert prefill.stats.transfers == 4  # two chunks of two layers


@pytest.mark.parametrize(("state_heads", "writes"), [(4, 1), (None, 2 * 2 + 1)])
def test_state_is_written_at_the_end_of_the_prompt_and_not_before(state_heads, writes):
    """Attention of the same heads waits with it; of others, two layers go in two chunks."""
    with pair("push", model=Model(state_heads=state_heads)) as (world, prefill, decode):
        start_early(world, prefill, decode, num_tokens=12)
        prefill.begin("p1", 7, 12)
        for until in (8, 12):
            prefill.compute("p1", until)
            world.quiet()
            assert (decode.ranks[0].states == POISON).all()
        assert prefill.hand_over("p1")
        arrives(world, decode)
        assert prefill.stats.transfers == writes


def test_layers_whose_blocks_are_taken_away_are_not_written(pushing):
    world, prefill, decode = pushing
    events = launch(world, prefill, 8)
    prefill.preempt("p1")
    world.round()
    for event in events.values():
        event.is_done = True
    world.quiet()
    assert (decode.ranks[0].read(decode.requests["d1"].blocks, range(12)) == 0xDEAD).all()
    complete(world, prefill, decode)


def test_a_request_that_ends_before_its_layers_is_written_whole_when_all_is_there(pushing):
    world, prefill, decode = pushing
    events = launch(world, prefill, 12)
    blocks = prefill.requests["p1"].blocks
    prefill.event = FakeEvent()
    assert prefill.hand_over("p1")
    world.quiet()
    assert not world.outcomes["D"].received
    prefill.ranks[0].write(7, blocks, range(12))
    for event in (*events.values(), prefill.event):
        event.is_done = True
    arrives(world, decode)


def test_a_layer_that_fails_on_the_device_fails_its_requests(pushing):
    world, prefill, _ = pushing
    events = launch(world, prefill, 8)
    events[0].error = RuntimeError("the device is lost")
    world.until(failed(world))
    (error,) = errors(world)
    assert "the device is lost" in str(error)


def test_an_engine_that_moves_to_another_address_is_found_there():
    with pair() as (world, prefill, decode):
        connect(world, prefill, decode)
        world.kill("P")
        prefill = world.engine("P")
        prefill.scheduler.address = ("elsewhere", 1)
        start(world, decode, prefill.prefill("p1", 7, 13))
        arrives(world, decode)


def test_an_address_with_a_new_tenant_fails_what_waits_for_the_old_one():
    with pair("push", transfer_timeout=1000) as (world, prefill, decode):
        address = prefill.scheduler.address
        start_early(world, prefill, decode)
        world.kill("P")
        successor = world.engine("P2")
        successor.scheduler.address = address
        start(world, decode, successor.prefill("p2", 5, 13), request_id="d2", prompt=5)
        world.until(received(world, "d2"))
        world.until(failed(world))


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    "change",
    [
        {"remote_port": 1},
        {"remote_host": "nowhere"},
        {"remote_engine_id": "P-of-yesterday"},
        {"tp_size": 2},
        {"pp_size": 3},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_a_bad_hand_off_harms_itself_only(mode, change, is_known):
    sides = {"producer": {"num_blocks": 64}, "consumer": {"num_blocks": 64}}
    with pair(mode, **sides, transfer_timeout=1000, lease_duration=1000) as (
        world,
        prefill,
        decode,
    ):
        if is_known:
            connect(world, prefill, decode)
        good = [prefill.prefill(f"q{i}", i, 13) for i in range(4)]
        world.quiet()
        start(world, decode, {**good[0], **change}, request_id="bad", prompt=0)
        for i in range(1, 4):
            start(world, decode, good[i], request_id=f"d{i}", prompt=i)
        for i in range(1, 4):
            arrives(world, decode, f"d{i}")


def test_a_bad_hand_off_has_fixed_bounds():
    for change in ({"tp_size": 65536}, {"tp_size": 4096, "pp_size": 2}, {"pp_size": 4097}):
        with pytest.raises(ConfigError, match="4096"):
            KVTransferParams.from_dict(change)
    for text in ("é" * 257, "half of a pair: \ud800"):
        with pytest.raises(ConfigError, match="expected at most 512 bytes of UTF-8"):
            KVTransferParams.from_dict({"remote_request_id": text})


class Blocked:
    """Handshakes with all engines but one hang until they are let go."""

    def __init__(self, world, engine_id):
        self._fetch, self._engine_id = world._fetch, engine_id
        self.let_go = threading.Event()
        world._fetch = self
        world.has_blocked_threads = True

    def __call__(self, address, *, engine_id, **options):
        if engine_id != self._engine_id:
            assert self.let_go.wait(DEADLINE_S)
        return self._fetch(address, engine_id=engine_id, **options)


def test_dead_engines_do_not_hold_up_the_living():
    with World(transfer_timeout=1000) as world:
        blocked = Blocked(world, "P")
        prefill, decode = world.engine("P"), world.engine("D", num_blocks=512)
        params = prefill.prefill("p1", 7, 13)
        for i in range(40):
            start(world, decode, {**params, "remote_engine_id": f"gone-{i}"}, request_id=f"x{i}")
        start(world, decode, params)
        world.until(received(world))
        assert not world.outcomes["D"].failed
        blocked.let_go.set()
        world.until(lambda: len(world.outcomes["D"].failed) == 40)


def test_time_in_the_queue_of_handshakes_does_not_count(monkeypatch):
    monkeypatch.setattr(worker_module, "_NUM_HANDSHAKES", 1)
    with World(transfer_timeout=30, lease_duration=1000) as world:
        blocked = Blocked(world, "P")
        prefill, decode = world.engine("P"), world.engine("D")
        params = prefill.prefill("p1", 7, 13)
        start(world, decode, {**params, "remote_engine_id": "gone"}, request_id="x")
        start(world, decode, params)
        world.pass_time(100, 10)
        assert isinstance(errors(world, "x")[0], TransferTimeout)
        blocked.let_go.set()
        world.until(received(world))


def test_a_consumer_that_has_asked_for_hellos_gets_one_lease_more():
    with pair(**BEATS_10) as (world, prefill, _):
        prefill.prefill("p1", 7, 13)
        world.quiet()
        begin = world.clock.now
        while prefill.stats.live_leases:
            prefill.scheduler.consumer_comes()
            world.pass_time(5)
        assert world.clock.now == begin + 35


def test_a_first_contact_that_takes_long_keeps_the_lease_alive(monkeypatch, caplog):
    is_testing, let_go = threading.Event(), threading.Event()

    def slow_test(*_):
        is_testing.set()
        assert let_go.wait(DEADLINE_S)

    monkeypatch.setattr(verification, "self_test", slow_test)
    caplog.set_level("INFO", "pynixlkv")
    with pair(**BEATS_10, self_test=True, transfer_timeout=1000) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        world.has_blocked_threads = True
        start(world, decode, params)
        world.until(is_testing.is_set)
        world.pass_time(200, 40)
        assert prefill.stats.live_leases == 1
        let_go.set()
        world.until(received(world))
        world.until(sent(world))
        start(world, decode, prefill.prefill("p2", 8, 13), request_id="d2", prompt=8)
        world.until(received(world, "d2"))
    (line,) = [r.getMessage() for r in caplog.records if "first contact" in r.getMessage()]
    phases = ("handshake", "connect", "self-test", "connecting", "moving", "reading")
    assert all(re.search(rf" {name} \d+ ms", line) for name in phases)
    assert " connecting 200000 ms" in line


def test_engines_whose_blocks_do_not_fit_are_refused_at_one_contact_and_release(caplog):
    with World() as world:
        model = Model(packing="packed")
        prefill = world.engine("P", model)
        decode = world.engine("D", model, block_size=8)
        for i in range(3):
            start(
                world,
                decode,
                prefill.prefill(f"p{i}", i, 8),
                request_id=f"d{i}",
                prompt=i,
                num_tokens=8,
            )
            world.until(failed(world, f"d{i}"))
            (error,) = errors(world, f"d{i}")
            assert isinstance(error, IncompatibleLayoutError)
            assert "[8] tokens here, [4] there (--block-size of vLLM)" in str(error)
        world.until(lambda: prefill.stats.leases == {"released": 3})
        assert world.num_fetches == 1
        assert decode.stats.causes == {"refused": 3}
    assert [r.levelname for r in caplog.records if "nothing can be read" in r.msg % r.args].count(
        "ERROR"
    ) == 1


@pytest.mark.parametrize(("drawn", "pause"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)])
def test_an_engine_that_cannot_be_reached_is_refused_for_a_moment(drawn, pause):
    with pair(consumer={"draw": lambda: drawn}) as (world, prefill, decode):
        params = {**prefill.prefill("p1", 7, 13), "remote_engine_id": "gone"}
        for i in range(2):
            start(world, decode, params, request_id=f"x{i}")
            world.until(failed(world, f"x{i}"))
        assert world.num_fetches == 1
        for more, when in enumerate((pause - 0.25, 0.25)):
            world.pass_time(when)
            start(world, decode, params, request_id=f"x{2 + more}")
            world.until(failed(world, f"x{2 + more}"))
            assert world.num_fetches == 1 + more


def test_consumers_that_are_silent_for_long_are_forgotten_and_may_come_back():
    with pair("push", peer_ttl=100, lease_duration=30) as (world, prefill, decode):
        connect(world, prefill, decode)
        world.quiet()
        assert prefill.stats.consumers == 1
        world.pass_time(131)
        assert not prefill.stats.consumers
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.quiet()
        world.pass_time(5, 2)
        world.until(received(world))


def test_shutdown_waits_for_handshakes_since_they_hold_the_agent():
    asked, answer = threading.Event(), threading.Event()

    def fetch(*_args, **_options):
        asked.set()
        answer.wait(DEADLINE_S)
        raise TimeoutError

    with World() as world:
        world._fetch = fetch
        prefill, decode = world.engine("P"), world.engine("D")
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.round()
        assert asked.wait(DEADLINE_S)
        before = threading.active_count()
        stopping = threading.Thread(target=decode.ranks[0].worker.shutdown, args=[DEADLINE_S])
        stopping.start()
        stopping.join(0.1)
        assert stopping.is_alive()
        answer.set()
        stopping.join(DEADLINE_S)
        assert threading.active_count() < before


def test_messages_are_short_enough_whatever_they_list():
    lease = Lease(2**48 - 1, 2**62)
    entries = [messages.Reader("x" * 512, lease, 2**62, 1024)] * messages.MAX_ENTRIES
    reader = ConsumerRank("e" * 512, (2**16 - 1, 2**16 - 1), ParallelSizes(1, 4096, 4096))
    assert len(messages.encode(messages.Release(reader, entries))) < 1 << 20
    beat = messages.Heartbeat(entries)
    assert messages.decode(messages.encode(beat)) == beat
    ack = messages.HeartbeatAck(
        [(e.request_id, lease, messages.LeaseStatus.ENDED) for e in entries]
    )
    assert len(messages.encode(ack)) < 1 << 20


def test_more_leases_are_checked_than_there_are_words(monkeypatch):
    monkeypatch.setattr("pynixlkv.connector.worker._LEASE_BUFFER_WORDS", 3)
    many = 40
    blocks = {"num_blocks": 4 * many}
    with pair(producer=blocks, consumer=blocks) as (world, prefill, decode):
        for i in range(many):
            start(world, decode, prefill.prefill(f"p{i}", i, 13), request_id=f"d{i}", prompt=i)
        world.until(lambda: len(world.outcomes["D"].received) == many)
        assert all(decode.holds(f"d{i}") for i in range(many))
        assert decode.stats.lease_checks == 0
        world.until(lambda: len(world.outcomes["P"].sent) == many)


def test_a_hand_off_that_cannot_be_cut_takes_no_lease():
    scheduler = ConnectorScheduler("P", [GroupSpec(4)], address=("h", 1))
    info = RequestInfo("p1", 13, KVTransferParams(do_remote_decode=True))
    before = scheduler.num_free_leases
    with pytest.raises(ConfigError, match="does not reach 13"):
        scheduler.request_finished(info, ((1,),), 13)
    assert scheduler.num_free_leases == before


def test_a_request_that_the_workers_cannot_begin_has_an_end_all_the_same(caplog):
    with pair() as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        broken = msgspec.structs.replace(KVTransferParams.from_dict(params), lease="nonsense")
        decode.requests["d1"] = ToyRequest(RequestInfo("d1", 13, broken), 7, [])
        decode.schedule("d1")
        start(world, decode, params, request_id="d2")
        world.until(failed(world))
        assert "nonsense" in str(errors(world)[0])
        world.until(received(world, "d2"))
        caplog.clear()


def peers_of(engine):
    """Return a list that grows by the peers that the first rank of an engine connects to."""
    agent, peers = engine.ranks[0].agent, []
    connect = agent.connect

    def hooked(hello):
        peers.append(connect(hello))
        return peers[-1]

    agent.connect = hooked
    return peers


def test_a_consumer_stays_connected_to_a_silent_producer_that_may_still_write():
    with pair("push", **BEATS_5, transfer_timeout=1000) as (world, prefill, decode):
        peers = peers_of(decode)
        connect(world, prefill, decode)
        params = prefill.prefill("p1", 7, 13)
        world.network.pause("D.0.0")
        start(world, decode, params)
        world.until(lambda: prefill.num_running)
        world.network.drop_notifications("P.0.0", 10**6)
        world.pass_time(40, 8)
        assert world.count("D", "peers_lost") == 1
        assert not world.outcomes["D"].failed
        assert [peer.is_connected for peer in peers] == [True]
        world.network.drop_notifications("P.0.0", 0)
        world.network.resume("D.0.0")
        world.pass_time(10, 2)
        world.until(failed(world))
        world.until(lambda: not peers[0].is_connected)


def test_a_handshake_that_outlasts_its_engine_leaves_no_connection():
    with World(**BEATS_5) as world:
        prefill = world.engine("P")
        answered, fetch = threading.Event(), world._fetch
        world._fetch = lambda *args, **options: answered.wait(DEADLINE_S) and fetch(
            *args, **options
        )
        decode = world.engine("D")
        peers = peers_of(decode)
        world.has_blocked_threads = True
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.round()
        decode.finish("d1")
        world.until(failed(world))
        world.pass_time(2 * world.config.peer_ttl, 4)
        answered.set()
        world.until(lambda: peers and not peers[0].is_connected)


def test_an_early_release_is_of_one_reader_alone():
    with pair("push") as (world, prefill, decode):
        start_early(world, prefill, decode)
        decode.finish("d1")
        world.until(failed(world))
        world.until(lambda: world.count("P", "early_notifications"))
        start(world, decode, early_params(prefill, "p1"), request_id="d2")
        world.quiet()
        prefill.begin("p1", 7, 13, num_readers=2)
        prefill.compute("p1", 13)
        world.quiet()
        prefill.hand_over("p1")
        arrives(world, decode, "d2")


def test_a_request_that_was_pushed_by_layers_can_share_a_lease_in_its_next_life():
    scheduler = ConnectorScheduler(
        "P", [GroupSpec(4)], address=("h", 1), config=ConnectorConfig(transfer_mode="push")
    )
    blocks = ((0, 1),)
    first, second = (
        RequestInfo(name, 8, KVTransferParams(do_remote_decode=True, sibling_group="g"))
        for name in ("p0", "p1")
    )
    scheduler.save(second, blocks, 8)
    assert scheduler.request_finished(second, blocks, 8, is_complete=False) == (False, None)
    is_kept, params = scheduler.request_finished(first, blocks, 8)
    assert is_kept
    is_kept, shared = scheduler.request_finished(second, blocks, 8)
    assert not is_kept
    assert shared["lease"] == params["lease"]


@pytest.mark.parametrize("is_complete", [True, False])
def test_no_layer_is_pushed_of_a_request_that_has_ended(is_complete):
    scheduler = ConnectorScheduler(
        "P", [GroupSpec(4)], address=("h", 1), config=ConnectorConfig(transfer_mode="push")
    )
    request = RequestInfo("p0", 8, KVTransferParams(do_remote_decode=True))
    scheduler.save(request, ((0, 1),), 8)
    scheduler.request_finished(request, ((0, 1),), 8, is_complete=is_complete)
    step = scheduler.build_connector_meta()
    assert not step.reqs_to_save
    assert bool(step.reqs_to_send) is is_complete


def test_a_release_that_cannot_be_sent_is_counted():
    with pair() as (world, prefill, decode):
        agent = decode.ranks[0].agent
        notify = agent.notify

        def lose(peer, data):
            if isinstance(messages.decode(data), messages.Release):
                raise PeerLostError("its cable was pulled", peer=peer.name)
            notify(peer, data)

        agent.notify = lose
        start(world, decode, prefill.prefill("p1", 7, 13))
        arrives(world, decode)
        world.quiet()
        assert world.count("D", "releases_lost") == 1


def repeat(world, engine_id, agent, message):
    """Deliver a message again, which must be counted as a duplicate."""
    before = world.count(engine_id, "duplicate_notifications")
    world.deliver(engine_id, agent, message)
    assert world.count(engine_id, "duplicate_notifications") == before + 1


def test_a_push_that_is_asked_for_twice_is_written_once():
    with pair("push") as (world, prefill, decode):
        connect(world, prefill, decode)
        at_p, at_d = world.listen("P"), world.listen("D")
        params = prefill.prefill("p1", 7, 13)
        world.network.pause("D.0.0")
        start(world, decode, params)
        world.until(lambda: prefill.num_running)
        (push,) = at_p.of(messages.Push)
        repeat(world, "P", "D.0.0", push)
        world.network.resume("D.0.0")
        arrives(world, decode)
        repeat(world, "P", "D.0.0", push)
        world.until(lambda: len(at_d.of(messages.PushDone)) == 2)
        assert prefill.stats.transfers == 2  # with that of `connect`


def test_the_end_of_a_push_that_comes_twice_is_not_that_of_another_rank():
    with pair("push", **BEATS_5, producer={"tp": 2}) as (world, prefill, decode):
        worker = decode.ranks[0].worker
        hear = worker._on_notification

        def hear_badly(agent, data, now):
            if agent == "P.0.0" or not isinstance(messages.decode(data), messages.PushDone):
                hear(agent, data, now)

        worker._on_notification = hear_badly
        at_d = world.listen("D")
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.until(lambda: at_d.of(messages.PushDone))
        world.quiet()
        done = next(
            m for _, name, m in at_d.messages if (name, type(m)) == ("P.0.0", messages.PushDone)
        )
        repeat(world, "D", "P.0.0", done)
        world.quiet()
        assert not world.outcomes["D"].received
        worker._on_notification = hear
        world.pass_time(5)
        arrives(world, decode)


def test_an_early_release_that_comes_twice_is_kept_once():
    with pair("push") as (world, _, _):
        consumer = ConsumerRank("D", (0, 0), ParallelSizes())
        release = messages.Release(consumer, [messages.Reader("p1", None, 5)])
        world.deliver("P", "D.0.0", release)
        repeat(world, "P", "D.0.0", release)
        assert world.count("P", "early_notifications") == 1


def test_a_worker_says_when_it_has_something_to_do_next():
    with pair(**BEATS_10, transfer_timeout=24) as (world, prefill, decode):
        prefill.prefill("p0", 7, 13)
        world.quiet()
        world.clock.now += 9
        params = prefill.prefill("p1", 7, 13)
        world.quiet()
        (producer, consumer) = (engine.ranks[0].worker for engine in (prefill, decode))
        assert producer.poll() == pytest.approx(21)  # the first lease expires
        world.network.pause("P.0.0")
        start(world, decode, params)
        world.quiet()
        assert consumer.poll() == pytest.approx(10)  # a heartbeat
        world.clock.now += 19
        world.quiet()
        assert consumer.poll() == pytest.approx(5)  # the request fails
        assert producer.poll() == pytest.approx(2)
        world.network.resume("P.0.0")
        arrives(world, decode)
