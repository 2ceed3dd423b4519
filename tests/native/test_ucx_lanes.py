"""Lanes: the sockets for memory over TCP, what strangers send to them, and what breaks them."""

import contextlib
import itertools
import mmap
import os
import resource
import select
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest

from pynixlkv.errors import PeerLostError, TransferError
from pynixlkv.hello import Hello
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.ucx import UcxAgent

WAIT_S = 60.0
SIZE = 1 << 20
TCP = {"TLS": "tcp", "NET_DEVICES": "lo"}
READ, WRITE, DATA, END = range(4)
LOOPBACK = socket.inet_aton("127.0.0.1")


def place_of(hello):
    """Return where the port of the lane on the loopback device is in the metadata."""
    return Hello.unseal(hello).metadata.index(struct.pack("<I", 4) + LOOPBACK) + 8


def port_of(hello):
    return struct.unpack_from("<H", Hello.unseal(hello).metadata, place_of(hello))[0]


def with_port(hello, port):
    body, at = Hello.unseal(hello), place_of(hello)
    changed = body.metadata[:at] + struct.pack("<H", port) + body.metadata[at + 2 :]
    return msgspec.structs.replace(body, metadata=changed).seal()


def receive(end, size):
    got = b""
    while len(got) < size and (more := end.recv(size - len(got))):
        got += more
    return got


class Stranger:
    """Speaks to a lane by hand."""

    def __init__(self, hello, greeting):
        self.greeting = greeting
        self.socket = socket.create_connection(("127.0.0.1", port_of(hello)), timeout=WAIT_S)

    def greet(self):
        self.socket.sendall(self.greeting)
        assert self.receive(len(self.greeting)) == self.greeting
        return self

    def receive(self, size):
        return receive(self.socket, size)

    def ask(self, kind, total, *pieces, count=None):
        head = struct.pack("<IIQQ", kind, len(pieces) if count is None else count, 7, total)
        self.socket.sendall(head + b"".join(struct.pack("<QQ", *piece) for piece in pieces))

    def is_dropped(self):
        with contextlib.suppress(ConnectionResetError):
            return self.socket.recv(1) == b""
        return True

    def answer(self):
        """Return the kind of the next answer, and its bytes."""
        kind, _, xfer, size = struct.unpack("<IIQQ", self.receive(24))
        assert xfer == 7
        return kind, self.receive(size)


@pytest.fixture
def owner():
    with UcxAgent("owner", config=TCP) as agent:
        yield agent


@pytest.fixture
def theirs(owner):
    array = random_bytes(SIZE, 1).copy()
    owner.register(array)
    return array


@pytest.fixture
def door():
    """Listens where peers are told that a lane is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield listener


def receive_greeting(door):
    """Return the next lane that a peer opens, and the hello that it says."""
    lane = door.accept()[0]
    lane.settimeout(WAIT_S)
    return lane, receive(lane, 24)


@pytest.fixture
def greeting(owner, door):
    """The hello of a peer that has a connection, and whose own lane is not answered."""
    with UcxAgent("caller", config=TCP) as caller:
        caller.connect(with_port(owner.hello(), door.getsockname()[1]))
        lane, greeting = receive_greeting(door)
        with lane:
            yield greeting


@pytest.fixture
def visit(owner, greeting):
    """Return a function that makes a stranger to the owner, who says the hello of a peer."""
    with contextlib.ExitStack() as stack:

        def make(greeting=greeting):
            stranger = Stranger(owner.hello(), greeting)
            stack.enter_context(stranger.socket)
            return stranger

        yield make


def check_that_it_serves(owner, theirs):
    here = np.zeros(SIZE, dtype=np.uint8)
    with UcxAgent("reader", config=TCP) as reader:
        reader.register(here)
        peer = reader.connect(owner.hello())
        order = np.random.default_rng(2).permutation(SIZE // 4096) * 4096
        local = rows(here.ctypes.data, *[(i * 4096, 4096) for i in range(len(order))])
        remote = rows(theirs.ctypes.data, *[(int(at), 4096) for at in order])
        for _ in range(3):
            here[:] = 0
            reader.read_descriptors(peer, local, remote).wait(WAIT_S)
            assert np.array_equal(here, theirs.reshape(-1, 4096)[order // 4096].reshape(-1))
        here[:] = random_bytes(SIZE, 3)
        reader.write_descriptors(peer, local, remote).wait(WAIT_S)
        assert np.array_equal(here, theirs.reshape(-1, 4096)[order // 4096].reshape(-1))


def test_a_request_by_hand_is_answered(visit, theirs):
    stranger = visit().greet()
    base = theirs.ctypes.data
    stranger.ask(READ, 300, (base + 500, 100), (base, 200))
    kind, data = stranger.answer()
    assert (kind, data) == (DATA, theirs[500:600].tobytes() + theirs[:200].tobytes())
    assert stranger.answer() == (END, b"")
    stranger.ask(WRITE, 3, (base + 9, 1), (base + 5, 2))
    stranger.socket.sendall(b"xyz")
    assert stranger.answer() == (END, b"")
    assert theirs[[9, 5, 6]].tobytes() == b"xyz"


def test_no_bytes_of_a_large_write_wait_for_more(visit, theirs):
    stranger = visit().greet()
    stranger.ask(WRITE, SIZE, (theirs.ctypes.data, SIZE))
    written = random_bytes(SIZE, 6)
    deadline = time.monotonic() + WAIT_S
    for begin, end in itertools.pairwise((0, 1, 1000, 100_000, SIZE)):
        stranger.socket.sendall(written[begin:end].tobytes())
        while not np.array_equal(theirs[:end], written[:end]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert stranger.answer() == (END, b"")


@pytest.mark.parametrize("kind", [READ, WRITE])
@pytest.mark.parametrize("far", [-1, SIZE - 1, SIZE, 1 << 40])
def test_what_is_not_registered_is_refused(visit, theirs, kind, far):
    before = theirs.copy()
    stranger = visit().greet()
    base = theirs.ctypes.data
    stranger.ask(kind, 12, (base, 2), (base + far, 10))
    if kind == WRITE:
        stranger.socket.sendall(theirs[:2].tobytes() + b"0123456789")
    else:
        # The first row is sent; zeros stand for the rest of what was announced.
        assert stranger.answer() == (DATA, before[:2].tobytes() + bytes(10))
    end, reason = stranger.answer()
    assert (end, b"is not registered" in reason) == (END, True)
    assert np.array_equal(theirs, before)
    stranger.ask(READ, 2, (base, 2))
    assert stranger.answer() == (DATA, before[:2].tobytes())


def test_impossible_requests_end_their_lane_alone(visit, theirs):
    base = theirs.ctypes.data
    neighbour = visit().greet()
    for kind, total, pieces, count in [
        (DATA, 1, [(base, 1)], None), (END, 0, [], None), (99, 1, [(base, 1)], None),
        (READ, 0, [], None), (READ, 1, [], 1 << 31), (WRITE, 1, [], 0),
        (READ, 0, [(base, 0)], None), (READ, 2, [(base, 1)], None),
        (WRITE, 1 << 63, [(base, 1 << 63)], None),
        (WRITE, 0, [(base, 1 << 63), (base, 1 << 63)], None),
    ]:  # fmt: skip
        stranger = visit().greet()
        stranger.ask(kind, total, *pieces, count=count)
        assert stranger.is_dropped(), (kind, total, pieces, count)
    neighbour.ask(READ, 1, (base, 1))
    assert neighbour.answer() == (DATA, theirs[:1].tobytes())


def test_strangers_without_the_token_get_nothing(visit, owner, theirs, greeting):
    wrong = visit(greeting[:8] + b"12345678" + greeting[16:])
    wrong.socket.sendall(wrong.greeting)
    assert wrong.is_dropped()
    silent = [visit() for _ in range(100)]
    # The oldest make room.
    assert silent[0].is_dropped()
    assert not select.select([silent[-1].socket], [], [], 0)[0]
    noise = visit()
    with contextlib.suppress(OSError):
        noise.socket.sendall(os.urandom(1 << 16))
    assert noise.is_dropped()
    check_that_it_serves(owner, theirs)


def test_a_peer_that_asks_and_does_not_read_is_dropped(visit, owner, theirs):
    greedy = visit().greet()
    greedy.socket.settimeout(0.2)
    base = theirs.ctypes.data
    with contextlib.suppress(OSError):
        while True:
            greedy.ask(READ, 1000 * SIZE, *[(base, SIZE)] * 1000)
    check_that_it_serves(owner, theirs)


def test_a_peer_without_a_lane_is_lost_and_the_error_says_what_to_look_at(owner, theirs):
    here = np.zeros(SIZE, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with UcxAgent("reader", config=TCP) as reader:
        reader.register(here)
        peer = reader.connect(with_port(owner.hello(), port))
        ends = rows(here.ctypes.data, (0, 8)), rows(theirs.ctypes.data, (0, 8))
        with pytest.raises(PeerLostError, match="UCX_TCP_PORT_RANGE"):
            reader.read_descriptors(peer, *ends).wait(WAIT_S)


def test_a_transfer_that_ends_before_its_lane_is_ready_is_never_posted(owner, theirs, door):
    here = np.zeros(SIZE, dtype=np.uint8)
    with UcxAgent("reader", config=TCP) as reader:
        reader.register(here)
        peer = reader.connect(with_port(owner.hello(), door.getsockname()[1]))
        ends = rows(here.ctypes.data, (0, SIZE)), rows(theirs.ctypes.data, (0, SIZE))
        cancelled = reader.read_descriptors(peer, *ends)
        lane, greeting = receive_greeting(door)
        with lane:
            cancelled.cancel()
            assert cancelled.wait_quiet(WAIT_S)
            lane.sendall(greeting)
            small = rows(here.ctypes.data, (0, 8)), rows(theirs.ctypes.data, (0, 8))
            posted = reader.read_descriptors(peer, *small)
            assert struct.unpack("<IIQQ", receive(lane, 24))[3] == 8
        with pytest.raises(PeerLostError):
            posted.wait(WAIT_S)
        peer = reader.connect(owner.hello())
        reader.read_descriptors(peer, *ends).wait(WAIT_S)
        assert np.array_equal(here, theirs)


def push(test, hello, address):
    """Begin to write to the process of the test."""
    with UcxAgent("producer", config=TCP) as producer:
        source = np.full(SIZE, 7, dtype=np.uint8)
        producer.register(source)
        peer = producer.connect(hello)
        test.send(producer.hello())
        test.receive()
        ends = rows(source.ctypes.data, (0, SIZE)), rows(address, (0, SIZE))
        producer.write_descriptors(peer, *ends)
        test.receive()


@pytest.mark.parametrize("end", ["killed", "disconnected"])
def test_what_a_lost_peer_has_sent_lands_nowhere(owner, theirs, door, start_peer, end):
    """The test is a slow network between a producer and the owner."""
    producer = start_peer(push, with_port(owner.hello(), door.getsockname()[1]), theirs.ctypes.data)
    lane, greeting = receive_greeting(door)
    with lane, Stranger(owner.hello(), greeting).greet().socket as network:
        lane.sendall(greeting)
        peer = owner.connect(producer.receive())
        producer.send("write")
        on_the_way = receive(lane, 24 + 16 + SIZE)
        assert len(on_the_way) == 24 + 16 + SIZE
        network.sendall(on_the_way[: SIZE // 4])
        if end == "killed":
            producer.kill()
            while peer.is_connected:
                time.sleep(0.001)
        else:
            owner.disconnect(peer)
        theirs[:] = 1  # another request's
        with contextlib.suppress(OSError):
            network.sendall(on_the_way[SIZE // 4 :])
        with contextlib.suppress(ConnectionResetError):
            assert network.recv(1) == b""
        late = Stranger(owner.hello(), greeting)
        with late.socket:
            late.socket.sendall(greeting)
            assert late.is_dropped()
        assert (theirs == 1).all()


@pytest.mark.parametrize("has_read", [False, True])
def test_a_peer_that_was_disconnected_writes_only_after_it_has_connected_anew(
    owner, theirs, has_read
):
    here = np.full(SIZE, 3, dtype=np.uint8)
    with UcxAgent("peer", config=TCP) as agent:
        agent.register(here)
        ends = rows(here.ctypes.data, (0, SIZE)), rows(theirs.ctypes.data, (0, SIZE))
        known = owner.connect(agent.hello())
        peer = agent.connect(owner.hello())
        if has_read:
            agent.read_descriptors(peer, *ends).wait(WAIT_S)
        owner.disconnect(known)  # the owner may not have seen the peer's connection yet
        before = theirs.copy()
        here[:] = 3
        with pytest.raises(PeerLostError):
            agent.write_descriptors(peer, *ends).wait(WAIT_S)
        assert np.array_equal(theirs, before)
        peer = agent.connect(owner.hello())
        agent.write_descriptors(peer, *ends).wait(WAIT_S)
        assert (theirs == 3).all()


def test_a_lane_waits_until_its_connection_is_known(visit, owner, theirs, greeting):
    early = visit(greeting[:16] + b"12345678")
    early.socket.sendall(early.greeting)
    check_that_it_serves(owner, theirs)
    assert not select.select([early.socket], [], [], 0)[0]


def test_an_owner_that_stood_still_drops_no_peers_of_many(start_peer, door):
    owner = start_peer(serve_few)
    hello, there = owner.receive()
    here = np.zeros(SIZE, dtype=np.uint8)
    ends = rows(here.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(UcxAgent("caller", config=TCP))
        caller.connect(with_port(hello, door.getsockname()[1]))
        lane, greeting = receive_greeting(door)
        stack.enter_context(lane)
        owner.stop()
        early = [Stranger(hello, greeting[:16] + struct.pack("<Q", n)) for n in range(100)]
        for peer in early:
            stack.enter_context(peer.socket)
            peer.socket.sendall(peer.greeting)
        owner.resume()
        reader = stack.enter_context(UcxAgent("reader", config=TCP))
        reader.register(here)
        reader.read_descriptors(reader.connect(hello), *ends).wait(WAIT_S)
        assert np.array_equal(here, random_bytes(SIZE, 1))
        assert not select.select([peer.socket for peer in early], [], [], 0)[0]
    owner.kill()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_lane_that_breaks_ends_its_transfers(owner, theirs, op):
    """A relay that cuts the lane after the first bytes of a transfer."""
    here = np.zeros(SIZE, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as relay, UcxAgent("r", config=TCP) as reader:
        reader.register(here)
        peer = reader.connect(with_port(owner.hello(), relay.getsockname()[1]))
        ends = [socket.create_connection(("127.0.0.1", port_of(owner.hello()))), relay.accept()[0]]

        def forward():
            moved = 0
            while moved < SIZE // 4:
                for end in select.select(ends, [], [])[0]:
                    data = end.recv(1 << 14)
                    ends[1 - ends.index(end)].sendall(data)
                    moved += len(data)
            for end in ends:
                end.close()

        thread = threading.Thread(target=forward)
        thread.start()
        move = reader.read_descriptors if op == "read" else reader.write_descriptors
        everything = rows(here.ctypes.data, (0, SIZE)), rows(theirs.ctypes.data, (0, SIZE))
        with pytest.raises(PeerLostError):
            move(peer, *everything).wait(WAIT_S)
        thread.join(WAIT_S)
        peer = reader.connect(owner.hello())
        reader.read_descriptors(peer, *everything).wait(WAIT_S)
        assert np.array_equal(here, theirs)


def test_lanes_listen_within_the_ports_of_ucx():
    with socket.create_server(("127.0.0.1", 0)) as free:
        first = free.getsockname()[1]
    with UcxAgent("a", config=TCP | {"TCP_PORT_RANGE": f"{first}-{first + 50}"}) as agent:
        assert first <= port_of(agent.hello()) <= first + 50


def test_a_source_that_goes_away_fails_its_write_alone(owner, theirs, tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(random_bytes(SIZE, 4).tobytes())
    here = random_bytes(SIZE, 5).copy()
    with path.open("r+b") as file, UcxAgent("writer", config=TCP) as writer:
        of_file = np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)
        writer.register(of_file, here)
        peer = writer.connect(owner.hello())
        remote = rows(theirs.ctypes.data, (0, SIZE))
        writer.write_descriptors(peer, rows(of_file.ctypes.data, (0, SIZE)), remote).wait(WAIT_S)
        assert np.array_equal(theirs, random_bytes(SIZE, 4))
        for left in (SIZE // 2, 0):
            os.truncate(path, left)
            fails = writer.write_descriptors(peer, rows(of_file.ctypes.data, (0, SIZE)), remote)
            other = writer.write_descriptors(peer, rows(here.ctypes.data, (0, SIZE)), remote)
            with pytest.raises(TransferError, match="local memory is no longer mapped"):
                fails.wait(WAIT_S)
            other.wait(WAIT_S)
            assert np.array_equal(theirs, here)
        assert peer.is_connected


def serve_few(peer):
    limit = resource.RLIMIT_NOFILE
    most = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (512, most))
    with UcxAgent("owner", config=TCP) as agent:
        array = random_bytes(SIZE, 1).copy()
        agent.register(array)
        peer.send((agent.hello(), array.ctypes.data))
        peer.receive()
        resource.setrlimit(limit, (256, most))
        peer.send("fewer")
        peer.receive()


def test_lanes_take_no_more_than_half_of_the_descriptors(start_peer, door):
    owner = start_peer(serve_few)
    hello, there = owner.receive()
    doorway = with_port(hello, door.getsockname()[1])
    here = np.zeros(SIZE, dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(UcxAgent("reader", config=TCP))
        reader.register(here)
        ends = rows(here.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
        peer = reader.connect(hello)
        reader.read_descriptors(peer, *ends).wait(WAIT_S)

        def count_kept(number):
            """Return how many of 16 lanes of another peer are answered."""
            caller = stack.enter_context(UcxAgent(f"caller-{number}", config=TCP))
            caller.connect(doorway)
            lane, greeting = receive_greeting(door)
            stack.enter_context(lane)
            kept = 0
            for _ in range(16):
                stranger = Stranger(hello, greeting)
                stack.enter_context(stranger.socket)
                stranger.socket.sendall(greeting)
                with contextlib.suppress(ConnectionResetError):
                    kept += stranger.receive(len(greeting)) == greeting
            return kept

        # With the reader's, 128 lanes fill half of the room: from then on each peer has one.
        assert [count_kept(number) for number in range(9)] == [16] * 7 + [15, 1]
        owner.send("have fewer")
        owner.receive()
        assert count_kept(9) == 0
        here[:] = 0
        reader.read_descriptors(peer, *ends).wait(WAIT_S)
        assert np.array_equal(here, random_bytes(SIZE, 1))
    owner.send("end")
    owner.finish()
