"""The two ends of a transfer for each series: the target with its memory, and the initiator."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series
from pynixlkv.cli.bench.memory import Memory
from pynixlkv.testing.contents import random_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pynixlkv.agent import Agent
    from pynixlkv.ucx import Context, Worker

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

    def __init__(self, case: Case, device: str, *, allocate: bool = False) -> None:
        make_worker = _only_worker if TRANSPORTS[case.transport].one_process else _new_worker
        self._context, self._worker = make_worker()
        if allocate:
            self._mapped = self._context.allocate(case.memory_bytes)
            array = np.frombuffer(self._mapped.buffer, dtype=np.uint8)
            self.memory = Memory(case.memory_bytes, array=array)
        else:
            self.memory = Memory(case.memory_bytes, device)
            self._mapped = self._context.map(self.memory.buffer)


class _BindingTarget(_BindingEnd):
    def __init__(self, case: Case) -> None:
        # One piece again and again is compared with ucx_perftest, whose memory UCX allocates.
        super().__init__(case, case.target_device, allocate=case.pattern == "repeated")

    def offer(self) -> Offer:
        return self.memory.address, [self._worker.address, self._mapped.pack()]

    def progress(self) -> bool:
        # As the other end of ucx_perftest does: operations that UCX emulates need the target.
        self._worker.spin(_TURN_S)
        return True

    def close(self) -> None:
        self._mapped.close()


class _BindingInitiator(_BindingEnd):
    def __init__(self, case: Case, offer: Offer) -> None:
        from pynixlkv.ucx import Endpoint, RemoteKey, get_batch, put_batch

        super().__init__(case, case.initiator_device)
        self._case = case
        _, (address, key) = offer
        error_handling = TRANSPORTS[case.transport].error_handling
        self._endpoint = Endpoint(self._worker, address, error_handling=error_handling)
        self._key = RemoteKey(self._endpoint, key)
        self._offsets = _offsets(case)
        self._make = get_batch if case.direction == "get" else put_batch

    def run(self) -> float:
        case = self._case
        started = time.perf_counter()
        batch = self._make(
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
        self.memory = Memory(case.memory_bytes, device, allocated)
        self._registration = self._agent.register(self.memory.buffer)

    def close(self) -> None:
        self._registration.close()
        self._agent.close()


class _AgentTarget(_AgentEnd):
    def __init__(self, series: Series, case: Case) -> None:
        super().__init__(series, case, "target", case.target_device)

    def offer(self) -> Offer:
        return self.memory.address, [self._agent.hello()]

    def progress(self) -> bool:
        return False  # an agent has a thread for that


class _AgentInitiator(_AgentEnd):
    def __init__(self, series: Series, case: Case, offer: Offer) -> None:
        super().__init__(series, case, "initiator", case.initiator_device)
        address, (hello,) = offer
        self._peer = self._agent.connect(hello)
        self._local = _descriptors(case, 0, self.memory.address)
        self._remote = _descriptors(case, 1, address)
        agent = self._agent
        self._post = agent.read_descriptors if case.direction == "get" else agent.write_descriptors

    def run(self) -> float:
        started = time.perf_counter()
        self._post(self._peer, self._local, self._remote, timeout=_TIMEOUT_S).wait()
        return time.perf_counter() - started


class _Memcpy:
    """A copy of as many pieces inside this process, or inside the GPU if an end is there."""

    def __init__(self, case: Case, _: Offer | None) -> None:
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


_AGENTS = (Series.ucx, Series.ucx_allocated, Series.nixl)
_TARGETS: dict[Series, Callable[[Case], _BindingTarget | _AgentTarget]] = {
    Series.binding: _BindingTarget,
    **{series: partial(_AgentTarget, series) for series in _AGENTS},
}
_INITIATORS: dict[Series, Callable[[Case, Any], _BindingInitiator | _AgentInitiator | _Memcpy]] = {
    Series.memcpy: _Memcpy,
    Series.binding: _BindingInitiator,
    **{series: partial(_AgentInitiator, series) for series in _AGENTS},
}


def has_target(series: Series) -> bool:
    """Return whether a series needs a target of this program."""
    return series in _TARGETS


class Target:
    """The target of a series, its memory filled with the bytes that are read from it."""

    def __init__(self, series: Series, case: Case) -> None:
        end = _TARGETS[series](case)
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
        end = _INITIATORS[series](case, offer)
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
