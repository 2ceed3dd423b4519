"""What the connector kit costs an engine: its steps, a hand-off, and each peer."""

import itertools
import resource
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from toy_engine import Model, ToyEngine

from pynixlkv import KVCache
from pynixlkv.connector import (
    ConnectorConfig,
    ConnectorMetadata,
    ConnectorScheduler,
    ConnectorWorker,
    GroupSpec,
    KVTransferParams,
    ReqMeta,
    RequestInfo,
)
from pynixlkv.connector.leases import LeaseTable
from pynixlkv.connector.remote_engines import RemoteEngineState
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing import FakeAgent, FakeNetwork

IN_FLIGHT = [0, 100, 1000]
BLOCK, TABLE = 16, 128  # tokens of a block, blocks of a request
STEP_S = 0.0002
FOREVER = ConnectorConfig(lease_duration=3000.0, transfer_timeout=3000.0)


def params(number, engine="producer", address=("127.0.0.1", 1)):
    """A hand-off of a prompt of 2,048 tokens."""
    return KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id=engine,
        remote_request_id=f"p{number}",
        remote_host=address[0],
        remote_port=address[1],
        remote_block_ids=(tuple(range(TABLE)),),
        remote_num_tokens=TABLE * BLOCK,
        lease=f"{number % 16384}-{number + 2:x}",
        lease_duration=3000.0,
    )


def is_connecting(worker):
    return any(each.state is RemoteEngineState.CONNECTING for each in worker._engines.all())


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_scheduler_step(benchmark, in_flight):
    """All calls of the scheduler for one request that comes, is fetched and goes, in one step."""
    scheduler = ConnectorScheduler(
        "consumer", [GroupSpec(BLOCK)], address=("127.0.0.1", 1), config=FOREVER
    )
    numbers = itertools.count()
    table = (tuple(range(TABLE)),)

    def begin():
        request = RequestInfo(f"r{next(numbers)}", TABLE * BLOCK, params(0))
        scheduler.on_new_request(request)
        count, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, table, 0, count)
        scheduler.build_connector_meta()
        return request

    for _ in range(in_flight):
        begin()

    def step():
        request = begin()
        scheduler.update_finished(received={request.request_id})
        scheduler.request_finished(request, table, TABLE * BLOCK)

    benchmark.extra_info.update(in_flight=in_flight, blocks_of_a_request=TABLE)
    benchmark(step)
    assert len(scheduler._receiving) == in_flight


def make_cache(layers, num_blocks):
    """A cache whose pages are not touched, so that it takes no memory."""
    shape = (num_blocks, 8, BLOCK, 64)
    tensors = {f"layer.{i}": np.zeros(shape, np.float16) for i in range(layers)}
    return KVCache.from_tensors(tensors, axes="BHND", kv_heads=8, table="0")


@contextmanager
def worker_with_requests(count):
    """A worker with so many requests whose bytes do not come."""
    network = FakeNetwork()
    source = FakeAgent("producer", network)
    pool, words = make_cache(4, TABLE), LeaseTable(16384)
    source.register(pool)
    source.register(words.cache)
    hello = source.hello(pool, words.cache)
    agent = FakeAgent("consumer", network)
    worker = ConnectorWorker(
        agent,
        engine_id="consumer",
        config=FOREVER,
        fetch=lambda *_, ranks, **__: dict.fromkeys(ranks, hello),
        background=False,
    )
    worker.register_kv_caches(make_cache(4, TABLE))
    table = (tuple(range(TABLE)),)
    remotes = [params(i) for i in range(count)]
    for remote in remotes:
        words.grant(remote.lease_token)
    worker.start_load_kv(
        ConnectorMetadata(
            reqs_to_recv={
                f"r{i}": ReqMeta(table, (0,), TABLE * BLOCK, remote=remote)
                for i, remote in enumerate(remotes)
            }
        )
    )
    # Lease words move between two polls; blocks, which a poll asks for once it has them, never do.
    deadline = time.monotonic() + 60
    while agent._native.running < count and time.monotonic() < deadline:
        network.resume("producer")
        while agent._native.running and time.monotonic() < deadline:
            time.sleep(STEP_S)
        network.pause("producer")
        worker.poll()
    assert agent._native.running == count
    try:
        yield worker
    finally:
        network.kill("producer")
        worker.shutdown()
        agent.close()
        source.close()


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_worker_step(benchmark, in_flight):
    """What the engine's thread spends in a step in which nothing happens."""
    with worker_with_requests(in_flight) as worker:

        def step():
            worker.start_load_kv(ConnectorMetadata())
            return worker.get_finished()

        benchmark.extra_info["in_flight"] = in_flight
        assert not benchmark(step)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_worker_round(benchmark, in_flight):
    """What the connector's own thread spends in one look at everything."""
    with worker_with_requests(in_flight) as worker:
        benchmark.extra_info["in_flight"] = in_flight
        benchmark(worker.poll)


@pytest.mark.parametrize("library", ["nixl", "fake"])
def test_hand_off_of_one_block(benchmark, library):
    """From the step that begins to fetch a block to the step that has it; the peers are known."""
    network = FakeNetwork()
    make = NixlAgent if library == "nixl" else (lambda name: FakeAgent(name, network))
    hellos = {}
    engines = [
        ToyEngine(
            name, Model(), make, lambda *_, engine_id, **__: hellos[engine_id], background=True
        )
        for name in ("producer", "consumer")
    ]
    producer, consumer = engines
    for engine in engines:
        hellos[engine.id] = engine.hellos
        engine.scheduler.address = ("127.0.0.1", 1)
    numbers = itertools.count()

    def prepare():
        name = f"r{next(numbers)}"
        consumer.arrive(name, 7, 4, producer.prefill(name, 7, 4))
        producer.step()
        consumer.step()
        return (name,), {}

    def fetch(name):
        consumer.schedule(name)
        while not (outcome := consumer.step()).received:
            assert not outcome.failed
            time.sleep(STEP_S)  # an engine's step runs on the device meanwhile
        assert consumer.holds(name)
        while not producer.step().sent:
            time.sleep(STEP_S)
        consumer.finish(name)

    benchmark.extra_info["library"] = library
    try:
        fetch(*prepare()[0])  # handshake and plans
        benchmark.pedantic(fetch, setup=prepare, rounds=50)
    finally:
        for engine in engines:
            engine.close()


def resident():
    return psutil.Process().memory_info().rss


def test_memory_of_a_peer(benchmark):
    """A peer with 80 layers and 10,000 blocks, beside a list of all its descriptors."""
    layers, blocks, peers = 80, 10_000, 20
    network = FakeNetwork()
    cache = make_cache(layers, blocks)
    sources, hellos = [], {}
    for i in range(peers):
        source, words = FakeAgent(f"producer-{i}", network), LeaseTable(16)
        source.register(cache)
        source.register(words.cache)
        hellos[f"producer-{i}"] = source.hello(cache, words.cache)
        sources.append((source, words))
    agent = FakeAgent("consumer", network)
    worker = ConnectorWorker(
        agent,
        engine_id="consumer",
        config=FOREVER,
        fetch=lambda *_, engine_id, ranks, **__: dict.fromkeys(ranks, hellos[engine_id]),
        background=False,
    )
    worker.register_kv_caches(cache)

    def connect(number):
        name = f"producer-{number}"
        worker.start_load_kv(
            ConnectorMetadata(reqs_waiting={name: params(0, name, ("127.0.0.1", number + 1))})
        )
        deadline = time.monotonic() + 60
        while worker.stats.snapshot().peers <= number or is_connecting(worker):
            worker.poll()
            assert time.monotonic() < deadline

    connect(0)
    before = resident()
    for number in range(1, peers):
        connect(number)
    of_peer = (resident() - before) / (peers - 1)
    rows = np.zeros((layers * blocks, 3), np.uint64)
    rows[:] = 1
    benchmark.extra_info.update(
        bytes_of_a_peer=int(of_peer),
        descriptors=len(rows),
        bytes_of_its_descriptors_as_rows=rows.nbytes,
    )
    benchmark(worker.poll)
    network.kill("consumer")
    worker.shutdown()
    agent.close()
    for source, _ in sources:
        source.close()


def test_a_thousand_peers(benchmark):
    """One round of a consumer with 1,000 producers, each with a request that is queued."""
    peers = 1000
    network = FakeNetwork()
    cache, words = make_cache(1, 1), LeaseTable(16)
    # Their agents are one: what is simulated is the consumer's view of many engines.
    source = FakeAgent("producer", network)
    source.register(cache)
    source.register(words.cache)
    hello = source.hello(cache, words.cache)
    agent = FakeAgent("consumer", network)
    worker = ConnectorWorker(
        agent,
        engine_id="consumer",
        config=FOREVER,
        fetch=lambda *_, ranks, **__: dict.fromkeys(ranks, hello),
        background=False,
    )
    worker.register_kv_caches(make_cache(1, 1))
    waiting = {f"r{i}": params(i, f"engine-{i}", (f"host-{i}", 1)) for i in range(peers)}
    cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    worker.start_load_kv(ConnectorMetadata(reqs_waiting=waiting))
    deadline = time.monotonic() + 60
    while is_connecting(worker) or worker.stats.snapshot().peers < peers:
        worker.poll()
        assert time.monotonic() < deadline
    cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu
    benchmark.extra_info.update(peers=peers, connect_cpu_ms_each=cpu / peers * 1e3)
    benchmark(worker.poll)
    worker.shutdown()
    agent.close()
    source.close()
