"""Thin binding of NIXL: its verbs in snake_case, with owners instead of handles.

Names and meaning follow NIXL's native API. What is added is only what makes it safe: arguments are
checked before NIXL sees them, owners keep their agent and their memory alive, and a request that is
given up while it runs stays on its agent until its bytes have stopped moving.
"""

from __future__ import annotations

import enum
import sys
import time
import warnings
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from pynixlkv import _native
from pynixlkv._closeable import Closeable
from pynixlkv._loader import load_nixl
from pynixlkv.errors import ClosedError, ConfigError
from pynixlkv.types import AgentName, MemorySpan, MemoryType, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    Rows = NDArray[np.uint64]
    Indices = NDArray[np.int32]

__all__ = [
    "Agent",
    "AgentConfig",
    "Backend",
    "Notification",
    "PluginParams",
    "PreparedList",
    "Registration",
    "Request",
    "RequestState",
    "ThreadSync",
    "TransferCost",
    "TransferTelemetry",
]

_OwnerType = TypeVar("_OwnerType", bound="_Owner")
_MEMORY_ALIASES = {"BLK": "BLOCK", "OBJ": "OBJECT"}
_NO_ROWS: Rows = np.empty((0, 3), dtype=np.uint64)
_INT32 = np.iinfo(np.int32)


def _int_below(name: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise ConfigError(f"{name} is {value!r}; it must be an int from 0 to {limit - 1}")
    return value


class ThreadSync(enum.IntEnum):
    """Locking inside NIXL. The binding may be used from several threads with each of them."""

    NONE = 0
    """NIXL has no locks; the binding lets one call of an agent run at a time."""
    STRICT = 1
    """NIXL lets one call run at a time."""
    RW = 2
    """NIXL lets posts and polls of different requests run side by side."""


class RequestState(enum.IntEnum):
    """What a request is doing."""

    NOT_POSTED = 0
    PENDING = 1
    DONE = 2
    FAILED = 3
    RELEASED = 4


class Notification(NamedTuple):
    """A message from another agent.

    Parameters
    ----------
    peer : AgentName
        Name of the sender.
    message : bytes
        Exactly what it sent.
    """

    peer: AgentName
    message: bytes


class PluginParams(NamedTuple):
    """What a plugin or a backend says about itself.

    Parameters
    ----------
    memory_types : tuple of MemoryType
        Kinds of memory that it can transfer.
    params : dict of str to str
        Creation parameters.
    """

    memory_types: tuple[MemoryType, ...]
    params: dict[str, str]


class TransferCost(NamedTuple):
    """NIXL's estimate of a request; rough for small descriptors, which it rounds down to 1 µs.

    Parameters
    ----------
    duration_us, margin_us : int
        Microseconds, and how wrong they may be.
    method : int
        NIXL's number for how it estimated.
    """

    duration_us: int
    margin_us: int
    method: int


class TransferTelemetry(NamedTuple):
    """What NIXL measured of a transfer that is done.

    Parameters
    ----------
    start_us : int
        Start, in microseconds on the steady clock.
    post_us, transfer_us : int
        Microseconds of the post, and until the poll that saw the end.
    num_bytes, num_descriptors : int
        What was moved, after merging.
    """

    start_us: int
    post_us: int
    transfer_us: int
    num_bytes: int
    num_descriptors: int


@dataclass(frozen=True)
class AgentConfig:
    """Configuration of an agent.

    Parameters
    ----------
    progress_thread : bool
        Let NIXL run a thread that serves peers while this process does something else.
    listen_thread : bool
        Run NIXL's TCP listener, for `Agent.send_local_md` and `Agent.fetch_remote_md`.
    listen_port : int
        Its port, 0 for NIXL's default.
    thread_sync : ThreadSync
        Locking inside NIXL.
    progress_delay_us : int
        Longest sleep of the progress thread in microseconds; 0 keeps one core busy for good.
    listen_delay_us : int
        Sleep of the listener between looks, in microseconds.
    telemetry : bool
        Measure transfers, for `Agent.get_xfer_telemetry`.
    """

    progress_thread: bool = True
    listen_thread: bool = False
    listen_port: int = 0
    thread_sync: ThreadSync = ThreadSync.NONE
    progress_delay_us: int = 1000
    listen_delay_us: int = 100_000
    telemetry: bool = False

    def __post_init__(self) -> None:
        limits = {"listen_port": 1 << 16, "progress_delay_us": 1 << 64, "listen_delay_us": 1 << 64}
        for name, limit in limits.items():
            _int_below(name, getattr(self, name), limit)
        if self.thread_sync not in tuple(ThreadSync):
            raise ConfigError(f"thread_sync is {self.thread_sync!r}; it must be a ThreadSync")


# ---- arguments


def _memory_type(value: MemoryType | str) -> MemoryType:
    if isinstance(value, str):
        name = value.upper()
        name = _MEMORY_ALIASES.get(name, name)
        if name in MemoryType.__members__:
            return MemoryType[name]
    elif isinstance(value, MemoryType):
        return value
    raise ConfigError(
        f"{value!r} is not a memory type; it must be one of "
        f"{', '.join([*MemoryType.__members__, *_MEMORY_ALIASES])}"
    )


def _operation(value: Operation | str) -> Operation:
    if isinstance(value, str):
        if value.upper() in Operation.__members__:
            return Operation[value.upper()]
    elif isinstance(value, Operation):
        return value
    raise ConfigError(f"{value!r} is not an operation; it must be READ or WRITE")


def _integers(value: ArrayLike, what: str) -> NDArray[np.integer]:
    """Return an argument as an integer array; never rounds, never takes a bool for a number."""
    if not isinstance(value, list | tuple):
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(f"{what} have dtype {array.dtype}; they must be integers")
        return array
    # numpy would turn a list with large and small numbers into floats, and True into 1.
    items = np.array(value, dtype=object)
    is_signed = any(isinstance(item, int) and item < 0 for item in items.flat)
    dtype = np.int64 if is_signed else np.uint64
    limits = np.iinfo(dtype)
    for position, item in np.ndenumerate(items):
        is_integer = isinstance(item, int | np.integer) and not isinstance(item, bool)
        if not is_integer or not limits.min <= item <= limits.max:
            where = position[0] if len(position) == 1 else position
            raise ConfigError(
                f"{what} at position {where} are {item!r}; they must be integers up to {limits.max}"
            )
    return items.astype(dtype)


def _rows(value: ArrayLike, what: str) -> Rows:
    """Return descriptors as a C-contiguous (n, 3) uint64 array; copies only if they are not."""
    array = _integers(value, f"{what} descriptors")
    if array.size == 0:
        return _NO_ROWS
    if array.ndim != 2 or array.shape[1] != 3:
        raise ConfigError(
            f"{what} descriptors have shape {array.shape}; it must be (n, 3): address, length in "
            "bytes, device"
        )
    if array.dtype != np.uint64 and int(array.min()) < 0:
        position, column = (int(i) for i in np.argwhere(array < 0)[0])
        name = ("address", "length", "device")[column]
        raise ConfigError(
            f"{what} descriptor {position} has the {name} {array[position, column]}; it must not "
            "be negative"
        )
    return np.ascontiguousarray(array, dtype=np.uint64)


def _indices(value: ArrayLike, what: str, limit: int) -> Indices:
    """Return indices as a C-contiguous int32 array; copies only if they are not."""
    array = _integers(value, f"{what} indices")
    if array.ndim != 1:
        raise ConfigError(f"{what} indices have shape {array.shape}; it must have one dimension")
    # int32 goes through as it is: the native side checks it against the list.
    if array.dtype != np.int32 and array.size:
        wrong = (array < 0) | (array > _INT32.max)
        if wrong.any():
            position = int(wrong.argmax())
            raise ConfigError(
                f"{what} index {array[position]} at position {position} is out of range; the list "
                f"has {limit} descriptors"
            )
    return np.ascontiguousarray(array, dtype=np.int32)


def _metadata(value: Sequence[str | bytes]) -> list[bytes]:
    return [item.encode() if isinstance(item, str) else bytes(item) for item in value]


def _seconds(value: float | None) -> float:
    if value is None:
        return float("inf")
    if not value >= 0:
        raise ConfigError(f"timeout is {value!r}; it must be a number of seconds, 0 or more")
    return float(value)


# ---- owners


class Backend:
    """A transport or storage engine of an agent; made by `Agent.create_backend`."""

    def __init__(self, agent_name: AgentName, native: _native.nixl.Backend) -> None:
        self._agent_name = agent_name  # not the agent, which holds this
        self._native = native

    @property
    def type(self) -> str:
        """Name of its plugin; empty where NIXL does not tell which backend it chose."""
        return self._native.type

    def __repr__(self) -> str:
        return f"<Backend {self.type or '(unnamed)'} of agent {self._agent_name!r}>"


class _Owner(Closeable):
    """What registrations, prepared lists and requests have in common: an agent and one release."""

    _agent: Agent

    @property
    def agent(self) -> Agent:
        """The agent that made it."""
        return self._agent

    @property
    def closed(self) -> bool:
        """Whether it was released, or its agent closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Release it; a second call does nothing."""
        raise NotImplementedError

    def __del__(self) -> None:
        # Without an agent the object was never finished; at exit there is nobody to warn.
        agent = getattr(self, "_agent", None)
        if agent is None or sys.is_finalizing():
            return
        if agent.in_this_process and not self.closed:
            warnings.warn(f"unreleased {self!r}", ResourceWarning, stacklevel=1, source=self)


class Registration(_Owner):
    """Registered memory; made by `Agent.register_mem` and `Agent.register_buffers`.

    Closing it deregisters the memory. So does dropping it, with a `ResourceWarning`.
    """

    def __init__(
        self,
        agent: Agent,
        native: _native.nixl.Registration,
        memory_type: MemoryType,
        descriptors: Rows,
    ) -> None:
        self._native = native
        self._memory_type = memory_type
        self._descriptors = descriptors
        self._agent = agent

    @property
    def memory_type(self) -> MemoryType:
        """Kind of memory."""
        return self._memory_type

    @property
    def descriptors(self) -> Rows:
        """Return what was registered, as (n, 3) uint64: address, length in bytes, device."""
        return self._descriptors

    @property
    def num_users(self) -> int:
        """Prepared lists and requests that use the memory and forbid to deregister it."""
        return self._native.num_users

    @property
    def closed(self) -> bool:
        """Whether the memory was deregistered."""
        return not self._native.is_active or self._agent.closed

    def close(self) -> None:
        """Deregister the memory; a second call does nothing.

        Raises
        ------
        RegistrationInUseError
            While prepared lists or requests use the memory.
        NixlError
            If NIXL refuses; the memory stays registered.

        Notes
        -----
        Over TCP and same-host copies a peer that knows the memory can still read and write it.
        Do not free or reuse it before the peers have been told to stop.
        """
        if not self.closed:
            self._native.release()

    def __repr__(self) -> str:
        state = "deregistered" if self.closed else "registered"
        num_bytes = int(self._descriptors[:, 1].sum())
        return (
            f"<Registration of {num_bytes} bytes {self._memory_type.name} in "
            f"{len(self._descriptors)} descriptors with agent {self._agent.name!r}, {state}>"
        )


class PreparedList(_Owner):
    """Descriptors that NIXL has prepared; made by `Agent.prep_xfer_dlist`."""

    def __init__(self, agent: Agent, native: _native.nixl.PreparedList) -> None:
        self._native = native
        self._agent = agent

    def __len__(self) -> int:
        return len(self._native)

    @property
    def peer(self) -> AgentName | None:
        """Agent whose memory it is; None for the agent's own side."""
        return AgentName(self._native.peer) if self._native.peer else None

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._native.is_released or self._agent.closed

    def close(self) -> None:
        """Release it; a second call does nothing.

        Raises
        ------
        StateError
            While requests made from it are not released.
        """
        if not self.closed:
            self._native.release()

    def __repr__(self) -> str:
        side = f"peer {self.peer!r}" if self.peer else "the local side"
        state = "released" if self.closed else "ready"
        return (
            f"<PreparedList of {len(self)} descriptors for {side} with agent "
            f"{self._agent.name!r}, {state}>"
        )


class Request(_Owner):
    """One transfer; made by `Agent.make_xfer_req` and `Agent.create_xfer_req`."""

    def __init__(self, agent: Agent, native: _native.nixl.Request) -> None:
        self._native = native
        self._agent = agent

    @property
    def state(self) -> RequestState:
        """State as of the last call; does not poll."""
        return RequestState(self._native.state)

    @property
    def peer(self) -> AgentName:
        """The other side."""
        return AgentName(self._native.peer)

    @property
    def operation(self) -> Operation:
        """Direction."""
        return Operation(self._native.operation)

    @property
    def num_descriptors(self) -> int:
        """Descriptors as given, before NIXL merged any."""
        return self._native.num_descriptors

    @property
    def num_bytes(self) -> int:
        """Bytes that one post moves."""
        return self._native.num_bytes

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._native.state == RequestState.RELEASED or self._agent.closed

    def close(self, timeout: float = 0.0) -> None:
        """Release it as `Agent.release_xfer_req` does; a second call does nothing."""
        if not self.closed:
            self._native.release(_seconds(timeout))

    def __repr__(self) -> str:
        return (
            f"<Request {self.operation.name} of {self.num_bytes} bytes in {self.num_descriptors} "
            f"descriptors, agent {self._agent.name!r}, peer {self.peer!r}, {self.state.name}>"
        )


class Agent(Closeable):
    """A NIXL agent.

    Parameters
    ----------
    name : str
        Not empty, and unique among the agents that talk to each other.
    config : AgentConfig, optional
        Progress, locking and telemetry.

    Raises
    ------
    LibraryNotFoundError, LibraryVersionError
        If NIXL is not installed, too old, or a stub.
    ConfigError
        For a bad name.
    NixlError
        If NIXL refuses.

    Notes
    -----
    Safe from several threads. Every method that can block or take a lock releases the GIL. After a
    fork only the parent may use it; make agents after the fork.

    NIXL has no cancel and no timeouts. A request that is given up while it runs is *parked* on the
    agent, with all memory that it uses kept alive, and freed once it is quiet.
    """

    def __init__(self, name: str, config: AgentConfig | None = None) -> None:
        self._children: weakref.WeakSet[_Owner] = weakref.WeakSet()
        self._backends: list[Backend] = []
        self._config = config if config is not None else AgentConfig()
        if not isinstance(name, str):
            raise ConfigError(f"the name of an agent is {name!r}; it must be a str")
        self._native = _native.nixl.Agent(load_nixl(), name, **asdict(self._config))

    # ---- life

    @property
    def name(self) -> AgentName:
        """Its name."""
        return AgentName(self._native.name)

    @property
    def config(self) -> AgentConfig:
        """Its configuration."""
        return self._config

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native.is_closed

    @property
    def in_this_process(self) -> bool:
        """False in a forked child of the process that made it."""
        return self._native.is_here

    @property
    def num_parked(self) -> int:
        """Requests that were given up while running and are not quiet yet."""
        return self._native.num_parked

    def close(self, timeout: float = 5.0) -> bool:
        """Release everything that the agent made, and the agent; a second call does nothing.

        Parameters
        ----------
        timeout : float
            Seconds to wait for requests that are running.

        Returns
        -------
        bool
            False if requests were still running. The native agent is then abandoned with all of
            its memory, and a `ResourceWarning` says so: destroying it could write to freed memory
            here and abort the peer's process.

        Notes
        -----
        Blocks up to the timeout. In a forked child it only forgets the agent.
        """
        if self.closed:
            return self._native.num_parked == 0
        if not self.in_this_process:
            return self._native.close(0.0)
        deadline = time.monotonic() + _seconds(timeout)
        children = list(self._children)
        for kind in (Request, PreparedList, Registration):
            for child in children:
                if isinstance(child, kind):
                    if isinstance(child, Request):
                        child.close(max(0.0, deadline - time.monotonic()))
                    else:
                        child.close()
            left = self._native.drain(max(0.0, deadline - time.monotonic()))
            if left:
                self._native.close(0.0)
                warnings.warn(
                    f"agent {self.name!r} was closed with {left} requests running; it and its "
                    "memory are kept for the life of the process",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
                return False
        return self._native.close(0.0)

    def __del__(self) -> None:
        native = getattr(self, "_native", None)
        if native is None or sys.is_finalizing():
            return
        if native.is_here and not native.is_closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        parked = f", {self.num_parked} requests parked" if self.num_parked else ""
        return f"<Agent {self.name!r}, {'closed' if self.closed else 'open'}{parked}>"

    # ---- plugins and backends

    def get_available_plugins(self) -> list[str]:
        """Return the names of the plugins that NIXL knows; not all need to load here."""
        return self._native.available_plugins()

    def get_plugin_params(self, plugin: str) -> PluginParams:
        """Return memory types and default parameters of a plugin.

        Raises
        ------
        NixlError
            If the plugin cannot be loaded.
        """
        return _params(self._native.plugin_info(plugin))

    def create_backend(self, plugin: str, params: Mapping[str, str] | None = None) -> Backend:
        """Create a backend; one of each type per agent.

        Parameters
        ----------
        plugin : str
            ``"UCX"`` and so on.
        params : mapping of str to str, optional
            Parameters other than the defaults.

        Raises
        ------
        StateError
            If the agent has one of that type.
        NixlError
            If NIXL cannot create it, for example because of ``UCX_TLS``.
        """
        backend = Backend(self.name, self._native.create_backend(plugin, dict(params or {})))
        self._backends.append(backend)
        return backend

    def get_backend_params(self, backend: Backend) -> PluginParams:
        """Return memory types and parameters of a backend."""
        return _params(self._native.backend_info(backend._native))

    # ---- memory

    def register_mem(
        self,
        descriptors: ArrayLike,
        memory_type: MemoryType | str = MemoryType.DRAM,
        *,
        metadata: Sequence[str | bytes] = (),
        keepalive: object = None,
        backends: Sequence[Backend] = (),
    ) -> Registration:
        """Register memory given by its addresses.

        Parameters
        ----------
        descriptors : array_like of int, shape (n, 3)
            Address, length in bytes, device. For files and objects: offset, length, file
            descriptor or key; offset 0 and length 0 for the whole of it.
        memory_type : MemoryType or str
            Kind of memory.
        metadata : sequence of str or bytes
            What the backend needs to know of each descriptor (a file name, an object key); empty
            or one for each.
        keepalive : object
            Kept until the memory is deregistered.
        backends : sequence of Backend
            Register with these only.

        Raises
        ------
        AlreadyRegisteredError
            If a descriptor is registered or given twice.
        ConfigError
            For bad shapes, memory of no length, unknown memory types, backends of another agent.
        NixlError
            If no backend takes the memory.

        Notes
        -----
        Register few large regions: each costs every peer something when it connects.
        """
        memory = _memory_type(memory_type)
        rows = _rows(descriptors, "registered").copy()
        rows.flags.writeable = False
        native = self._native.register_memory(
            memory, rows, _metadata(metadata), keepalive, _natives(backends)
        )
        return self._adopt(Registration(self, native, memory, rows))

    def register_buffers(self, *buffers: object, backends: Sequence[Backend] = ()) -> Registration:
        """Register the memory of arrays and tensors, without copying, and keep them alive.

        Parameters
        ----------
        *buffers : object
            numpy arrays, torch tensors, objects with the buffer protocol or DLPack, and
            `MemorySpan`; all in the same kind of memory, writable, contiguous and not empty.
        backends : sequence of Backend
            Register with these only.

        Raises
        ------
        ConfigError
            For anything else; says what was seen.
        AlreadyRegisteredError
            If the memory is registered.
        NixlError
            If no backend takes the memory.
        """
        if not buffers:
            raise ConfigError("register_buffers needs at least one buffer")
        spans = [b if isinstance(b, MemorySpan) else _native.ArrayMemory(b) for b in buffers]
        kinds = {MemoryType(span.memory) for span in spans}
        if len(kinds) != 1:
            names = sorted(kind.name for kind in kinds)
            raise ConfigError(f"buffers of {' and '.join(names)} cannot share a registration")
        (memory,) = kinds
        if memory is MemoryType.VRAM:
            self._require_vram(backends)
        rows = np.array([(s.address, s.nbytes, s.device) for s in spans], dtype=np.uint64)
        return self.register_mem(rows, memory, keepalive=spans, backends=backends)

    def deregister_mem(self, registration: Registration) -> None:
        """Deregister memory.

        Raises
        ------
        ClosedError
            If it was deregistered before.
        RegistrationInUseError
            While prepared lists or requests use it.
        ConfigError
            If another agent registered it.
        """
        self._require_ours(registration)
        registration._native.release()

    def query_mem(
        self,
        descriptors: ArrayLike,
        memory_type: MemoryType | str,
        *,
        metadata: Sequence[str | bytes] = (),
        backends: Sequence[Backend] = (),
    ) -> list[dict[str, str] | None]:
        """Ask a storage backend whether files or objects exist.

        Parameters
        ----------
        descriptors, memory_type, metadata
            As for `register_mem`; lengths may be zero.
        backends : sequence of Backend
            The one to ask; may be empty if the agent has only one.

        Returns
        -------
        list of dict or None
            One per descriptor; None for what does not exist.
        """
        return self._native.query_memory(
            _memory_type(memory_type),
            _rows(descriptors, "queried"),
            _metadata(metadata),
            _natives(backends or self._backends),
        )

    # ---- metadata

    def get_local_md(self) -> bytes:
        """Return what a peer must load to reach this agent and its registered memory."""
        return self._native.local_metadata()

    def get_local_partial_md(
        self,
        descriptors: ArrayLike = (),
        memory_type: MemoryType | str = MemoryType.DRAM,
        *,
        backends: Sequence[Backend] = (),
    ) -> bytes:
        """Return the metadata of some registered descriptors.

        Parameters
        ----------
        descriptors : array_like of int, shape (n, 3)
            Exactly as they were registered. If empty, the metadata of the connection alone; the
            metadata of memory does not contain that, so a peer needs both.
        memory_type : MemoryType or str
            Their kind.
        backends : sequence of Backend
            For these only.
        """
        return self._native.local_partial_metadata(
            _memory_type(memory_type), _rows(descriptors, "local"), _natives(backends)
        )

    def load_remote_md(self, metadata: bytes) -> AgentName:
        """Load a peer's metadata and return its name.

        Parameters
        ----------
        metadata : bytes
            **Verified** bytes of a peer's `get_local_md`. This is the native verb: NIXL aborts the
            process on some damaged bytes and silently accepts others. Bytes from a network belong
            into a checksummed and authenticated envelope first.

        Raises
        ------
        NixlError
            If NIXL refuses: damaged, this agent's own metadata, or another agent of a name that is
            loaded already (`invalidate_remote_md` comes first).

        Notes
        -----
        Loading more metadata of a loaded peer adds its memory; handles made before stay valid.
        """
        if not isinstance(metadata, bytes | bytearray | memoryview):
            raise ConfigError(f"metadata is a {type(metadata).__name__}; it must be bytes")
        return AgentName(self._native.load_remote_metadata(bytes(metadata)))

    def check_remote_md(
        self,
        peer: str,
        descriptors: ArrayLike = (),
        memory_type: MemoryType | str = MemoryType.DRAM,
    ) -> bool:
        """Say whether a peer is loaded and its metadata covers the descriptors."""
        return self._native.check_remote_metadata(
            peer, _memory_type(memory_type), _rows(descriptors, "remote")
        )

    def invalidate_remote_md(self, peer: str) -> None:
        """Forget a peer and its connection.

        Lists and requests made for it become stale and raise `StalePeerError` when they are used;
        they still have to be released. Load its metadata again for a new connection.

        Raises
        ------
        UnknownPeerError
            If the peer is not loaded.
        """
        self._native.invalidate_remote_metadata(peer)

    def send_local_md(self, ip: str = "", port: int = 0) -> None:
        """Send the metadata to another agent's listener, or to the metadata server.

        Parameters
        ----------
        ip : str
            Address of the listener; if empty, the server that NIXL's environment names.
        port : int
            Its port; 0 for NIXL's default.

        Notes
        -----
        Returns before anything is sent. NIXL loads what a listener receives without verifying it:
        use this only on a network where everybody is trusted.
        """
        self._native.send_local_metadata(ip, _int_below("port", port, 1 << 16))

    def send_local_partial_md(
        self,
        descriptors: ArrayLike = (),
        memory_type: MemoryType | str = MemoryType.DRAM,
        ip: str = "",
        port: int = 0,
        *,
        backends: Sequence[Backend] = (),
    ) -> None:
        """Send what `get_local_partial_md` returns as `send_local_md` does."""
        self._native.send_local_partial_metadata(
            _memory_type(memory_type),
            _rows(descriptors, "local"),
            ip,
            _int_below("port", port, 1 << 16),
            _natives(backends),
        )

    def fetch_remote_md(self, peer: str, ip: str = "", port: int = 0) -> None:
        """Ask for a peer's metadata; poll `check_remote_md` to see it arrive.

        Parameters
        ----------
        peer : str
            Its name.
        ip, port
            As for `send_local_md`.
        """
        self._native.fetch_remote_metadata(peer, ip, _int_below("port", port, 1 << 16))

    def invalidate_local_md(self, ip: str = "", port: int = 0) -> None:
        """Withdraw the metadata from another agent's listener or the metadata server."""
        self._native.invalidate_local_metadata(ip, _int_below("port", port, 1 << 16))

    def make_connection(self, peer: str, *, backends: Sequence[Backend] = ()) -> None:
        """Connect ahead of the first transfer. Success does not mean that the peer is alive.

        Raises
        ------
        UnknownPeerError
            If the peer's metadata is not loaded.
        """
        self._native.make_connection(peer, _natives(backends))

    # ---- transfers

    def prep_xfer_dlist(
        self,
        peer: str | None,
        descriptors: ArrayLike,
        memory_type: MemoryType | str = MemoryType.DRAM,
        *,
        backends: Sequence[Backend] = (),
    ) -> PreparedList:
        """Prepare descriptors, for requests that choose from them by index.

        Parameters
        ----------
        peer : str or None
            Agent whose memory it is; None for this agent's own side.
        descriptors : array_like of int, shape (n, 3)
            Address, length in bytes, device. In address order NIXL stores and looks them up best.
        memory_type : MemoryType or str
            Their kind.
        backends : sequence of Backend
            For these only.

        Raises
        ------
        NotRegisteredError
            If a descriptor is not wholly inside registered memory; names it.
        UnknownPeerError
            If the peer is not loaded.
        ConfigError
            For bad shapes and lengths of zero.
        """
        native = self._native.prepare(
            peer or "",
            _memory_type(memory_type),
            _rows(descriptors, "remote" if peer else "local"),
            _natives(backends),
        )
        return self._adopt(PreparedList(self, native))

    def release_dlist_handle(self, prepared: PreparedList) -> None:
        """Release a prepared list.

        Raises
        ------
        ClosedError
            If it was released before.
        StateError
            While requests made from it are not released.
        """
        self._require_ours(prepared)
        prepared._native.release()

    def make_xfer_req(
        self,
        operation: Operation | str,
        local: PreparedList,
        local_indices: ArrayLike,
        remote: PreparedList,
        remote_indices: ArrayLike,
        *,
        notification: bytes | None = None,
        skip_merge: bool = False,
        custom_param: str = "",
        backends: Sequence[Backend] = (),
    ) -> Request:
        """Make a request from prepared lists.

        Parameters
        ----------
        operation : Operation or str
            READ is remote to local.
        local : PreparedList
            List of this side.
        local_indices : array_like of int, shape (n,)
            Descriptors to move, by their place in the list; int32 arrays are not copied.
        remote : PreparedList
            List of the peer's side.
        remote_indices : array_like of int, shape (n,)
            What they are paired with, of equal lengths; int32 arrays are not copied.
        notification : bytes, optional
            Delivered to the peer after the last byte.
        skip_merge : bool
            Do not let NIXL merge neighbours.
        custom_param : str
            Text for the backend (NIXL 1.5 or newer).
        backends : sequence of Backend
            Choose from these only.

        Raises
        ------
        ConfigError
            For an index out of range and for lengths that differ; names position and values.
        StalePeerError
            If the peer was invalidated after the list was prepared.
        ClosedError
            If a list was released.
        """
        self._require_ours(local)
        self._require_ours(remote)
        native = self._native.make_request(
            _operation(operation),
            local._native,
            _indices(local_indices, "local", len(local)),
            remote._native,
            _indices(remote_indices, "remote", len(remote)),
            notification,
            skip_merge,
            custom_param,
            _natives(backends),
        )
        return self._adopt(Request(self, native))

    def create_xfer_req(
        self,
        operation: Operation | str,
        local: ArrayLike,
        remote: ArrayLike,
        peer: str,
        *,
        local_memory: MemoryType | str = MemoryType.DRAM,
        remote_memory: MemoryType | str = MemoryType.DRAM,
        notification: bytes | None = None,
        custom_param: str = "",
        backends: Sequence[Backend] = (),
    ) -> Request:
        """Make a request from descriptors. NIXL does not merge neighbours of these.

        Parameters
        ----------
        operation : Operation or str
            READ is remote to local.
        local, remote : array_like of int, shape (n, 3)
            Address, length in bytes, device; row i of one side pairs with row i of the other.
        peer : str
            The other side; may be this agent itself.
        local_memory, remote_memory : MemoryType or str
            Kinds of memory.
        notification, custom_param, backends
            As for `make_xfer_req`.

        Raises
        ------
        ConfigError
            For bad shapes, lengths of zero, and sides that differ; names position and values.
        NotRegisteredError
            If a descriptor is not wholly inside registered memory; names it.
        UnknownPeerError
            If the peer is not loaded.
        """
        native = self._native.create_request(
            _operation(operation),
            _memory_type(local_memory),
            _rows(local, "local"),
            _memory_type(remote_memory),
            _rows(remote, "remote"),
            peer,
            notification,
            custom_param,
            _natives(backends),
        )
        return self._adopt(Request(self, native))

    def post_xfer_req(self, request: Request, notification: bytes | None = None) -> RequestState:
        """Start a transfer, or start it again after its end.

        Parameters
        ----------
        request : Request
            A request that is not running.
        notification : bytes, optional
            Instead of the one given when the request was made.

        Returns
        -------
        RequestState
            PENDING or DONE.

        Raises
        ------
        StateError
            While it is running.
        StalePeerError
            If the peer was invalidated.
        ClosedError
            If it was released.
        NixlError
            If the transfer failed at once; `NixlBackendError` usually means a lost connection.

        Notes
        -----
        Blocks, without the GIL, for as long as the backend takes: between processes of one host
        that is the whole copy.
        """
        self._require_ours(request)
        return RequestState(request._native.post(notification))

    def get_xfer_status(self, request: Request) -> RequestState:
        """Poll a transfer.

        Returns
        -------
        RequestState
            NOT_POSTED, PENDING or DONE.

        Raises
        ------
        NixlError
            If the transfer failed; so does every further call.
        ClosedError
            If it was released.
        """
        self._require_ours(request)
        return RequestState(request._native.poll())

    def release_xfer_req(self, request: Request, timeout: float = 0.0) -> bool:
        """Release a request.

        Parameters
        ----------
        request : Request
            In any state.
        timeout : float
            Seconds to wait for one that is running.

        Returns
        -------
        bool
            False if it was still running and has been parked: its bytes may still move, and its
            memory cannot be deregistered yet.

        Raises
        ------
        ClosedError
            If it was released before.
        """
        self._require_ours(request)
        return request._native.release(_seconds(timeout))

    def query_xfer_backend(self, request: Request) -> Backend:
        """Return the backend that NIXL chose."""
        self._require_ours(request)
        native = request._native.backend()
        return next(
            (b for b in self._backends if b.type == native.type), Backend(self.name, native)
        )

    def estimate_xfer_cost(self, request: Request) -> TransferCost:
        """Return NIXL's estimate of how long a request takes; works before it is posted."""
        self._require_ours(request)
        return TransferCost(*request._native.estimate_cost())

    def get_xfer_telemetry(self, request: Request) -> TransferTelemetry:
        """Return what NIXL measured of a transfer.

        Raises
        ------
        StateError
            Unless it is done.
        NixlTelemetryError
            If the agent was made without telemetry.
        """
        self._require_ours(request)
        return TransferTelemetry(*request._native.telemetry())

    # ---- notifications

    def gen_notif(self, peer: str, message: bytes, *, backends: Sequence[Backend] = ()) -> None:
        """Send a notification by itself. Returning means queued, not delivered.

        Raises
        ------
        UnknownPeerError
            If the peer is not loaded.
        NixlBackendError
            If the connection is known to be lost.
        """
        if not isinstance(message, bytes):
            raise ConfigError(f"the message is a {type(message).__name__}; it must be bytes")
        self._native.notify(peer, message, _natives(backends))

    def get_notifs(self, *, backends: Sequence[Backend] = ()) -> list[Notification]:
        """Take the notifications that have arrived, each once, in order for each sender.

        Notes
        -----
        Without a progress thread this is what serves the peers' traffic: call it often.
        """
        taken = self._native.take_notifications(_natives(backends))
        return [Notification(AgentName(peer), message) for peer, message in taken]

    # ---- private

    def _adopt(self, child: _OwnerType) -> _OwnerType:
        self._children.add(child)
        return child

    def _require_ours(self, child: _Owner) -> None:
        if child._agent is not self:
            raise ConfigError(f"{child!r} was made by another agent than {self.name!r}")

    def _require_vram(self, backends: Sequence[Backend]) -> None:
        if self.closed:
            raise ClosedError(f"{self!r}")
        for backend in backends or self._backends:
            if MemoryType.VRAM in self.get_backend_params(backend).memory_types:
                return
        raise ConfigError(
            f"a CUDA tensor cannot be registered: agent {self.name!r} has no backend for VRAM "
            f"(backends: {[b.type for b in backends or self._backends]})"
        )


def _natives(backends: Sequence[Backend]) -> list[_native.nixl.Backend]:
    return [backend._native for backend in backends]


def _params(info: tuple[list[int], dict[str, str]]) -> PluginParams:
    memory_types, params = info
    return PluginParams(tuple(MemoryType(m) for m in memory_types), params)
