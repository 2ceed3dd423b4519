"""The simulator of fleets against real engines in processes: what a hand-off costs in both."""

from __future__ import annotations

import contextlib

import pytest
from toy_process import RemoteEngine

from pynixlkv.testing.fleet import Fleet, FleetOptions, TracedRequest

REQUESTS, BLOCKS, TP = 3, 8, 2
MODEL = {"layers": 1, "kv_heads": TP, "dim": 4}  # of as many bytes as the simulator's
OPTIONS = {"tp": TP, "axes": "BKHND", "num_blocks": 4 * BLOCKS}
LEASE_S = 3600.0
"""So long that nothing depends on time: a heartbeat is due, and an answer late, after a sixth."""
CONFIG = {"self_test": False, "lease_duration": LEASE_S}


def measured(num_producers):
    """Messages, bytes and connections of engines in processes."""
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(RemoteEngine()) for _ in range(num_producers + 1)]
        for number, engine in enumerate(engines):
            engine.make("ucx-tcp", f"e{number}", MODEL, CONFIG, **OPTIONS)
        consumer, *producers = engines
        for turn in range(REQUESTS):
            for number, producer in enumerate(producers):
                name = f"{number}.{turn}"
                tokens = 4 * BLOCKS
                params = producer.prefill(name, hash((number, turn)) % 1000, tokens)
                consumer.fetch(name, hash((number, turn)) % 1000, tokens, params)
                assert consumer.until(lambda ends, name=name: name in ends)[name] == "received"
                consumer.finish(name)
                producer.until(lambda ends, name=name: name in ends)
        costs = [engine.costs() for engine in engines]
        for engine in engines:
            engine.close()
        return tuple(map(sum, zip(*costs, strict=True)))


def simulated(num_producers):
    """The same of a simulated fleet."""
    count = REQUESTS * num_producers
    trace = [
        TracedRequest(0.5 * i, 512 * BLOCKS, 1, tuple(range(BLOCKS * i + 1, BLOCKS * (i + 1) + 1)))
        for i in range(count)
    ]
    options = FleetOptions(
        prefill=num_producers,
        decode=1,
        tp=TP,
        duration=0.5 * count,
        aborts=0.0,
        lease_duration=LEASE_S,
        peer_ttl=4 * LEASE_S,
    )
    fleet = Fleet(options, trace)
    try:
        fleet.run()
        network = fleet.network
        return network.num_notifications, network.num_moved, network.num_peers
    finally:
        fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_producers", [1, 4, 16])
def test_the_simulator_counts_what_real_engines_cost(num_producers):
    messages, *costs = measured(num_producers)
    expected, *expected_costs = simulated(num_producers)
    assert costs == expected_costs
    # While a first contact is under way, its request is announced to each rank that is connected:
    # once at most, as the next heartbeat is not due, and not if the rest was faster.
    assert expected <= messages <= expected + TP * num_producers
