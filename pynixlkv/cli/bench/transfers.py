"""The two ends of a transfer for each series: the target with its memory, and the initiator."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series
from pynixlkv.cli.bench.memory import Memory
from pynixlkv.testing.contents import random_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from pynixlkv.agent import Agent
    from pynixlkv.ucx import Context, Endpoint, Worker

__all__ = ["Initiator", "Target", "has_target"]

# The address of the target's memory, and what else the initiator needs to reach it.
Offer = tuple[int, list[bytes]]

_TIMEOUT_S = 60.0
_TARGET_SEED, _INITIATOR_SEED, _ORDER_SEED = 1, 2, 3
# How long a target progresses before it looks for the next call.
_TURN_S = 1e-3


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


def _descriptors(case: Case, column: int, address: int) -> npt.NDArray[np.uint64]:
    """Return address, length and device of each piece on one side."""
    rows = np.zeros((case.count, 3), dtype=np.uint64)
    rows[:, 0] = _offsets(case)[:, column] + np.uint64(address)
    rows[:, 1] = case.piece_bytes
    return rows


def _target_content(series: Series, case: Case) -> npt.NDArray[np.uint8]:
    """Return the bytes that are read from the target."""
    if _is_unwritten(series, case):
        return np.zeros(case.memory_bytes, dtype=np.uint8)
    return random_bytes(case.memory_bytes, _TARGET_SEED)


def _is_unwritten(series: Series, case: Case) -> bool:
    """Whether a get reads memory that was never written, because ucx_perftest's does.

    Linux maps such memory to one page of zeros, which stays in the cache.
    """
    return series is Series.binding and case.pattern == "repeated" and case.direction == "get"


def _new_worker() -> tuple[Context, Worker]:
    from pynixlkv.ucx import Context, Worker

    context = Context()
    return context, Worker(context)


# For a transport that reaches nothing but the worker itself.
_only_worker = cache(_new_worker)


class _BindingEnd:
    """A worker and mapped memory of the thin binding."""

    def __init__(self, case: Case, device: str) -> None:
        make_worker = _only_worker if TRANSPORTS[case.transport].one_process else _new_worker
        self._context, self._worker = make_worker()
        self._case = case
        self._endpoint: Endpoint | None = None
        if case.pattern == "repeated":
            # Compared with ucx_perftest, whose memory UCX allocates.
            self._mapped = self._context.allocate(case.memory_bytes)
            array = np.frombuffer(self._mapped.buffer, dtype=np.uint8)
            self.memory = Memory(case.memory_bytes, array=array)
        else:
            self.memory = Memory(case.memory_bytes, device)
            self._mapped = self._context.map(self.memory.buffer)

    def offer(self) -> Offer:
        return self.memory.address, [self._worker.address, self._mapped.pack()]

    def progress(self) -> bool:
        # As the other end of ucx_perftest does: operations that UCX emulates need the target.
        self._worker.spin(_TURN_S)
        return True

    def connect(self, offer: Offer) -> None:
        from pynixlkv.ucx import Endpoint, RemoteKey, get_batch, put_batch

        _, (address, key) = offer
        error_handling = TRANSPORTS[self._case.transport].error_handling
        self._endpoint = Endpoint(self._worker, address, error_handling=error_handling)
        self._key = RemoteKey(self._endpoint, key)
        self._offsets = _offsets(self._case)
        self._post = get_batch if self._case.direction == "get" else put_batch

    def run(self) -> float:
        case = self._case
        started = time.perf_counter()
        batch = self._post(
            self._mapped,
            self._key,
            self._offsets,
            case.piece_bytes,
            window=case.window,
            timed=case.is_latency,
        )
        batch.wait(_TIMEOUT_S, spin=True)
        if case.is_latency:
            return float(np.median(batch.piece_times)) * case.count
        return time.perf_counter() - started

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._mapped.close()


class _AgentEnd:
    """An agent with registered memory."""

    def __init__(self, series: Series, case: Case, name: str, device: str) -> None:
        allocated = None
        self._agent: Agent
        if series is Series.nixl:
            from pynixlkv.nixl import NixlAgent

            self._agent = NixlAgent(name)
        else:
            from pynixlkv.ucx import UcxAgent

            # Connections to allocated memory notice the death of a peer in any case.
            error_handling = (
                series is Series.ucx_allocated or TRANSPORTS[case.transport].error_handling
            )
            self._agent = agent = UcxAgent(name, error_handling=error_handling)
            if series is Series.ucx_allocated and name == "target":
                allocated = agent.allocate(case.memory_bytes)
        self._case = case
        self.memory = Memory(case.memory_bytes, device, allocated)
        self._registration = self._agent.register(self.memory.buffer)

    def offer(self) -> Offer:
        return self.memory.address, [self._agent.hello()]

    def progress(self) -> bool:
        return False  # an agent has a thread for that

    def connect(self, offer: Offer) -> None:
        address, (hello,) = offer
        peer = self._agent.connect(hello)
        local = _descriptors(self._case, 0, self.memory.address)
        remote = _descriptors(self._case, 1, address)
        is_get = self._case.direction == "get"
        post = self._agent.read_descriptors if is_get else self._agent.write_descriptors
        self._post = partial(post, peer, local, remote, timeout=_TIMEOUT_S)

    def run(self) -> float:
        started = time.perf_counter()
        self._post().wait()
        return time.perf_counter() - started

    def close(self) -> None:
        self._registration.close()
        self._agent.close()


class _Memcpy:
    """A copy of as many pieces inside this process, or inside the GPU if an end is there."""

    def __init__(self, case: Case) -> None:
        device = max(case.initiator_device, case.target_device, key=lambda name: name != "cpu")
        source = Memory(case.memory_bytes, device)
        source.fill(random_bytes(case.memory_bytes, _TARGET_SEED))
        self.memory = Memory(case.memory_bytes, device)
        self._copy = self.memory.make_copier(source, _order(case), case.piece_bytes)

    def run(self) -> float:
        started = time.perf_counter()
        self._copy()
        return time.perf_counter() - started

    def close(self) -> None:
        pass


def _make_end(series: Series, case: Case, name: str, device: str) -> _BindingEnd | _AgentEnd:
    if series is Series.binding:
        return _BindingEnd(case, device)
    return _AgentEnd(series, case, name, device)


def has_target(series: Series) -> bool:
    """Return whether a series needs a target of this program."""
    return series not in (Series.memcpy, Series.perftest)


class Target:
    """The target of a series, its memory filled with the bytes that are read from it."""

    def __init__(self, series: Series, case: Case) -> None:
        end = _make_end(series, case, "target", case.target_device)
        self._memory = end.memory
        if case.direction == "put":
            content = random_bytes(case.memory_bytes, _INITIATOR_SEED)
            pieces = np.empty((case.memory_bytes // case.piece_bytes, case.piece_bytes), np.uint8)
            pieces[_order(case)] = content.reshape(pieces.shape)
            self._expected = pieces.reshape(-1)
        elif not _is_unwritten(series, case):
            self._memory.fill(_target_content(series, case))
        self.offer = end.offer
        self.progress = end.progress
        self.close = end.close
        self.clear = self._memory.fill

    def count_wrong(self) -> int:
        """Return how many bytes are wrong after a put."""
        return self._memory.count_wrong(self._expected)


class Initiator:
    """The initiator of a series; `offer` is the target's, None without one."""

    def __init__(self, series: Series, case: Case, offer: Offer | None) -> None:
        end: _Memcpy | _BindingEnd | _AgentEnd
        if offer is None:
            end = _Memcpy(case)
        else:
            end = _make_end(series, case, "initiator", case.initiator_device)
            end.connect(offer)
        self._memory = end.memory
        self._is_read = case.direction == "get" or series is Series.memcpy
        if self._is_read:
            pieces = _target_content(series, case).reshape(-1, case.piece_bytes)
            self._expected = pieces[_order(case)[: len(pieces)]].reshape(-1)
        else:
            self._expected = random_bytes(case.memory_bytes, _INITIATOR_SEED)
            self._memory.fill(self._expected)
        self._run = end.run
        self.close = end.close

    def run(self, *, compare: bool, spoil: bool = False) -> tuple[float, int]:
        """Move everything once and return the seconds it took, and how many bytes are wrong.

        `compare` clears the memory that is read into before, and compares it after; `spoil` flips a
        bit in between.
        """
        if compare and self._is_read:
            self._memory.fill()
        seconds = self._run()
        if spoil:
            self._memory.corrupt()
        return seconds, self._memory.count_wrong(self._expected) if compare else 0
