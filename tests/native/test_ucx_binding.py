"""The thin binding of UCX: bytes, bounds, ends, threads, and damaged input."""

import asyncio
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
    StateError,
    TransferTimeout,
    UcxError,
    WireError,
)
from pynixlkv.ucx import (
    Context,
    Endpoint,
    RemoteKey,
    Worker,
    am_send_nbx,
    flush_nbx,
    get_nbx,
    put_nbx,
)

WAIT_S = 20.0
SIZE = 1 << 20
# Transports that need the target's processor, and those that need only the kernel.
TRANSPORTS = {"tcp": {"TLS": "tcp", "RNDV_THRESH": "inf"}, "default": {"RNDV_THRESH": "inf"}}


def pattern(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def serve(peer, config):
    """The other side: an array and memory of UCX's; answers messages until told to stop."""
    context = Context(config)
    array = pattern(SIZE, 1)
    with context.map(array) as mapped, context.allocate(SIZE) as allocated:
        np.frombuffer(allocated.buffer, dtype=np.uint8)[:] = pattern(SIZE, 2)
        worker = Worker(context)
        worker.open_inbox(5)
        peer.send((worker.address, mapped.pack(), allocated.pack()))
        with Endpoint(worker, peer.receive()) as back:
            while True:
                for header, data in worker.messages(5, 0.5):
                    if header == b"stop":
                        return
                    answer = array.tobytes() if header == b"content" else data[::-1]
                    am_send_nbx(back, 6, header, answer).wait(WAIT_S)


@pytest.fixture(params=TRANSPORTS)
def config(request):
    return TRANSPORTS[request.param]


class Side:
    """Our side of a connection to `serve`."""

    def __init__(self, peer, config):
        self.peer = peer
        self.context = Context(config)
        self.worker = Worker(self.context)
        self.worker.open_inbox(6)
        address, mapped, allocated = peer.receive()
        peer.send(self.worker.address)
        self.endpoint = Endpoint(self.worker, address)
        self.mapped = RemoteKey(self.endpoint, mapped)
        self.allocated = RemoteKey(self.endpoint, allocated)
        self.array = np.zeros(SIZE, dtype=np.uint8)
        self.memory = self.context.map(self.array)

    def ask(self, header, data=b""):
        am_send_nbx(self.endpoint, 5, header, data).wait(WAIT_S)
        return self.worker.messages(6, WAIT_S)


@pytest.fixture
def side(start_peer, config):
    peer = start_peer(serve, config)
    side = Side(peer, config)
    yield side
    if peer.process.poll() is None:
        am_send_nbx(side.endpoint, 5, b"stop").wait(WAIT_S)
        peer.finish()
    side.endpoint.close()
    side.__dict__.clear()


# ---- bytes


def test_get_and_put_move_the_named_bytes_and_no_other(side):
    for seed, key in ((1, side.mapped), (2, side.allocated)):
        side.array[:] = 7
        get_nbx(side.memory, key, 1000, local_offset=5, remote_offset=300).wait(WAIT_S)
        expected = np.full(SIZE, 7, dtype=np.uint8)
        expected[5:1005] = pattern(SIZE, seed)[300:1300]
        assert np.array_equal(side.array, expected)
    put_nbx(side.memory, side.mapped, 500, local_offset=5, remote_offset=40).wait(WAIT_S)
    flush_nbx(side.endpoint).wait(WAIT_S)
    expected_there = pattern(SIZE, 1)
    expected_there[40:540] = side.array[5:505]
    ((header, content),) = side.ask(b"content")
    assert header == b"content"
    assert content == expected_there.tobytes()


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
    there = pattern(SIZE, 1).reshape(-1, block)
    assert np.array_equal(side.array.reshape(-1, block), there[order])


def test_only_memory_of_ucx_is_direct_and_only_where_ucx_may_share_memory(side, config):
    assert not side.mapped.is_direct
    assert side.allocated.is_direct == (config is TRANSPORTS["default"])
    assert (side.mapped.nbytes, side.allocated.nbytes) == (SIZE, SIZE)


def test_active_messages_are_exact_and_in_order(side):
    sent = [b"", b"x", bytes(range(256)), pattern(3 << 20, 4).tobytes(), b"after the long one"]
    for i, data in enumerate(sent):
        am_send_nbx(side.endpoint, 5, bytes([i]), data).wait(WAIT_S)
    seen = []
    while len(seen) < len(sent):
        arrived = side.worker.messages(6, WAIT_S)
        assert arrived
        seen += arrived
    assert seen == [(bytes([i]), data[::-1]) for i, data in enumerate(sent)]
    assert side.worker.messages(6) == []


# ---- waiting


def test_requests_can_be_awaited_in_one_event_loop_after_another(side):
    block = SIZE // 64

    async def pull():
        gets = [
            get_nbx(
                side.memory, side.mapped, block, local_offset=i * block, remote_offset=i * block
            )
            for i in range(64)
        ]
        await asyncio.wait_for(asyncio.gather(*gets), WAIT_S)

    for _ in range(2):
        side.array[:] = 0
        asyncio.run(pull())
        assert np.array_equal(side.array, pattern(SIZE, 1))


def test_threads_share_a_worker(side):
    failures = []

    def pull(number):
        try:
            part = SIZE // 4
            for _ in range(50):
                get_nbx(
                    side.memory, side.mapped, part,
                    local_offset=number * part, remote_offset=number * part,
                ).wait(WAIT_S)  # fmt: skip
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pull, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert np.array_equal(side.array, pattern(SIZE, 1))


def test_events_wake_a_sleeper(side):
    side.ask(b"", b"connected")
    events = [side.worker.event_fd]
    deadline = time.monotonic() + WAIT_S
    while not side.worker.arm() or select.select(events, [], [], 0.1)[0]:
        side.worker.progress()
        assert time.monotonic() < deadline
    side.worker.signal()
    assert select.select(events, [], [], WAIT_S)[0]


def test_waiting_costs_no_processor_time(side):
    side.ask(b"", b"connected")
    before = time.process_time()
    assert side.worker.messages(6, 1.0) == []
    assert time.process_time() - before < 0.2


# ---- ends


@pytest.fixture
def hung(start_peer):
    """A connection whose peer stands still, over a transport that needs it."""
    peer = start_peer(serve, TRANSPORTS["tcp"])
    side = Side(peer, TRANSPORTS["tcp"])
    get_nbx(side.memory, side.mapped, 64).wait(WAIT_S)
    peer.stop()
    yield side
    side.endpoint.close()
    side.__dict__.clear()


def test_a_wait_ends_in_time_and_the_request_goes_on(hung):
    request = get_nbx(hung.memory, hung.mapped)
    with pytest.raises(TransferTimeout, match="goes on"):
        request.wait(0.1)
    assert not request.poll()
    hung.peer.resume()
    request.wait(WAIT_S)
    assert np.array_equal(hung.array, pattern(SIZE, 1))


def test_a_dropped_request_keeps_what_it_writes_to_until_its_end(hung):
    get_nbx(hung.memory, hung.mapped)
    gc.collect()
    assert hung.endpoint.num_parked == 1
    hung.memory.close()
    hung.peer.resume()
    deadline = time.monotonic() + WAIT_S
    while hung.endpoint.num_parked and time.monotonic() < deadline:
        hung.worker.progress()
    assert hung.endpoint.num_parked == 0
    assert np.array_equal(hung.array, pattern(SIZE, 1))


def test_closing_an_endpoint_ends_what_is_under_way(hung):
    request = get_nbx(hung.memory, hung.mapped)
    hung.endpoint.close()
    hung.endpoint.close()
    with pytest.raises(UcxError, match="CANCELED"):
        request.poll()
    for use in (
        lambda: get_nbx(hung.memory, hung.mapped),
        lambda: flush_nbx(hung.endpoint),
        lambda: am_send_nbx(hung.endpoint, 1, b""),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_killed_peer_ends_what_is_under_way_with_an_error(hung):
    request = get_nbx(hung.memory, hung.mapped)
    hung.peer.kill()
    with pytest.raises(UcxError) as caught:
        request.wait(WAIT_S)
    assert caught.value.library == "ucx"
    assert caught.value.status < 0
    assert hung.endpoint.failure

    async def wait():
        await request

    with pytest.raises(UcxError):
        asyncio.run(wait())


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


@pytest.mark.parametrize("what", ["address", "key"])
def test_damaged_bytes_never_reach_ucx(what):
    worker = Worker(Context(TRANSPORTS["tcp"]))
    endpoint = Endpoint(worker, worker.address)
    good = worker.address if what == "address" else worker_key(worker)
    make = (
        (lambda data: Endpoint(worker, data))
        if what == "address"
        else (lambda data: RemoteKey(endpoint, data))
    )
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
            with pytest.raises(WireError):
                make(bytes(data))
    with pytest.raises(ConfigError, match="must be bytes"):
        make("text")


def worker_key(worker):
    context = Context(TRANSPORTS["tcp"])
    return context.map(np.zeros(64, dtype=np.uint8)).pack()


def test_settings_that_ucx_does_not_take_are_named():
    with pytest.raises((ConfigError, UcxError), match="TLS"):
        Worker(Context({"TLS": "no-such-transport"}))


def test_no_transport_to_the_peer_names_what_to_check(start_peer):
    only_self = {"TLS": "self"}
    worker = Worker(Context(only_self))
    peer = start_peer(tell_address, only_self)
    with pytest.raises(UcxError, match="UCX_TLS"):
        Endpoint(worker, peer.receive())
    peer.send("done")
    peer.finish()


def tell_address(peer, config):
    worker = Worker(Context(config))
    peer.send(worker.address)
    peer.receive()


def test_a_single_threaded_worker_stays_on_its_thread():
    worker = Worker(Context(TRANSPORTS["tcp"]), single_thread=True)
    worker.progress()
    errors = []

    def use():
        try:
            worker.progress()
        except StateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "another thread" in errors[0]


def test_closed_memory_and_bad_memory_are_refused():
    context = Context(TRANSPORTS["tcp"])
    memory = context.allocate(100)
    view = memory.buffer
    view[:] = bytes(range(100))
    memory.close()
    memory.close()
    assert bytes(view) == bytes(range(100))  # whoever views it keeps it
    for use in (memory.pack, lambda: memory.address, lambda: memory.buffer):
        with pytest.raises(ClosedError):
            use()
    for bad in (b"read-only", np.zeros(0), np.zeros((4, 4))[:, ::2], 7):
        with pytest.raises(ConfigError):
            context.map(bad)
    with pytest.raises(ConfigError):
        context.allocate(0)
    with pytest.raises(StateError, match="open_inbox"):
        Worker(context).messages(1)
    with pytest.raises(ConfigError, match="65535"):
        Worker(context).open_inbox(1 << 16)


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
