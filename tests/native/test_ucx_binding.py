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
    ProtocolVersionError,
    StateError,
    TransferCancelled,
    TransferTimeout,
    UcxError,
    WireError,
)
from pynixlkv.testing import live_counts
from pynixlkv.ucx import (
    Context,
    Endpoint,
    Listener,
    RemoteKey,
    Worker,
    am_send_nbx,
    binding,
    flush_nbx,
    get_nbx,
    put_nbx,
)

WAIT_S = 60.0
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


def test_without_error_handling_a_worker_reaches_itself():
    context = Context({"TLS": "self", "LOG_LEVEL": "fatal"})
    worker = Worker(context)
    there, here = pattern(4096, 1), np.zeros(4096, dtype=np.uint8)
    with context.map(there) as remote, context.map(here) as local:
        with pytest.raises(UcxError, match="error handling"):
            Endpoint(worker, worker.address)
        with Endpoint(worker, worker.address, error_handling=False) as endpoint:
            key = RemoteKey(endpoint, remote.pack())
            get_nbx(local, key).wait(WAIT_S)
            assert np.array_equal(here, there)
            here[:] = pattern(4096, 2)
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


def test_closing_with_a_deadline_says_whether_all_was_complete(side, hung):
    put_nbx(side.memory, side.allocated)
    am_send_nbx(side.endpoint, 5, b"content")
    assert side.endpoint.close(WAIT_S)
    assert not side.endpoint.close(WAIT_S)
    side.peer.kill()
    put_nbx(hung.memory, hung.mapped)
    assert not hung.endpoint.close(0.1)


def test_a_request_can_be_given_up(hung):
    request = get_nbx(hung.memory, hung.mapped)
    assert not request.is_quiet

    async def give_up():
        waiting = asyncio.ensure_future(asyncio.wait_for(request, WAIT_S))
        await asyncio.sleep(0)
        assert not request.cancel()
        await waiting

    with pytest.raises(TransferCancelled, match="memory stays in use"):
        asyncio.run(give_up())
    for use in (request.poll, request.wait):
        with pytest.raises(TransferCancelled):
            use()
    hung.peer.resume()
    deadline = time.monotonic() + WAIT_S
    while not request.is_quiet:
        hung.worker.progress()
        assert time.monotonic() < deadline
    assert np.array_equal(hung.array, pattern(SIZE, 1))  # UCX went on with it
    done = get_nbx(hung.memory, hung.mapped)
    done.wait(WAIT_S)
    assert done.cancel()
    assert done.poll()


# ---- connections by socket address


def serve_by_listener(peer, config):
    """The other side: accepts one peer and gives it a key by message."""
    context = Context(config)
    array = pattern(SIZE, 1)
    worker = Worker(context)
    worker.open_inbox(5)
    with context.map(array) as mapped, Listener(worker) as listener:
        peer.send(listener.port)
        with listener.accept(WAIT_S) as back:
            am_send_nbx(back, 6, b"key", mapped.pack()).wait(WAIT_S)
            assert worker.messages(5, WAIT_S) == [(b"written", b"")]
            assert np.array_equal(array, pattern(SIZE, 2))
            assert back.close(WAIT_S)


@pytest.fixture
def tcp_worker():
    worker = Worker(Context(TRANSPORTS["tcp"]))
    worker.open_inbox(6)
    return worker


def test_bytes_move_over_a_connection_by_socket_address(start_peer):
    context = Context(TRANSPORTS["tcp"])
    tcp_worker = Worker(context)
    tcp_worker.open_inbox(6)
    peer = start_peer(serve_by_listener, TRANSPORTS["tcp"])
    failures = []
    endpoint = Endpoint.connect(tcp_worker, "127.0.0.1", peer.receive(), failures.append)
    ((header, packed),) = tcp_worker.messages(6, WAIT_S)
    assert header == b"key"
    key = RemoteKey(endpoint, packed)
    array = np.zeros(SIZE, dtype=np.uint8)
    with context.map(array) as memory:
        get_nbx(memory, key).wait(WAIT_S)
        assert np.array_equal(array, pattern(SIZE, 1))
        array[:] = pattern(SIZE, 2)
        put_nbx(memory, key).wait(WAIT_S)
        flush_nbx(endpoint).wait(WAIT_S)
    am_send_nbx(endpoint, 5, b"written").wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while not failures:  # until the peer closes its end
        tcp_worker.progress()
        assert time.monotonic() < deadline
    peer.finish()
    assert failures == [endpoint.failure]
    tcp_worker.progress()
    assert len(failures) == 1
    endpoint.close()


def test_a_listener_rejects_who_was_not_accepted(tcp_worker):
    server = Worker(Context(TRANSPORTS["tcp"]))
    listener = Listener(server)
    assert listener.accept(0.0) is None
    endpoint = Endpoint.connect(tcp_worker, "127.0.0.1", listener.port)
    request = flush_nbx(endpoint)
    deadline = time.monotonic() + WAIT_S
    while server.progress() == 0:
        tcp_worker.progress()
        assert time.monotonic() < deadline
    listener.close()
    listener.close()
    while not endpoint.failure:
        server.progress()
        tcp_worker.progress()
        assert time.monotonic() < deadline
    with pytest.raises(UcxError):
        request.wait(WAIT_S)
    with pytest.raises(ClosedError):
        listener.accept(0.0)


def test_nobody_listens_there(tcp_worker):
    with Listener(tcp_worker) as listener:
        port = listener.port
    with pytest.raises(UcxError):
        flush_nbx(Endpoint.connect(tcp_worker, "127.0.0.1", port)).wait(WAIT_S)


def test_socket_addresses_are_checked(tcp_worker):
    for ip, port in (("localhost", 1), ("1.2.3", 1), ("", 1), ("127.0.0.1", 0), ("::1", 65536)):
        with pytest.raises(ConfigError, match=r"IP address|a port"):
            Endpoint.connect(tcp_worker, ip, port)
    with pytest.raises(UcxError, match="address one of this host"):
        Listener(tcp_worker, "203.0.113.1")  # an address of documentation, nobody's


# ---- advice


def test_advice_is_taken_and_checked():
    context = Context(TRANSPORTS["tcp"])
    for memory in (context.map(np.zeros(8192, dtype=np.uint8)), context.allocate(8192)):
        memory.advise("will_need")
        memory.advise("normal", 4096, offset=4096)
        for options in ({"nbytes": 8193}, {"offset": -1}, {"offset": 8192}, {"nbytes": 0}):
            with pytest.raises(ConfigError, match="do not lie inside"):
                memory.advise("normal", **options)
        with pytest.raises(ConfigError, match="will_need"):
            memory.advise("forget")
        memory.close()
        with pytest.raises(ClosedError):
            memory.advise("normal")


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


def test_b109_keys_that_are_packed_and_unpacked_leave_nothing():
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


@pytest.mark.parametrize("there", [(1, 99, 0, False), (2, 22, 0, False), None])
def test_bytes_of_another_ucx_or_byte_order_are_refused(monkeypatch, there):
    worker = Worker(Context(TRANSPORTS["tcp"]))
    endpoint = Endpoint(worker, worker.address)
    here = binding._here()
    with monkeypatch.context() as patched:
        patched.setattr(binding, "_here", lambda: there or (*here[:3], not here[3]))
        address, key = worker.address, worker_key(worker)
    match = "endian" if there is None else f"UCX {there[0]}.{there[1]}.0"
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
    context = Context(TRANSPORTS["tcp"])
    worker = Worker(context, single_thread=True)
    endpoint = Endpoint(worker, worker.address)
    memory = context.allocate(64)
    key = RemoteKey(endpoint, memory.pack())
    request = get_nbx(memory, key)
    uses = (
        worker.progress,
        worker.arm,
        lambda: worker.address,
        lambda: worker.open_inbox(1),
        lambda: worker.messages(1),
        lambda: Endpoint(worker, address),
        lambda: Endpoint.connect(worker, "127.0.0.1", 1),
        lambda: Listener(worker),
        lambda: RemoteKey(endpoint, packed),
        lambda: get_nbx(memory, key),
        lambda: flush_nbx(endpoint),
        lambda: am_send_nbx(endpoint, 1, b""),
        request.poll,
        request.wait,
        request.cancel,
        endpoint.close,
        lambda: endpoint.failure,
    )
    address, packed = worker.address, memory.pack()
    errors = []

    def use():
        for each in uses:
            try:
                each()
            except StateError as error:
                errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == len(uses)
    assert all("another thread" in error for error in errors)
    request.wait(WAIT_S)


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
