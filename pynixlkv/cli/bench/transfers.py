"""The two ends of a transfer for each series, and the process that has them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series
from pynixlkv.errors import PynixlkvError
from pynixlkv.testing.contents import random_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from pynixlkv.agent import Agent
    from pynixlkv.ucx import Context, Endpoint, Worker

Role = Literal["target", "initiator"]
# Address of the target's memory, what else the initiator needs to reach it, and its device.
Offer = tuple[int, list[bytes], int]
MakeMemory = Callable[[], "Memory"]

_TIMEOUT_S = 60.0
_CONTENT_SEED, _ORDER_SEED = 1, 2
_CLEAR = 0xA5
# How long a target progresses before it looks for the next call.
_TURN_S = 1e-3


class Memory:
    """Memory of numpy, or a given array."""

    device = 0

    def __init__(self, nbytes: int, array: npt.NDArray[Any] | None = None) -> None:
        if array is None:
            # At the start of a page, as pools are.
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            array = np.frombuffer(pages, dtype=np.uint8)
        self.buffer: Any = array.view(np.uint8)
        self.address = int(array.ctypes.data)

    def fill(self, values: npt.NDArray[np.uint8] | int = _CLEAR) -> None:
        """Set all bytes, by default to one value."""
        self.buffer[:] = values

    def count_wrong(self, expected: npt.NDArray[np.uint8]) -> int:
        """Return how many bytes differ from the expected ones."""
        return int(np.count_nonzero(self.buffer != expected))

    def make_copier(
        self, source: Memory, order: npt.NDArray[np.int64], piece_bytes: int
    ) -> Callable[[], Any]:
        """Return a function that copies pieces of other memory to this, in an order."""
        there, here = (memory.buffer.reshape(-1, piece_bytes) for memory in (source, self))
        # Without a mode that needs no check, numpy copies through a buffer of its own.
        return lambda: np.take(there, order, axis=0, out=here, mode="clip")


def _order(case: Case) -> npt.NDArray[np.int64]:
    """Return the piece at the target that each piece at the initiator belongs to."""
    if case.pattern == "repeated":
        return np.zeros(case.count, dtype=np.int64)
    return np.random.default_rng(_ORDER_SEED).permutation(case.count)


def _offsets(case: Case) -> npt.NDArray[np.uint64]:
    """Return the offsets of each piece at the initiator and at the target."""
    order = _order(case)
    here = np.zeros_like(order) if case.pattern == "repeated" else np.arange(case.count)
    return (np.stack([here, order], axis=1) * case.piece_bytes).astype(np.uint64)


def has_target(series: Series) -> bool:
    """Return whether a series needs a target of this program."""
    return series not in (Series.memcpy, Series.perftest)


class _End:
    """One end of a series, whose memory is the source of the bytes or takes them."""

    def __init__(self, series: Series, case: Case, role: Role, memory: Memory) -> None:
        self._case = case
        self.memory = memory
        # ucx_perftest reads memory that was never written, which Linux maps to one page of zeros.
        is_unwritten = (series, case.pattern, case.direction) == (Series.binding, "repeated", "get")
        nbytes = case.memory_bytes
        content = (
            np.zeros(nbytes, np.uint8) if is_unwritten else random_bytes(nbytes, _CONTENT_SEED)
        )
        is_read = case.direction == "get" or series is Series.memcpy
        if is_read == (role == "initiator"):
            pieces = content.reshape(-1, case.piece_bytes)
            order = _order(case)[: len(pieces)]
            self._expected = pieces[order if is_read else np.argsort(order)].reshape(-1)
        elif not is_unwritten:
            memory.fill(content)

    def count_wrong(self) -> int:
        """Return how many bytes have not arrived."""
        return self.memory.count_wrong(self._expected)

    def offer(self) -> Offer:
        """Return what the other end needs to connect."""
        raise NotImplementedError

    def connect(self, offer: Offer) -> None:
        """Connect to the other end."""

    def progress(self) -> bool:
        """Take part in the transfers of the other end; False if that is not needed."""
        return False

    def move(self) -> float:
        """Move everything once and return the seconds it took."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the end."""


class _Memcpy(_End):
    """A copy of as many pieces inside this process."""

    def __init__(self, series: Series, case: Case, role: Role, make_memory: MakeMemory) -> None:
        super().__init__(series, case, role, make_memory())
        source = make_memory()
        source.fill(random_bytes(case.memory_bytes, _CONTENT_SEED))
        self._copy = self.memory.make_copier(source, _order(case), case.piece_bytes)

    def move(self) -> float:
        started = time.perf_counter()
        self._copy()
        return time.perf_counter() - started


def _new_worker() -> tuple[Context, Worker]:
    from pynixlkv.ucx import Context, Worker

    context = Context()
    return context, Worker(context)


# For a transport that reaches nothing but the worker itself.
_only_worker = cache(_new_worker)


class _BindingEnd(_End):
    """A worker and mapped memory of the thin binding."""

    def __init__(self, series: Series, case: Case, role: Role, make_memory: MakeMemory) -> None:
        make_worker = _only_worker if TRANSPORTS[case.transport].one_process else _new_worker
        context, self._worker = make_worker()
        self._endpoint: Endpoint | None = None
        if case.pattern == "repeated":
            # Compared with ucx_perftest, whose memory UCX allocates.
            self._mapped = context.allocate(case.memory_bytes)
            memory = Memory(case.memory_bytes, np.frombuffer(self._mapped.buffer, dtype=np.uint8))
        else:
            memory = make_memory()
            self._mapped = context.map(memory.buffer)
        super().__init__(series, case, role, memory)

    def offer(self) -> Offer:
        keys = [self._worker.address, self._mapped.pack()]
        return self.memory.address, keys, self.memory.device

    def progress(self) -> bool:
        # As the other end of ucx_perftest does: operations that UCX emulates need the target.
        self._worker.spin(_TURN_S)
        return True

    def connect(self, offer: Offer) -> None:
        from pynixlkv.ucx import Endpoint, RemoteKey, get_batch, put_batch

        case = self._case
        _, (address, key), _ = offer
        error_handling = TRANSPORTS[case.transport].error_handling
        self._endpoint = Endpoint(self._worker, address, error_handling=error_handling)
        self._post = partial(
            get_batch if case.direction == "get" else put_batch,
            self._mapped,
            RemoteKey(self._endpoint, key),
            _offsets(case),
            case.piece_bytes,
            window=case.window,
            timed=case.is_latency,
        )

    def move(self) -> float:
        started = time.perf_counter()
        batch = self._post()
        batch.wait(_TIMEOUT_S, spin=True)
        if self._case.is_latency:
            return float(np.median(batch.piece_times)) * self._case.count
        return time.perf_counter() - started

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._mapped.close()


class _AgentEnd(_End):
    def __init__(self, series: Series, case: Case, role: Role, make_memory: MakeMemory) -> None:
        self._agent: Agent
        memory = None
        if series is Series.nixl:
            from pynixlkv.nixl import NixlAgent

            self._agent = NixlAgent(role)
        else:
            from pynixlkv.ucx import UcxAgent

            # Connections to allocated memory notice the death of a peer in any case.
            allocates = series is Series.ucx_allocated
            error_handling = allocates or TRANSPORTS[case.transport].error_handling
            self._agent = agent = UcxAgent(role, error_handling=error_handling)
            if allocates and role == "target":
                memory = Memory(case.memory_bytes, agent.allocate(case.memory_bytes))
        super().__init__(series, case, role, memory or make_memory())
        self._registration = self._agent.register(self.memory.buffer)

    def offer(self) -> Offer:
        return self.memory.address, [self._agent.hello()], self.memory.device

    def connect(self, offer: Offer) -> None:
        case = self._case
        address, (hello,), device = offer
        rows = np.zeros((2, case.count, 3), dtype=np.uint64)
        rows[:, :, 0] = _offsets(case).T + np.array([[self.memory.address], [address]], np.uint64)
        rows[:, :, 1] = case.piece_bytes
        rows[:, :, 2] = [[self.memory.device], [device]]
        agent = self._agent
        post = agent.read_descriptors if case.direction == "get" else agent.write_descriptors
        self._post = partial(post, agent.connect(hello), *rows, timeout=_TIMEOUT_S)

    def move(self) -> float:
        started = time.perf_counter()
        self._post().wait()
        return time.perf_counter() - started

    def close(self) -> None:
        self._registration.close()
        self._agent.close()


class BenchWorker:
    """The targets or the initiators of a case; both where a worker reaches only itself."""

    def __init__(self) -> None:
        self._targets: dict[Series, _End] = {}
        self._initiators: dict[Series, _End] = {}
        self._serving: _End | None = None

    def make_memory(self, case: Case, role: Role, series: Series) -> Memory:  # noqa: ARG002
        """Make the memory of an end."""
        return Memory(case.memory_bytes)

    def _make_end(self, series: Series, case: Case, role: Role) -> _End:
        kinds: dict[Series, Callable[..., _End]] = {
            Series.memcpy: _Memcpy,
            Series.binding: _BindingEnd,
        }
        make_memory = partial(self.make_memory, case, role, series)
        return kinds.get(series, _AgentEnd)(series, case, role, make_memory)

    def offer(self, case: Case) -> dict[Series, Offer]:
        """Make the targets of a case; return what the initiators need to reach them."""
        for series in filter(has_target, case.series):
            self._targets[series] = self._make_end(series, case, "target")
        return {series: target.offer() for series, target in self._targets.items()}

    def open(self, case: Case, offers: dict[Series, Offer]) -> None:
        """Make the initiators of a case."""
        for series in case.series:
            if series is not Series.perftest:
                self._initiators[series] = end = self._make_end(series, case, "initiator")
                if series in offers:
                    end.connect(offers[series])

    def serve(self, series: Series, *, clear: bool) -> None:
        """Progress the target of a series until `rest`; with `clear`, clear its memory before."""
        self._serving = self._targets[series]
        if clear:
            self._serving.memory.fill()

    def idle(self) -> float | None:
        """Progress the target that is served."""
        return 0.0 if self._serving is not None and self._serving.progress() else None

    def rest(self, *, compare: bool) -> int:
        """End `serve`; return how many bytes are wrong at the target."""
        serving, self._serving = self._serving, None
        return serving.count_wrong() if serving is not None and compare else 0

    def run(self, series: Series, *, compare: bool) -> tuple[float, int, str]:
        """Move everything once; return the seconds, the wrong bytes, and the error if it failed.

        `compare` clears the memory that is read into before, and compares it after.
        """
        end = self._initiators[series]
        try:
            if compare:
                end.memory.fill()
            return end.move(), end.count_wrong() if compare else 0, ""
        except PynixlkvError as error:
            return 0.0, 0, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the ends of the case."""
        for end in (*self._initiators.values(), *self._targets.values()):
            end.close()
        self._initiators, self._targets = {}, {}
