"""The thin binding of UCX: bytes, bounds, failures, threads, and damaged input."""

import gc
import os
import random
import select
import threading
import time

import numpy as np
import pytest

from pynixlkv.errors import (
    ClosedError,
    ConfigError,
    ForkError,
    ProtocolVersionError,
    TransferTimeout,
    UcxError,
    WireError,
)
from pynixlkv.testing import live_counts
from pynixlkv.testing.contents import random_bytes
from pynixlkv.ucx import Context, Endpoint, RemoteKey, Worker, binding, flush_nbx, get_nbx, put_nbx

WAIT_S = 60.0
SIZE = 1 << 20
# Transports that need the target's processor, and those that need only the kernel.
TRANSPORTS = {"tcp": {"TLS": "tcp", "RNDV_THRESH": "inf"}, "default": {"RNDV_THRESH": "inf"}}


def serve(peer, config):
    """The other side: an array and memory of UCX's; progresses until told to stop."""
    context = Context(config)
    array = random_bytes(SIZE, 1)
    with context.map(array) as mapped, context.allocate(SIZE) as allocated:
        np.frombuffer(allocated.buffer, dtype=np.uint8)[:] = random_bytes(SIZE, 2)
        worker = Worker(context)
        peer.send((worker.address, mapped.pack(), allocated.pack()))
        while not peer.connection.poll():
            worker.spin(0.001)
        assert peer.receive() == "stop"
        return array.tobytes()


@pytest.fixture(params=TRANSPORTS)
def config(request):
    return TRANSPORTS[request.param]


class Side:
    """Our side of a connection to `serve`."""

    def __init__(self, peer, config):
        self.peer = peer
        self.context = Context(config)
        self.worker = Worker(self.context)
        address, mapped, allocated = peer.receive()
        self.endpoint = Endpoint(self.worker, address)
        self.mapped = RemoteKey(self.endpoint, mapped)
        self.allocated = RemoteKey(self.endpoint, allocated)
        self.array = np.zeros(SIZE, dtype=np.uint8)
        self.memory = self.context.map(self.array)

    def get(self, nbytes=None, offset=0):
        return get_nbx(self.memory, self.mapped, nbytes, local_offset=offset, remote_offset=offset)

    def progress_until(self, condition):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            self.worker.progress()
            assert time.monotonic() < deadline


@pytest.fixture
def side(start_peer, config):
    side = Side(start_peer(serve, config), config)
    yield side
    if side.peer.is_running:
        side.peer.send("stop")
        side.peer.finish()
    side.endpoint.close()
    side.__dict__.clear()


# ---- bytes


def test_get_and_put_move_the_named_bytes_and_no_other(side):
    for seed, key in ((1, side.mapped), (2, side.allocated)):
        side.array[:] = 7
        get_nbx(side.memory, key, 1000, local_offset=5, remote_offset=300).wait(WAIT_S)
        expected = np.full(SIZE, 7, dtype=np.uint8)
        expected[5:1005] = random_bytes(SIZE, seed)[300:1300]
        assert np.array_equal(side.array, expected)
    put_nbx(side.memory, side.mapped, 500, local_offset=5, remote_offset=40).wait(WAIT_S)
    flush_nbx(side.endpoint).wait(WAIT_S)
    expected_there = random_bytes(SIZE, 1)
    expected_there[40:540] = side.array[5:505]
    side.peer.send("stop")
    assert side.peer.finish() == expected_there.tobytes()


def test_without_error_handling_a_worker_reaches_itself():
    context = Context({"TLS": "self", "LOG_LEVEL": "fatal"})
    worker = Worker(context)
    there, here = random_bytes(4096, 1), np.zeros(4096, dtype=np.uint8)
    with context.map(there) as remote, context.map(here) as local:
        with pytest.raises(UcxError, match="error handling"):
            Endpoint(worker, worker.address)
        with Endpoint(worker, worker.address, error_handling=False) as endpoint:
            key = RemoteKey(endpoint, remote.pack())
            get_nbx(local, key).wait(WAIT_S)
            assert np.array_equal(here, there)
            here[:] = random_bytes(4096, 2)
            put_nbx(local, key).wait(WAIT_S)
            flush_nbx(endpoint).wait(WAIT_S)
            assert np.array_equal(there, here)


def test_many_at_once_all_arrive(side):
    block = 4096
    order = np.random.default_rng(3).permutation(SIZE // block)
    requests = [
        get_nbx(
            side.memory, side.mapped, block, local_offset=i * block, remote_offset=int(j) * block
        )
        for i, j in enumerate(order)
    ]
    for request in requests:
        request.wait(WAIT_S, spin=True)
        assert request.poll()
    there = random_bytes(SIZE, 1).reshape(-1, block)
    assert np.array_equal(side.array.reshape(-1, block), there[order])


def test_only_memory_of_ucx_is_direct_and_only_where_ucx_may_share_memory(side, config):
    assert not side.mapped.is_direct
    assert side.allocated.is_direct == (config is TRANSPORTS["default"])
    assert (side.mapped.nbytes, side.allocated.nbytes) == (SIZE, SIZE)


# ---- waiting


def test_threads_share_a_worker(side):
    failures = []

    def pull(number):
        try:
            part = SIZE // 4
            for _ in range(50):
                side.get(part, number * part).wait(WAIT_S)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pull, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert np.array_equal(side.array, random_bytes(SIZE, 1))


@pytest.fixture
def hung(start_peer):
    """A connection whose peer is stopped, over a transport that needs it."""
    side = Side(start_peer(serve, TRANSPORTS["tcp"]), TRANSPORTS["tcp"])
    side.get(64).wait(WAIT_S)
    side.peer.stop()
    yield side
    side.endpoint.close()
    side.__dict__.clear()


def test_an_armed_worker_wakes_with_the_next_event(hung):
    request = hung.get()
    events = [hung.worker.event_fd]
    deadline = time.monotonic() + WAIT_S
    while not hung.worker.arm() or select.select(events, [], [], 0.1)[0]:
        hung.worker.progress()
        assert time.monotonic() < deadline
    hung.peer.resume()
    assert select.select(events, [], [], WAIT_S)[0]
    request.wait(WAIT_S)


def test_waiting_costs_no_processor_time(hung):
    request = hung.get()
    before = time.process_time()
    with pytest.raises(TransferTimeout):
        request.wait(1.0)
    assert time.process_time() - before < 0.2


def test_a_wait_ends_in_time_and_the_request_goes_on(hung):
    request = hung.get()
    with pytest.raises(TransferTimeout, match="goes on"):
        request.wait(0.1)
    assert not request.poll()
    hung.peer.resume()
    request.wait(WAIT_S)
    assert np.array_equal(hung.array, random_bytes(SIZE, 1))


# ---- failures


def test_a_dropped_request_keeps_its_memory_until_it_has_ended(hung):
    hung.get()
    hung.memory.close()
    gc.collect()
    assert live_counts()["ucx.Request"] == 1
    hung.peer.resume()
    hung.progress_until(lambda: np.array_equal(hung.array, random_bytes(SIZE, 1)))
    hung.endpoint.close()
    assert live_counts().get("ucx.Request", 0) == 0


def test_closing_an_endpoint_ends_requests_in_flight(hung):
    request = hung.get()
    hung.endpoint.close()
    hung.endpoint.close()
    with pytest.raises(UcxError, match="CANCELED"):
        request.poll()
    for use in (hung.get, lambda: flush_nbx(hung.endpoint)):
        with pytest.raises(ClosedError):
            use()


def test_a_killed_peer_ends_requests_in_flight_with_an_error(hung):
    request = hung.get()
    hung.peer.kill()
    with pytest.raises(UcxError) as caught:
        request.wait(WAIT_S)
    assert caught.value.library == "ucx"
    assert caught.value.status < 0
    assert hung.endpoint.failure


# ---- refused


def test_ranges_outside_are_refused(side):
    for options in (
        {"nbytes": SIZE + 1}, {"nbytes": 0}, {"nbytes": -1}, {"remote_offset": SIZE},
        {"nbytes": 2, "remote_offset": SIZE - 1}, {"nbytes": 2, "local_offset": SIZE - 1},
        {"local_offset": -1}, {"remote_offset": -1, "nbytes": 1},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="do not lie inside"):
            get_nbx(side.memory, side.mapped, **options)
    assert not side.array.any()


def test_unpacked_keys_leave_nothing_behind():
    context = Context(TRANSPORTS["tcp"])
    with context.map(np.zeros(4096, np.uint8)) as mapped:
        worker = Worker(context)
        endpoint = Endpoint(worker, worker.address)
        RemoteKey(endpoint, mapped.pack())
        before = live_counts()
        for _ in range(10_000):
            RemoteKey(endpoint, mapped.pack())
        gc.collect()
        assert live_counts() == before


@pytest.mark.parametrize("what", ["address", "key"])
def test_damaged_bytes_never_reach_ucx(what):
    worker = Worker(Context(TRANSPORTS["tcp"]))
    endpoint = Endpoint(worker, worker.address)
    good, other = worker.address, worker_key(worker)
    make = lambda data: Endpoint(worker, data)  # noqa: E731
    if what == "key":
        good, other = other, good
        make = lambda data: RemoteKey(endpoint, data)  # noqa: E731
    make(good)
    rng = random.Random(1)
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            kind = rng.randrange(3)
            place = rng.randrange(len(data)) if data else 0
            if kind == 0 and data:
                data[place] ^= rng.randint(1, 255)
            elif kind == 1:
                del data[place:]
            else:
                data[place:place] = rng.randbytes(rng.randint(1, 4))
        if bytes(data) != good:
            with pytest.raises((WireError, ProtocolVersionError)):
                make(bytes(data))
    with pytest.raises(WireError):
        make(other)
    with pytest.raises(ConfigError, match="must be bytes"):
        make("text")


@pytest.mark.parametrize("there", ["1.99.0", "2.22.0", None])
def test_bytes_of_another_ucx_or_byte_order_are_refused(monkeypatch, there):
    worker = Worker(Context(TRANSPORTS["tcp"]))
    endpoint = Endpoint(worker, worker.address)
    version, byte_order = binding._here()
    other_order = {"little": "big", "big": "little"}[byte_order]
    with monkeypatch.context() as patched:
        here = (there, byte_order) if there else (version, other_order)
        patched.setattr(binding, "_here", lambda: here)
        address, key = worker.address, worker_key(worker)
    match = f"UCX {there or version} on a {byte_order if there else other_order}-endian machine, "
    for make in (lambda: Endpoint(worker, address), lambda: RemoteKey(endpoint, key)):
        with pytest.raises(ProtocolVersionError, match=match):
            make()


def worker_key(worker):
    context = Context(TRANSPORTS["tcp"])
    return context.map(np.zeros(64, dtype=np.uint8)).pack()


def test_settings_that_ucx_does_not_take_are_named():
    with pytest.raises((ConfigError, UcxError), match="TLS"):
        Worker(Context({"TLS": "no-such-transport"}))


def test_no_transport_to_the_peer_names_what_to_check(start_peer):
    only_self = {"TLS": "self"}
    peer = start_peer(serve, only_self)
    with pytest.raises(UcxError, match="UCX_TLS"):
        Endpoint(Worker(Context(only_self)), peer.receive()[0])
    peer.send("stop")
    peer.finish()


def test_closed_memory_and_bad_memory_are_refused():
    context = Context(TRANSPORTS["tcp"])
    memory = context.allocate(100)
    view = memory.buffer
    view[:] = bytes(range(100))
    memory.close()
    memory.close()
    assert bytes(view) == bytes(range(100))  # the view keeps it
    for use in (memory.pack, lambda: memory.address, lambda: memory.buffer):
        with pytest.raises(ClosedError):
            use()
    for bad in (b"read-only", np.zeros(0), np.zeros((4, 4))[:, ::2], 7):
        with pytest.raises(ConfigError):
            context.map(bad)
    with pytest.raises(ConfigError):
        context.allocate(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_in_a_forked_child_raises():
    context = Context(TRANSPORTS["tcp"])
    worker = Worker(context)
    pid = os.fork()
    if pid == 0:
        status = 0
        for use in (worker.progress, lambda: worker.address, lambda: context.allocate(8)):
            try:
                use()
                status = 1
            except ForkError:
                pass
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    worker.progress()
