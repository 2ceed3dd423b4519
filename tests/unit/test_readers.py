"""A lease that many readers share: samples of a prompt, and consumers that get one hand-off."""

from __future__ import annotations

import pytest
from toy_pair import (
    BEATS_5,
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
from toy_world import FakeEvent, World

from pynixlkv.connector import messages, sender
from pynixlkv.connector.leases import LeaseSlots
from pynixlkv.connector.messages import ConsumerRank, Reader
from pynixlkv.connector.metadata import EndState, KVTransferParams, Lease, ParallelSizes
from pynixlkv.digest import DigestScope
from pynixlkv.errors import ConfigError

both_modes = pytest.mark.parametrize("mode", ["pull", "push"])


def releases(world, engine_id="P"):
    """Return how the leases of an engine have ended, for each rank."""
    return [rank.worker.stats.snapshot().leases for rank in world.engines[engine_id].ranks]


def received_one_by_one(world, decode, params, names):
    for name in names:
        start(world, decode, params, request_id=name)
        arrives(world, decode, name)
        world.quiet()


@both_modes
@pytest.mark.parametrize(("tp_d", "tp_e"), [(1, 2), (2, 1), (4, 4)])
def test_a_hand_off_to_two_engines_ends_with_the_last_of_them(mode, tp_d, tp_e):
    with World(mode, **BEATS_5, transfer_timeout=1000) as world:
        prefill = world.engine("P", tp=2)
        first, second = world.engine("D", tp=tp_d), world.engine("E", tp=tp_e, block_size=8)
        params = prefill.prefill("p1", 7, 13)
        first.arrive("d1", 7, 13, params)
        second.arrive("e1", 7, 13, params)
        world.until(lambda: first.stats.peers and second.stats.peers)
        world.quiet()
        first.schedule("d1")
        arrives(world, first)
        for _ in range(10):
            world.pass_time(10)
        assert world.leases("P") == [1, 1]
        second.schedule("e1")
        world.until(received(world, "e1", "E"))
        assert second.holds("e1")
        now = world.clock.now
        world.until(sent(world))
        assert world.clock.now == now
        assert releases(world) == [{"released": 1}] * 2


@both_modes
def test_readers_attach_when_they_are_queued(mode):
    with pair(mode, **BEATS_5) as (world, prefill, decode):
        connect(world, prefill, decode)
        params = prefill.prefill("p1", 7, 13)
        for name in ("d1", "d2"):
            decode.arrive(name, 7, 13, params)
        for name in ("d1", "d2"):
            world.quiet()
            assert world.leases("P") == [1]
            decode.schedule(name)
            arrives(world, decode, name)
        world.until(sent(world))


@both_modes
@pytest.mark.parametrize("num_readers", [2, 4, 8])
def test_readers_whose_number_is_announced_may_come_one_by_one(mode, num_readers):
    with pair(mode, producer={"tp": 2}, consumer={"num_blocks": 64}) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13, num_readers=num_readers)
        now = world.clock.now
        names = [f"d{i}" for i in range(num_readers)]
        received_one_by_one(world, decode, params, names[:-1])
        assert world.leases("P") == [1, 1]
        received_one_by_one(world, decode, params, names[-1:])
        assert sent(world)()
        assert world.clock.now == now
        assert not world.outcomes["D"].failed


@both_modes
def test_consumers_can_announce_the_number_of_readers(mode):
    with pair(mode) as (world, prefill, decode):
        params = {**prefill.prefill("p1", 7, 13), "num_readers": 2}
        received_one_by_one(world, decode, params, ["d1"])
        assert world.leases("P") == [1]
        received_one_by_one(world, decode, params, ["d2"])
        assert sent(world)()


@both_modes
def test_samples_of_unknown_number_have_a_heartbeats_time_to_come(mode):
    with pair(mode, **BEATS_5, consumer={"num_blocks": 64}) as (world, prefill, decode):
        params = {**prefill.prefill("p1", 7, 13), "num_readers": 0}
        for name in ("d1", "d2", "d3"):
            received_one_by_one(world, decode, params, [name])
            world.pass_time(4.9)
            assert world.leases("P") == [1]
        world.pass_time(0.2)
        assert sent(world)()
        assert releases(world) == [{"released": 1}]


def test_an_ordinary_request_is_freed_by_its_only_reader():
    with pair() as (world, prefill, decode):
        connect(world, prefill, decode)
        now = world.clock.now
        start(world, decode, prefill.prefill("p1", 7, 13))
        world.until(sent(world))
        assert world.clock.now == now


@both_modes
def test_samples_of_a_prompt_share_the_lease_of_the_first(mode):
    with pair(mode, consumer={"num_blocks": 64}) as (world, prefill, decode):
        free = len(prefill.free)
        offers = [prefill.prefill(f"{i}_p", 7, 13, sibling_group="p") for i in range(2)]
        world.quiet()  # the workers hold the lease when the others join
        offers += [prefill.prefill(f"{i}_p", 7, 13, sibling_group="p") for i in range(2, 4)]
        assert len(prefill.free) == free - 4  # the blocks of one
        assert {offer["remote_request_id"] for offer in offers} == {"0_p"}
        assert {offer["lease"] for offer in offers} == {offers[0]["lease"]}
        assert [offer["num_readers"] for offer in offers] == [1, 2, 3, 4]
        world.quiet()
        received_one_by_one(world, decode, offers[0], ["d1", "d2", "d3"])
        assert world.leases("P") == [1]
        received_one_by_one(world, decode, offers[3], ["d4"])
        assert world.outcomes["P"].sent == {"0_p"}
        assert len(prefill.free) == free
        # A later prompt of the group begins anew.
        assert prefill.prefill("4_p", 8, 13, sibling_group="p")["remote_request_id"] == "4_p"


def test_samples_do_not_hold_again_at_a_rank_where_the_lease_is_over():
    with pair(producer={"tp": 2}) as (world, prefill, _):

        def read(rank, number):
            reader = Reader("0_p", Lease.parse(params["lease"]), number)
            end = messages.Release(ConsumerRank("X", (0, 0), ParallelSizes()), [reader])
            for message in (messages.Heartbeat([reader]), end):
                rank.worker._on_notification("X", messages.encode(message), world.clock.now)
            world.quiet()

        params = prefill.prefill("0_p", 7, 13, sibling_group="p")
        world.quiet()
        first, second = prefill.ranks
        read(first, 0)
        assert prefill.prefill("1_p", 7, 13, sibling_group="p")["num_readers"] == 2
        world.quiet()
        read(second, 0)
        assert world.leases("P") == [0, 1]
        assert not sent(world, "0_p")()
        read(second, 1)
        assert sent(world, "0_p")()
        assert releases(world) == [{"released": 1}] * 2


def test_a_sample_of_another_length_has_a_lease_of_its_own():
    with pair() as (world, prefill, decode):
        prefill.prefill("0_p", 7, 13, sibling_group="p")
        other = prefill.prefill("1_p", 8, 9, sibling_group="p")
        assert other["remote_request_id"] == "1_p"
        start(world, decode, other, prompt=8, num_tokens=9)
        arrives(world, decode)


@pytest.mark.parametrize("how", ["killed", "released"])
def test_a_lost_reader_stops_counting_when_its_time_is_up(how):
    with World(**BEATS_5, transfer_timeout=1000, missed_heartbeats=1000) as world:
        prefill, lost, other = (world.engine(name) for name in "PDE")
        params = prefill.prefill("p1", 7, 13, num_readers=2)
        lost.arrive("d1", 7, 13, params)
        other.arrive("e1", 7, 13, params)
        world.until(lambda: lost.stats.peers and other.stats.peers)
        world.quiet()
        if how == "killed":
            world.kill("D")
        else:
            lost.finish("d1")
        for _ in range(5):
            world.pass_time(5)  # the other one is heard, so that its own time begins anew
        other.schedule("e1")
        world.until(received(world, "e1", "E"))
        world.quiet()
        if how == "killed":
            assert world.leases("P") == [1]
            world.pass_time(5)
        world.until(sent(world))
        assert releases(world) == [{"expired" if how == "killed" else "released": 1}]


def test_a_reader_that_is_done_extends_the_lease_no_more():
    with World(**BEATS_5) as world:
        params = world.engine("P").prefill("p1", 7, 13, num_readers=2)
        reader = Reader("p1", Lease.parse(params["lease"]), 1, 2)
        beat = messages.Heartbeat([reader])
        world.quiet()
        world.deliver("P", "X", beat)
        world.deliver(
            "P", "X", messages.Release(ConsumerRank("X", (0, 0), ParallelSizes()), [reader])
        )
        for _ in range(10):  # the other one never comes
            world.pass_time(5)
            world.deliver("P", "X", beat)
        world.until(sent(world))
        assert releases(world) == [{"expired": 1}]


@both_modes
def test_a_late_reader_of_a_lease_that_has_ended_finds_out(mode):
    with pair(mode) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        received_one_by_one(world, decode, params, ["d1"])
        assert sent(world)()
        start(world, decode, params, request_id="d2")
        world.until(failed(world, "d2"))
        assert world.end_of("D", "d2") == [EndState.EXPIRED]


@pytest.mark.parametrize("num_releases", [1, 3])
def test_a_release_ends_no_reader_but_its_own(num_releases):
    with pair(producer={"tp": 2}) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        lease = Lease.parse(params["lease"])
        decode.arrive("d1", 7, 13, params)
        world.until(lambda: decode.stats.peers)
        world.quiet()
        for rank in prefill.ranks:
            for number in range(num_releases):
                stranger = ConsumerRank("X", (0, 0), ParallelSizes())
                message = messages.Release(stranger, [Reader("p1", lease, number)])
                rank.worker._on_notification("X", messages.encode(message), world.clock.now)
        world.quiet()
        assert world.leases("P") == [1, 1]
        decode.schedule("d1")
        arrives(world, decode)
        world.until(sent(world))


def test_who_asks_before_it_has_introduced_itself_gets_no_answer():
    with pair() as (world, prefill, _):
        reader = Reader("p1", Lease.parse(prefill.prefill("p1", 7, 13)["lease"]), 1)
        world.quiet()
        consumer = ConsumerRank("X", (0, 0), ParallelSizes())
        scope = DigestScope("attn", (0,), (0,), 1, 2, (0, 4), 4, (0,))
        asked = [
            messages.Heartbeat([reader]),
            messages.CancelPush(1),
            messages.DigestRequest(1, reader, (scope,)),
            messages.Push(consumer, 1, "p1", reader.lease, ((0,),), (0,), (4,), 4),
        ]
        for number, message in enumerate(asked, start=1):
            world.deliver("P", "X", message)
            assert world.count("P", "unanswered_notifications") == number


def test_the_readers_of_a_lease_are_bounded(monkeypatch):
    monkeypatch.setattr(sender, "MAX_READERS", 3)
    monkeypatch.setattr(sender, "_MAX_READERS_IN_ALL", 5)
    with pair() as (world, prefill, decode):
        leases = {}
        for request_id in ("p1", "p2"):
            params = prefill.prefill(request_id, 7, 13)
            leases[request_id] = Lease.parse(params["lease"])
        world.quiet()
        for request_id, lease in leases.items():
            beat = messages.Heartbeat([Reader(request_id, lease, n) for n in range(100)])
            world.deliver("P", "X", beat)
            release = messages.Release(
                ConsumerRank("X", (0, 0), ParallelSizes()),
                [Reader(request_id, lease, n) for n in range(100)],
            )
            world.deliver("P", "X", release)
        assert world.count("P", "refused_readers") == 2 * (97 + 98)
        world.until(lambda: world.outcomes["P"].sent == {"p1", "p2"})
        params = prefill.prefill("p3", 7, 13)  # there is room again
        start(world, decode, params)
        arrives(world, decode)
        world.until(sent(world, "p3"))
    with pytest.raises(ConfigError, match="num_readers"):
        KVTransferParams.from_dict({"do_remote_decode": True, "num_readers": 2**16 + 1})


@both_modes
@pytest.mark.parametrize("is_known", [False, True])
def test_a_kept_request_that_is_given_up_is_freed_when_its_lease_has_ended(mode, is_known):
    with pair(mode) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        blocks = list(prefill.requests["p1"].blocks)
        if is_known:
            world.quiet()
        info = prefill.requests["p1"].info
        keeps, _ = prefill.scheduler.request_finished(info, (tuple(blocks),), 13, is_complete=False)
        assert keeps
        start(world, decode, params)
        world.until(sent(world))
        assert set(blocks) <= set(prefill.free)
        world.until(failed(world))
        assert world.end_of("D", "d1") == [EndState.EXPIRED]


def test_a_request_that_is_handed_over_twice_has_one_lease():
    with pair() as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        request = prefill.requests["p1"]
        again = prefill.scheduler.request_finished(request.info, (tuple(request.blocks),), 13)
        assert again == (True, params)
        start(world, decode, params)
        world.until(sent(world))
        assert prefill.scheduler.num_free_leases == prefill.config.max_leases


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("is_early", [False, True])
def test_an_id_that_was_given_up_can_be_pushed_in_its_next_life(num_readers, is_early):
    with pair("push", **BEATS_5, consumer={"num_blocks": 64}) as (world, prefill, decode):
        prefill.begin("p1", 3, 13)
        start_early(world, prefill, decode, request_id="old")
        prefill.hand_over("p1", is_complete=False)
        world.until(failed(world, "old"))
        world.quiet()
        names = [f"d{i}" for i in range(num_readers)]
        if not is_early:
            prefill.begin("p1", 7, 13)
            prefill.scheduler.on_new_request(prefill.requests["p1"].info)
        for name in names:
            start(world, decode, early_params(prefill, "p1"), request_id=name)
        world.pass_time(4)
        if is_early:
            prefill.begin("p1", 7, 13)
        else:
            world.pass_time(10, 10)
        prefill.compute("p1", 13)
        world.quiet()
        prefill.hand_over("p1")
        for name in names:
            arrives(world, decode, name)
        world.until(sent(world))
        assert releases(world) == [{"released": 1}]


def test_a_push_for_an_id_that_is_over_fails_with_its_reason_after_a_heartbeat():
    with pair("push", **BEATS_5) as (world, prefill, decode):
        prefill.begin("p1", 7, 13)
        prefill.hand_over("p1", is_complete=False)
        world.quiet()
        start_early(world, prefill, decode)
        world.pass_time(5)
        world.until(failed(world))
        assert "gave the request up" in str(errors(world)[0])


def test_a_reader_whose_early_push_fails_still_releases_the_request():
    with pair("push") as (world, prefill, decode):
        start_early(world, prefill, decode)
        prefill.begin("p1", 7, 13)
        prefill.layer_events = {0: FakeEvent(), 1: FakeEvent()}
        prefill.layer_events[0].error = RuntimeError("device lost")
        prefill.compute("p1", 13)
        world.until(failed(world))
        world.quiet()
        prefill.hand_over("p1")
        now = world.clock.now
        world.until(sent(world))
        assert world.clock.now == now


def test_an_early_release_for_the_next_life_of_an_id_costs_a_heartbeat_and_no_more():
    with pair("push", **BEATS_5) as (world, prefill, decode):
        connect(world, prefill, decode)
        prefill.begin("p1", 7, 13)
        prefill.hand_over("p1", is_complete=False)
        world.quiet()
        decode.arrive("d1", 7, 13, early_params(prefill, "p1"))
        decode.finish("d1")
        world.until(lambda: world.count("P", "early_notifications"))
        prefill.prefill("p1", 7, 13)
        world.quiet()
        assert world.leases("P") == [1]
        world.pass_time(5)
        assert sent(world)()


def test_a_sample_that_was_pushed_by_layer_keeps_its_blocks():
    with pair("push") as (world, prefill, decode):
        prefill.prefill("0_p", 7, 13, sibling_group="p")
        start_early(world, prefill, decode, "1_p")
        prefill.begin("1_p", 7, 13, sibling_group="p")
        prefill.compute("1_p", 13)
        world.round()
        assert prefill.hand_over("1_p")["remote_request_id"] == "1_p"
        arrives(world, decode)


def test_a_push_that_names_a_sample_without_a_lease_is_told_whose_it_shares():
    with pair("push") as (world, prefill, decode):
        prefill.prefill("0_p", 7, 13, sibling_group="p")
        start_early(world, prefill, decode, "1_p")
        prefill.prefill("1_p", 7, 13, sibling_group="p")
        world.until(failed(world))
        assert "handed over as '0_p'" in str(errors(world)[0])


def test_the_lease_tokens_of_two_lives_of_an_engine_differ():
    first, second = ({slots.take().token for _ in range(64)} for slots in map(LeaseSlots, [64] * 2))
    assert len(first) == len(second) == 64
    assert not first & second
