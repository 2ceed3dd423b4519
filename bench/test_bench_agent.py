"""What an agent costs: its start, its calls, its idling, and how late it sees a notification."""

import resource
import time
from contextlib import contextmanager

import numpy as np
import pytest

from bench.peers.pools import NUM_BLOCKS, make_pool
from pynixlkv import KVCache, TransferPlan
from pynixlkv.nixl import NixlAgent

IDLE_S = 3.0


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def connected_pair(tensors=None):
    """Two connected agents of this process, with a cache each if there are tensors."""
    with NixlAgent("reader") as reader, NixlAgent("source") as source:
        caches = []
        for agent, pool in zip((reader, source), tensors or (), strict=False):
            cache = KVCache.from_tensors(
                {f"layer.{i}": tensor for i, tensor in enumerate(pool)}, axes="KBHND", kv_heads=8
            )
            agent.register(cache)
            caches.append(cache)
        peer = reader.connect(source.hello(*caches[1:]))
        source.connect(reader.hello())
        yield reader, source, peer, caches


def test_start_and_close_an_agent(benchmark):
    NixlAgent("first").close()  # loads the library and the plugin

    def start():
        NixlAgent("next").close()

    benchmark.pedantic(start, rounds=10)


def test_read_returns(benchmark):
    """The time that the caller of `read` spends, for 40 scattered blocks of all layers."""
    with connected_pair((make_pool(), make_pool(1))) as (reader, _, peer, caches):
        plan = TransferPlan(caches[0].geometry, peer.geometry)
        rng = np.random.default_rng(0)
        tables = [rng.permutation(NUM_BLOCKS)[:40] for _ in range(2)]
        transfers = []

        def read():
            transfers.append(reader.read(peer, plan, *tables))

        def wait():
            for transfer in transfers:
                transfer.wait()
            transfers.clear()

        benchmark.pedantic(read, setup=wait, rounds=40, warmup_rounds=5)
        wait()
        result = reader.read(peer, plan, *tables).wait()
        per_row = 1e9 / result.descriptors
        benchmark.extra_info |= {
            "descriptors": result.descriptors,
            "prepared": result.prepared,
            "plan_ns_per_descriptor": result.plan_s * per_row,
            "make_ns_per_descriptor": result.make_s * per_row,
            "post_ns_per_descriptor": result.post_s * per_row,
        }


def test_a_notification_is_seen(benchmark):
    """From `notify` of one idle agent to the return of a waiting `notifications` of another."""
    with connected_pair() as (reader, source, peer, _):

        def setup():
            time.sleep(0.005)  # both agents go to sleep

        def tell():
            reader.notify(peer, b"n")
            assert [n.message for n in source.notifications(timeout=1.0)] == [b"n"]

        benchmark.pedantic(tell, setup=setup, rounds=200)


@pytest.mark.benchmark(group="idle")
def test_idle_agents(benchmark):
    """No timing: `cpu_share` in `extra_info` is what two connected, idle agents take of a core."""
    with connected_pair():
        time.sleep(0.2)
        used = cpu_seconds()
        benchmark.pedantic(lambda: time.sleep(IDLE_S), rounds=1)
        share = (cpu_seconds() - used) / IDLE_S
    benchmark.extra_info["agents"] = 2
    benchmark.extra_info["cpu_share"] = share
    print(f"cpu share of one idle agent: {share / 2:.4f}")
