"""What `bench.paths` compares agents with: one plain socket, and NIXL's own Python API."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial

import numpy as np

from pynixlkv.cli.bench.cases import Series
from pynixlkv.cli.bench.transfers import BenchWorker, Memory, _End, _Memcpy, _offsets

# Of a call of sendmsg or recvmsg.
MAX_PIECES, MAX_BYTES = 64, 1 << 20
GO = b"g"


class Peer(str, Enum):
    """Series beside those of `pynixlkv bench`."""

    two_copies = "memcpy, two threads"
    socket = "one plain socket"
    nixl_api = "NIXL's Python API"
    two_threads = "UcxAgent, two threads"
    served = "UcxAgent, served"


def move_all(call, pieces):
    """Send or receive pieces in order, as many in a call as it takes."""
    first, done = 0, 0
    size = len(pieces[0])
    count = max(1, min(MAX_PIECES, MAX_BYTES // size))
    while first < len(pieces):
        moved = call([pieces[first][done:], *pieces[first + 1 : first + count]])
        first, done = first + (done + moved) // size, (done + moved) % size


class TwoThreadMemory(Memory):
    """Is copied to by two threads, half of the pieces each."""

    def make_copier(self, source, order, piece_bytes):
        there, here = (memory.buffer.reshape(-1, piece_bytes) for memory in (source, self))
        middle = len(order) // 2
        threads = ThreadPoolExecutor(2)

        def copy(half):
            np.take(there, order[half], axis=0, out=here[half], mode="clip")

        return lambda: list(threads.map(copy, (slice(middle), slice(middle, None))))


class SocketEnd(_End):
    """Moves the pieces through a connection of TCP, out of their places and into them."""

    def __init__(self, _series, case, role, make_memory):
        super().__init__(_series, case, role, make_memory())
        offsets = _offsets(case)[:, 1 if role == "target" else 0]
        view = memoryview(self.memory.buffer)
        self._pieces = [view[o : o + case.piece_bytes] for o in map(int, offsets)]
        self._is_read = case.direction == "get"
        self._listener = socket.create_server(("127.0.0.1", 0)) if role == "target" else None
        self._socket = None

    def offer(self):
        return self._listener.getsockname()[1], []

    def connect(self, offer):
        self._socket = socket.create_connection(("127.0.0.1", offer[0]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self):
        move_all(self._socket.sendmsg, self._pieces)

    def _receive(self):
        move_all(lambda pieces: self._socket.recvmsg_into(pieces)[0], self._pieces)

    def progress(self):
        if self._socket is None:
            self._socket = self._listener.accept()[0]
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(1e-3)
        try:
            if not self._socket.recv(1):
                return False
        except TimeoutError:
            return True
        self._socket.settimeout(60)
        if self._is_read:
            self._send()
        else:
            self._receive()
            self._socket.sendall(GO)
        return True

    def move(self):
        started = time.perf_counter()
        self._socket.sendall(GO)
        if self._is_read:
            self._receive()
        else:
            self._send()
            assert self._socket.recv(1) == GO
        return time.perf_counter() - started

    def close(self):
        for each in (self._socket, self._listener):
            if each is not None:
                each.close()


class NixlApiEnd(_End):
    """An agent of NIXL's own Python package, with descriptors prepared before."""

    def __init__(self, _series, case, role, make_memory):
        from nixl_cu12._api import nixl_agent

        super().__init__(_series, case, role, make_memory())
        self._agent = nixl_agent(f"{role}-api")
        span = (self.memory.address, case.memory_bytes, 0, "")
        self._registered = self._agent.register_memory([span], "DRAM")

    def offer(self):
        return self.memory.address, [self._agent.get_agent_metadata()]

    def connect(self, offer):
        case, agent = self._case, self._agent
        name = agent.add_remote_agent(offer[1][0])
        rows = np.zeros((2, case.count, 3), dtype=np.uint64)
        rows[:, :, 0] = _offsets(case).T + np.array([[self.memory.address], [offer[0]]], np.uint64)
        rows[:, :, 1] = case.piece_bytes
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows[0], "DRAM")
        theirs = agent.prep_xfer_dlist(name, rows[1], "DRAM")
        indices = np.arange(case.count, dtype=np.int32)
        kind = "READ" if case.direction == "get" else "WRITE"
        self._make = partial(agent.make_prepped_xfer, kind, mine, indices, theirs, indices)

    def move(self):
        started = time.perf_counter()
        handle = self._make()
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        assert state == "DONE", state
        return time.perf_counter() - started


class PathWorker(BenchWorker):
    def _make_end(self, series, case, role):
        if series is Peer.two_copies:
            memory = partial(TwoThreadMemory, case.memory_bytes)
            return _Memcpy(Series.memcpy, case, role, memory)
        kinds = {Peer.socket: SocketEnd, Peer.nixl_api: NixlApiEnd}
        if series not in kinds:
            return super()._make_end(series, case, role)
        make_memory = partial(self.make_memory, case, role, series)
        return kinds[series](series, case, role, make_memory)
