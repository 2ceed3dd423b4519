"""Pauses of this process, and deadlines of what others do."""

from pynixlkv._clock import ObservedClock


def test_a_pause_is_left_out():
    now = 100.0
    clock = ObservedClock(lambda: now, longest_gap=2.0)
    now += 2.0
    assert (clock(), clock.was_paused) == (102.0, False)
    now += 60.0
    assert (clock(), clock.was_paused) == (102.0, True)
    now += 1.5
    assert (clock(), clock.was_paused) == (103.5, False)
