"""What moves the bytes: for each series the target's half and the initiator's half."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series
from pynixlkv.cli.bench.memory import Memory, address_of, contents, mapping_of
from pynixlkv.cli.messages import RunError
from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pynixlkv.agent import Agent
    from pynixlkv.ucx import Context, Worker

__all__ = ["InitiatorHalf", "TargetHalf", "find_nixl_python", "has_target"]

_TIMEOUT_S = 60.0
_TARGET_SEED, _INITIATOR_SEED, _ORDER_SEED = 1, 2, 3
# How long a target takes part before it looks for the next command.
_TURN_S = 1e-3
_CALLS_PER_TURN = 100
_NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


class _Offer(msgspec.Struct):
    """Address of the target's memory, and what else reaching it takes."""

    address: int
    parts: list[bytes]
    mapping: tuple[str, int] | None = None
    """Where it is in shared memory, if it is."""


def _order(case: Case) -> npt.NDArray[np.int64]:
    """Return the piece at the target that each piece at the initiator belongs to."""
    if case.pattern == "repeated":
        return np.zeros(case.count, dtype=np.int64)
    return np.random.default_rng(_ORDER_SEED).permutation(case.count)


def _places(case: Case) -> npt.NDArray[np.uint64]:
    """Return the offsets of each piece at the initiator and at the target."""
    order = _order(case)
    here = np.zeros_like(order) if case.pattern == "repeated" else np.arange(case.count)
    return (np.stack([here, order], axis=1) * case.piece_bytes).astype(np.uint64)


def _rows(case: Case, column: int, address: int) -> npt.NDArray[np.uint64]:
    """Return address, length and device of each piece on one side."""
    offsets = _places(case)[:, column]
    rows = np.zeros((case.count, 3), dtype=np.uint64)
    rows[:, 0] = offsets + np.uint64(address)
    rows[:, 1] = case.piece_bytes
    return rows


def _content(case: Case, seed: int) -> npt.NDArray[np.uint8]:
    return contents(case.memory_bytes, seed)


def _target_content(series: Series, case: Case) -> npt.NDArray[np.uint8]:
    """Return what is read from the target."""
    if series is Series.binding_unwritten:
        return np.zeros(case.memory_bytes, dtype=np.uint8)
    return _content(case, _TARGET_SEED)


class Target(Protocol):
    """The side that is read from or written to."""

    memory: Memory

    def offer(self) -> bytes:
        """Return what the initiator needs."""
        ...

    def progress(self) -> bool:
        """Take part for a moment; False if that is never needed."""
        ...

    def close(self) -> None:
        """Give everything back."""


class Initiator(Protocol):
    """The side that reads or writes."""

    memory: Memory

    def run(self) -> float:
        """Move everything once and return, when it has arrived, how many seconds that took."""
        ...

    def close(self) -> None:
        """Give everything back."""


def _new_worker() -> tuple[Context, Worker]:
    from pynixlkv.ucx import Context, Worker

    context = Context()
    return context, Worker(context)


# For what reaches nothing but the worker itself.
_only_worker = cache(_new_worker)


class _BindingSide:
    """A worker and mapped memory of the thin binding."""

    def __init__(self, case: Case, device: str, *, allocate: bool = False) -> None:
        make_worker = _only_worker if TRANSPORTS[case.transport].one_process else _new_worker
        self._context, self._worker = make_worker()
        if allocate:
            self._mapped = self._context.allocate(case.memory_bytes)
            array = np.frombuffer(self._mapped.buffer, dtype=np.uint8)
            self.memory = Memory(case.memory_bytes, device, array)
        else:
            self.memory = Memory(case.memory_bytes, device)
            self._mapped = self._context.map(self.memory.buffer)


class _BindingTarget(_BindingSide):
    def __init__(self, series: Series, case: Case) -> None:
        allocate = series is Series.binding_allocated
        super().__init__(case, case.target_device, allocate=allocate)

    def offer(self) -> bytes:
        parts = [self._worker.address, self._mapped.pack()]
        return msgspec.msgpack.encode(_Offer(self.memory.address, parts))

    def progress(self) -> bool:
        # As the other end of ucx_perftest does: what UCX emulates needs the target's processor.
        self._worker.spin(_TURN_S)
        return True

    def close(self) -> None:
        self._mapped.close()


class _BindingInitiator(_BindingSide):
    def __init__(self, case: Case, offer: _Offer) -> None:
        from pynixlkv.ucx import Endpoint, RemoteKey, get_batch, put_batch

        super().__init__(case, case.initiator_device)
        self._case = case
        error_handling = TRANSPORTS[case.transport].error_handling
        self._endpoint = Endpoint(self._worker, offer.parts[0], error_handling=error_handling)
        self._key = RemoteKey(self._endpoint, offer.parts[1])
        self._places = _places(case)
        self._make = get_batch if case.operation == "get" else put_batch

    def run(self) -> float:
        case = self._case
        started = time.perf_counter()
        batch = self._make(
            self._mapped,
            self._key,
            self._places,
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


def _make_agent(series: Series, case: Case, name: str) -> Agent:
    if series is Series.nixl:
        from pynixlkv.nixl import NixlAgent

        return NixlAgent(name)
    from pynixlkv.ucx import UcxAgent

    is_reached_directly = series is Series.ucx_allocated
    error_handling = is_reached_directly or TRANSPORTS[case.transport].error_handling
    return UcxAgent(name, error_handling=error_handling)


class _AgentSide:
    """An agent with registered memory."""

    def __init__(self, series: Series, case: Case, role: str, device: str) -> None:
        self._agent = _make_agent(series, case, role)
        allocated = None
        if series is Series.ucx_allocated and role == "target":
            from pynixlkv.ucx import UcxAgent

            assert isinstance(self._agent, UcxAgent)
            allocated = self._agent.allocate(case.memory_bytes)
        self.memory = Memory(case.memory_bytes, device, allocated)
        self._registration = self._agent.register(self.memory.buffer)

    def close(self) -> None:
        self._registration.close()
        self._agent.close()


class _AgentTarget(_AgentSide):
    def __init__(self, series: Series, case: Case) -> None:
        self._series = series
        super().__init__(series, case, "target", case.target_device)

    def offer(self) -> bytes:
        address = self.memory.address
        mapping = mapping_of(address) if self._series is Series.ucx_allocated else None
        return msgspec.msgpack.encode(_Offer(address, [self._agent.hello()], mapping))

    def progress(self) -> bool:
        return False  # an agent has a thread for that


class _AgentInitiator(_AgentSide):
    def __init__(self, series: Series, case: Case, offer: _Offer) -> None:
        super().__init__(series, case, "initiator", case.initiator_device)
        self._peer = self._agent.connect(offer.parts[0])
        self._local = _rows(case, 0, self.memory.address)
        self._remote = _rows(case, 1, offer.address)
        agent = self._agent
        self._move = agent.read_descriptors if case.operation == "get" else agent.write_descriptors
        self.mapping = offer.mapping

    def run(self) -> float:
        started = time.perf_counter()
        self._move(self._peer, self._local, self._remote, timeout=_TIMEOUT_S).wait()
        return time.perf_counter() - started


def find_nixl_python() -> str | None:
    """Return the name of the installed package with NIXL's own Python API, if one can be used.

    Returns
    -------
    str or None
        For example ``"nixl_cu12"``; None without torch, which the API imports.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    return next((n for n in _NIXL_PACKAGES if importlib.util.find_spec(n) is not None), None)


class _NixlPythonSide:
    """An agent of NIXL's own Python API.

    Its progress thread would burn a core on each side all the time, so it is off; the target makes
    progress when it is told to.
    """

    def __init__(self, case: Case, role: str, device: str) -> None:
        package = find_nixl_python()
        if package is None:
            raise ConfigError("NIXL's Python API cannot be imported")
        api = importlib.import_module(f"{package}._api")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = api.nixl_agent(role, config)
        self.memory = Memory(case.memory_bytes, device)
        self._kind = "DRAM" if self.memory.is_host else "VRAM"
        span = (self.memory.address, self.memory.nbytes, 0, "")
        self._registered = self._agent.register_memory([span], self._kind)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class _NixlPythonTarget(_NixlPythonSide):
    def __init__(self, case: Case) -> None:
        super().__init__(case, "target", case.target_device)

    def offer(self) -> bytes:
        parts = [self._agent.get_agent_metadata(), self._kind.encode()]
        return msgspec.msgpack.encode(_Offer(self.memory.address, parts))

    def progress(self) -> bool:
        for _ in range(_CALLS_PER_TURN):
            self._agent.get_new_notifs()
        return True


class _NixlPythonInitiator(_NixlPythonSide):
    def __init__(self, case: Case, offer: _Offer) -> None:
        super().__init__(case, "initiator", case.initiator_device)
        self._peer = self._agent.add_remote_agent(offer.parts[0])
        local = _rows(case, 0, self.memory.address)
        remote = _rows(case, 1, offer.address)
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, self._kind)
        self._remote = self._agent.prep_xfer_dlist(self._peer, remote, offer.parts[1].decode())
        self._indices = np.arange(case.count, dtype=np.int32)
        self._operation = "READ" if case.operation == "get" else "WRITE"

    def run(self) -> float:
        agent = self._agent
        started = time.perf_counter()
        handle = agent.make_prepped_xfer(
            self._operation, self._local, self._indices, self._remote, self._indices
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RunError(f"NIXL's transfer ended in state {state}")
        return time.perf_counter() - started

    def close(self) -> None:
        self._agent.release_dlist_handle(self._local)
        self._agent.release_dlist_handle(self._remote)
        self._agent.remove_remote_agent(self._peer)
        super().close()


class _Memcpy:
    """The pieces of some memory of this process, to other memory."""

    def __init__(self, case: Case, memory: Memory, source: Memory) -> None:
        self.memory = memory
        self._copy = memory.make_copier(source, _order(case), case.piece_bytes)

    def run(self) -> float:
        started = time.perf_counter()
        self._copy()
        return time.perf_counter() - started

    def close(self) -> None:
        pass


def _copy_own(case: Case) -> _Memcpy:
    """Return a copy of the same pieces inside of this process, or of the GPU where there is one."""
    device = max(case.initiator_device, case.target_device, key=lambda name: name != "cpu")
    source = Memory(case.memory_bytes, device)
    source.put(_content(case, _TARGET_SEED))
    return _Memcpy(case, Memory(case.memory_bytes, device), source)


def _copy_mapped(case: Case, agent: Initiator) -> _Memcpy:
    """Return a copy from and to the very places that `Series.ucx_allocated` reads and writes."""
    assert isinstance(agent, _AgentInitiator)
    assert agent.mapping is not None
    there = (ctypes.c_uint8 * case.memory_bytes).from_address(address_of(*agent.mapping))
    source = Memory(case.memory_bytes, array=np.ctypeslib.as_array(there))
    return _Memcpy(case, agent.memory, source)


_BINDING = (Series.binding, Series.binding_unwritten, Series.binding_allocated)
_AGENTS = (Series.ucx, Series.ucx_allocated, Series.nixl)
_TARGETS: dict[Series, Callable[[Case], Target]] = {
    **{series: partial(_BindingTarget, series) for series in _BINDING},
    **{series: partial(_AgentTarget, series) for series in _AGENTS},
    Series.nixl_python: _NixlPythonTarget,
}
_INITIATORS: dict[Series, Callable[[Case, _Offer], Initiator]] = {
    **dict.fromkeys(_BINDING, _BindingInitiator),
    **{series: partial(_AgentInitiator, series) for series in _AGENTS},
    Series.nixl_python: _NixlPythonInitiator,
}


def has_target(series: Series) -> bool:
    """Return whether a series needs a target of this program."""
    return series in _TARGETS


def _is_read(series: Series, case: Case) -> bool:
    """Return whether the bytes arrive at the initiator."""
    return case.operation == "get" or series is Series.memcpy


class TargetHalf:
    """The target's half of a series, its memory filled with what is read from it.

    Parameters
    ----------
    series : Series
        What moves the bytes.
    case : Case
        What is moved.
    """

    def __init__(self, series: Series, case: Case) -> None:
        self._case = case
        self._target = _TARGETS[series](case)
        self._expected = _target_content(series, case)
        if series is Series.binding_unwritten:
            pass
        elif _is_read(series, case):
            self._target.memory.put(self._expected)
        else:
            pieces = np.empty((case.memory_bytes // case.piece_bytes, case.piece_bytes), np.uint8)
            pieces[_order(case)] = _content(case, _INITIATOR_SEED).reshape(pieces.shape)
            self._expected = pieces.reshape(-1)
        self.offer = self._target.offer
        self.progress = self._target.progress
        self.close = self._target.close
        self.clear = self._target.memory.clear

    def count_wrong(self) -> int:
        """Return how many bytes are not what they must be after a put."""
        return self._target.memory.count_wrong(self._expected)


class InitiatorHalf:
    """The initiator's half of a series, its memory filled with what is written from it.

    Parameters
    ----------
    series : Series
        What moves the bytes.
    case : Case
        What is moved.
    offer : bytes
        What the target's half has offered; empty for those that have none.
    agent : InitiatorHalf, optional
        That of `Series.ucx_allocated`, whose memory `Series.memcpy_mapped` copies.
    """

    def __init__(
        self, series: Series, case: Case, offer: bytes, agent: InitiatorHalf | None = None
    ) -> None:
        self._is_read = _is_read(series, case)
        self._mover: Initiator
        if series is Series.memcpy:
            self._mover = _copy_own(case)
        elif series is Series.memcpy_mapped:
            assert agent is not None
            self._mover = _copy_mapped(case, agent._mover)
        else:
            self._mover = _INITIATORS[series](case, msgspec.msgpack.decode(offer, type=_Offer))
        self._expected = _content(case, _INITIATOR_SEED)
        if self._is_read:
            pieces = _target_content(series, case).reshape(-1, case.piece_bytes)
            order = _order(case)
            self._expected = pieces[order if case.pattern == "scattered" else 0].reshape(-1)
            self._mover.memory.clear()
        else:
            self._mover.memory.put(self._expected)
        self.close = self._mover.close

    def run(self, *, compare: bool, spoil: bool = False) -> tuple[float, int]:
        """Move everything once.

        Parameters
        ----------
        compare : bool
            Clear what will be read before, and compare it afterwards.
        spoil : bool
            Flip a bit before comparing.

        Returns
        -------
        seconds : float
            How long it took; where each piece waits for the one before it, the median piece times
            their number.
        wrong_bytes : int
            Bytes that differ.
        """
        memory = self._mover.memory
        if compare and self._is_read:
            memory.clear()
        seconds = self._mover.run()
        if spoil:
            memory.corrupt()
        return seconds, memory.count_wrong(self._expected) if compare else 0
