"""A process that was stopped or starved blames no peer for its own pause."""

import pytest
from toy_world import FakeEvent, World

from pynixlkv._clock import ObservedClock
from pynixlkv.connector.metadata import EndState
from pynixlkv.errors import PeerLostError

LONGEST_GAP_S = 2.0


def pair(mode="pull", **config):
    """An engine of each kind that notices pauses; heartbeats go every 10 s, and 3 may be missed."""
    world = World(mode, heartbeat_interval=10, missed_heartbeats=3, **config)
    return world, *(world.engine(name, longest_gap=LONGEST_GAP_S) for name in "PD")


def stop(world, seconds, but=""):
    """Let time pass in which only one of the engines runs."""
    for _ in range(int(seconds)):
        world.clock.now += 1.0
        if but:
            world.step(but)


def fetch(world, decode, params):
    decode.arrive("d1", 7, 13, params)
    decode.schedule("d1")
    world.quiet()


def test_a_clock_leaves_pauses_out():
    now = 100.0
    clock = ObservedClock(lambda: now, LONGEST_GAP_S)
    now += 2.0
    assert (clock(), clock.was_paused) == (102.0, False)
    now += 60.0
    assert (clock(), clock.was_paused) == (104.0, True)
    now += 1.5
    assert (clock(), clock.was_paused) == (105.5, False)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_consumer_that_was_stopped_for_longer_than_all_timeouts_still_receives(mode):
    world, prefill, decode = pair(mode, lease_duration=1000, transfer_timeout=30)
    with world:
        prefill.event = FakeEvent()
        fetch(world, decode, prefill.prefill("p1", 7, 13))
        stop(world, 100, but="P")
        world.quiet()
        prefill.event.is_done = True
        world.pass_time(1.0)
        world.until(lambda: world.outcomes["D"].received)
        assert decode.holds("d1")
        assert world.count("D", "peers_lost") == 0
        assert world.count("D", "pauses") == 1


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_lease_that_expires_while_its_consumer_is_stopped_is_expired(mode):
    world, prefill, decode = pair(mode, lease_duration=30)
    with world:
        params = prefill.prefill("p1", 7, 13)
        blocks = list(prefill.requests["p1"].blocks)
        decode.event = FakeEvent()  # before the first look at the lease
        fetch(world, decode, params)
        stop(world, 100, but="P")
        assert world.outcomes["P"].sent == {"p1"}
        prefill.ranks[0].write(99, blocks, range(13))
        decode.event.is_done = True
        world.until(lambda: world.outcomes["D"].failed)
        assert world.end_of("D", "d1") == [EndState.EXPIRED]


def test_a_request_that_still_waits_for_its_step_learns_of_its_expired_lease():
    world, prefill, decode = pair(lease_duration=30)
    with world:
        decode.event = FakeEvent()
        fetch(world, decode, prefill.prefill("p1", 7, 13))
        stop(world, 100, but="P")
        now = world.clock.now
        world.until(lambda: world.outcomes["D"].failed)
        assert world.end_of("D", "d1") == [EndState.EXPIRED]
        assert world.clock.now - now < 30
        assert not decode.event.is_done


def test_a_lease_that_expires_while_its_blocks_are_read_by_a_stopped_consumer_is_expired():
    world, prefill, decode = pair(lease_duration=30)
    with world:
        params = prefill.prefill("p1", 7, 13)
        reads = world.before_reads("D", world.network.pause)
        fetch(world, decode, params)
        assert reads
        stop(world, 100, but="P")
        assert world.outcomes["P"].sent == {"p1"}
        world.network.resume("P.0.0")
        world.until(lambda: world.outcomes["D"].failed)
        assert world.end_of("D", "d1") == [EndState.EXPIRED]


def test_a_producer_that_was_stopped_hears_its_readers_before_it_ends_their_leases():
    world, prefill, decode = pair(lease_duration=30)
    with world:
        params = prefill.prefill("p1", 7, 13)
        decode.arrive("d1", 7, 13, params)  # queued: only heartbeats keep the lease
        world.quiet()
        world.network.drop_notifications("P.0.0", 10**6)  # as if they were still on their way
        stop(world, 29, but="D")
        stop(world, 71)
        world.step("P")
        assert not world.outcomes["P"].sent
        world.network.drop_notifications("P.0.0", 0)
        world.quiet()
        decode.schedule("d1")
        world.until(lambda: world.outcomes["D"].received)
        assert decode.holds("d1")


def test_a_host_that_stalls_again_and_again_loses_nobody_but_the_dead():
    world, prefill, decode = pair(lease_duration=30, transfer_timeout=1000)
    with world:
        prefill.event = FakeEvent()
        fetch(world, decode, prefill.prefill("p1", 7, 13))
        for _ in range(20):
            stop(world, 60)
            world.step("D")  # before anything that came meanwhile is received
            world.quiet()
        assert world.count("D", "peers_lost") == 0
        world.network.drop_notifications("P.0.0", 10**6)
        for _ in range(50):
            stop(world, 60)
            world.quiet()
            world.pass_time(1.0)
        world.until(lambda: world.outcomes["D"].failed)
        (end,) = world.outcomes["D"].failed["d1"]
        assert isinstance(end.error, PeerLostError)
