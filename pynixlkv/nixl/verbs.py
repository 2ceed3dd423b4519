"""NIXL's verbs in snake_case, with owners instead of handles.

Names and meaning follow NIXL's native API. What is added makes them safe: arguments are checked
before NIXL sees them, owners keep their agent and their memory alive, and a request that is given
up while it runs is quarantined until its bytes have stopped moving.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pynixlkv import _native
from pynixlkv._arrays import first_outside, integers
from pynixlkv._closeable import Closeable
from pynixlkv._loader import load_nixl
from pynixlkv.errors import ClosedError, ConfigError
from pynixlkv.nixl._enums import ThreadSync
from pynixlkv.types import AgentName, MemorySpan, MemoryType

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from pynixlkv._native.nixl import Backend, PreparedList, Registration, XferRequest
    from pynixlkv.types import Operation


class Notification(NamedTuple):
    """A message from another agent: the name of the sender, and exactly what it sent."""

    peer: AgentName
    message: bytes


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
        Locking inside NIXL. The agent may be used from several threads with each of them.
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
        _int_below("listen_port", self.listen_port, 1 << 16)
        _int_below("progress_delay_us", self.progress_delay_us, 1 << 64)
        _int_below("listen_delay_us", self.listen_delay_us, 1 << 64)
        if self.thread_sync not in tuple(ThreadSync):
            raise ConfigError(f"thread_sync is {self.thread_sync!r}; it must be a ThreadSync")


def _int_below(name: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise ConfigError(f"{name} is {value!r}; it must be an int from 0 to {limit - 1}")
    return value


def _bytes(name: str, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be bytes")
    return bytes(value)


def _blobs(metadata: Iterable[str | bytes]) -> list[bytes]:
    return [item.encode() if isinstance(item, str) else bytes(item) for item in metadata]


def _rows(what: str, value: ArrayLike) -> NDArray[np.uint64]:
    """Return descriptors as a C-contiguous (n, 3) uint64 array; copies only if they are not."""
    array = integers(f"{what} descriptors", value, ConfigError, columns=3)
    wrong = first_outside(array, 0, 2**64 - 1)
    if wrong is not None:
        raise ConfigError(
            f"{what} descriptor {wrong[0]} has the {('address', 'length', 'device')[wrong[1]]} "
            f"{array[wrong]}; it must not be negative"
        )
    return np.ascontiguousarray(array, dtype=np.uint64)


def _indices(what: str, value: ArrayLike, limit: int) -> NDArray[np.int32]:
    """Return indices as a C-contiguous int32 array; copies only if they are not."""
    array = integers(f"{what} indices", value, ConfigError)
    # int32 goes through as it is: the native side checks it against the list.
    wrong = first_outside(array, 0, 2**31 - 1) if array.dtype != np.int32 else None
    if wrong is not None:
        raise ConfigError(
            f"{what} index {array[wrong]} at position {wrong[0]} is out of range; the list has "
            f"{limit} descriptors"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


class Agent(_native.nixl.NativeAgent, Closeable):
    """A NIXL agent.

    Parameters
    ----------
    name : str
        Not empty, and unique among the agents that talk to each other.
    config : AgentConfig, optional
        Progress, locking and telemetry.

    Notes
    -----
    Safe from several threads. Every method that can block or take a lock releases the GIL. After a
    fork only the parent may use it; make agents after the fork.

    NIXL has no cancel and no timeouts. A request that is given up while it runs is *quarantined*,
    with all memory that it uses kept alive, and freed once it is quiet.
    """

    def __init__(self, name: str, config: AgentConfig | None = None) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"the name of an agent is {name!r}; it must be a str")
        super().__init__(load_nixl(), name, **asdict(config or AgentConfig()))
        self._is_made = True

    # ---- life

    def close(self, timeout: float = 5.0) -> bool:
        """Release everything that the agent made, and the agent; a second call does nothing.

        Waits up to `timeout` seconds for requests that are running. False if some still were: the
        native agent is then abandoned with all of its memory, and a `ResourceWarning` says so.
        Destroying it could write to freed memory here and abort the peer's process.
        """
        if self.is_closed or not self.is_here:
            return self._end(0.0)
        if not timeout >= 0:
            raise ConfigError(f"timeout is {timeout!r}; it must be a number of seconds, 0 or more")
        if self._end(timeout):
            return True
        warnings.warn(
            f"agent {self.name!r} was closed with {self.num_quarantined} requests running; it and "
            "its memory are kept for the life of the process",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
        return False

    def __del__(self) -> None:
        if not hasattr(self, "_is_made") or sys.is_finalizing():
            return
        if self.is_here and not self.is_closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        running = f", {self.num_quarantined} requests quarantined" if self.num_quarantined else ""
        return f"<Agent {self.name!r}, {'closed' if self.is_closed else 'open'}{running}>"

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
        """Register memory given by its addresses; few large regions cost the peers least.

        A descriptor is address, length in bytes, device; for files and objects, it is offset,
        length, file descriptor or key, with offset 0 and length 0 for the whole of it. `metadata`
        is empty or has for each descriptor what the backend needs to know (a file name, an object
        key). `keepalive` is held until the memory is deregistered.
        """
        rows = _rows("registered", descriptors)
        return self._register_mem(rows, memory_type, _blobs(metadata), keepalive, backends)

    def register_buffers(self, *buffers: object, backends: Sequence[Backend] = ()) -> Registration:
        """Register the memory of arrays and tensors, without copying, and keep them alive.

        Takes numpy arrays, torch tensors, objects with the buffer protocol or DLPack, and
        `MemorySpan`; all in the same kind of memory, writable, contiguous and not empty.
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
            self._require_vram(backends or self.backends)
        rows = np.array([(s.address, s.nbytes, s.device) for s in spans], dtype=np.uint64)
        return self._register_mem(rows, memory, (), spans, backends)

    def _require_vram(self, backends: Sequence[Backend]) -> None:
        if self.is_closed:
            raise ClosedError(f"{self!r}")
        if all(MemoryType.VRAM not in self.get_backend_params(b).memory_types for b in backends):
            raise ConfigError(
                f"a CUDA tensor cannot be registered: agent {self.name!r} has no backend for VRAM "
                f"(backends: {[b.type for b in backends]})"
            )

    def query_mem(
        self,
        descriptors: ArrayLike,
        memory_type: MemoryType | str,
        *,
        metadata: Sequence[str | bytes] = (),
        backends: Sequence[Backend] = (),
    ) -> list[dict[str, str] | None]:
        """Ask a storage backend about files or objects; None for those that do not exist.

        Takes what `register_mem` takes. The backend may be left out if the agent has only one.
        """
        rows = _rows("queried", descriptors)
        return self._query_mem(rows, memory_type, _blobs(metadata), backends or self.backends)

    # ---- metadata

    def get_local_partial_md(
        self,
        descriptors: ArrayLike = (),
        memory_type: MemoryType | str = MemoryType.DRAM,
        *,
        backends: Sequence[Backend] = (),
    ) -> bytes:
        """Return the metadata of some descriptors, given exactly as they were registered.

        Without descriptors, the metadata of the connection alone; that of memory does not contain
        it, so a peer needs both.
        """
        return self._get_local_partial_md(_rows("local", descriptors), memory_type, backends)

    def load_remote_md(self, metadata: bytes) -> AgentName:
        """Load a peer's metadata and return its name; more metadata of a loaded peer adds memory.

        The bytes must be **verified**: NIXL aborts the process on some damaged ones and silently
        accepts others. Bytes from a network belong into a checksummed and authenticated envelope.
        Another agent of a name that is loaded needs `invalidate_remote_md` first.
        """
        return AgentName(self._load_remote_md(_bytes("metadata", metadata)))

    def check_remote_md(
        self,
        peer: str,
        descriptors: ArrayLike = (),
        memory_type: MemoryType | str = MemoryType.DRAM,
    ) -> bool:
        """Say whether a peer is loaded and its metadata covers the descriptors."""
        return self._check_remote_md(peer, _rows("remote", descriptors), memory_type)

    def send_local_md(self, ip: str = "", port: int = 0) -> None:
        """Send the metadata to another agent's listener; without `ip`, to the metadata server.

        Returns before anything is sent. Port 0 is NIXL's default. NIXL loads what a listener
        receives without verifying it: use this only on a network where everybody is trusted.
        """
        self._send_local_md(ip, _int_below("port", port, 1 << 16))

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
        rows = _rows("local", descriptors)
        _int_below("port", port, 1 << 16)
        self._send_local_partial_md(rows, memory_type, ip, port, backends)

    def fetch_remote_md(self, peer: str, ip: str = "", port: int = 0) -> None:
        """Ask for a peer's metadata, as `send_local_md` sends it; poll `check_remote_md` for it."""
        self._fetch_remote_md(peer, ip, _int_below("port", port, 1 << 16))

    def invalidate_local_md(self, ip: str = "", port: int = 0) -> None:
        """Withdraw the metadata from another agent's listener or the metadata server."""
        self._invalidate_local_md(ip, _int_below("port", port, 1 << 16))

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

        `peer` is the agent whose memory it is, None for this agent's own side. NIXL stores and
        looks up descriptors best in address order.
        """
        rows = _rows("remote" if peer else "local", descriptors)
        return self._prep_xfer_dlist(peer or "", rows, memory_type, backends)

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
        backends: Sequence[Backend] = (),
    ) -> XferRequest:
        """Make a request from prepared lists; READ is remote to local.

        The indices choose pairs of descriptors of equal lengths; int32 arrays are not copied. The
        `notification` is delivered to the peer after the last byte. `skip_merge` keeps NIXL from
        merging neighbours.
        """
        try:
            return self._make_xfer_req(
                operation,
                local,
                local_indices,
                remote,
                remote_indices,
                notification,
                skip_merge,
                backends,
            )
        except TypeError:  # other forms of indices, and wrong ones
            return self._make_xfer_req(
                operation,
                local,
                _indices("local", local_indices, len(local)),
                remote,
                _indices("remote", remote_indices, len(remote)),
                notification,
                skip_merge,
                backends,
            )

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
        backends: Sequence[Backend] = (),
    ) -> XferRequest:
        """Make a request from descriptors. NIXL does not merge neighbours of these.

        Row i of one side pairs with row i of the other. `peer` may be this agent itself.
        """
        ours, theirs = _rows("local", local), _rows("remote", remote)
        return self._create_xfer_req(
            operation, ours, local_memory, theirs, remote_memory, peer, notification, backends
        )

    # ---- notifications

    def gen_notif(self, peer: str, message: bytes, *, backends: Sequence[Backend] = ()) -> None:
        """Send a notification by itself. Returning means queued, not delivered."""
        self._gen_notif(peer, _bytes("the message", message), backends)

    def get_notifs(self, *, backends: Sequence[Backend] = ()) -> list[Notification]:
        """Take the notifications that have arrived, each once, in order for each sender.

        Without a progress thread this is what serves the peers' traffic: call it often.
        """
        return [Notification(AgentName(p), message) for p, message in self._get_notifs(backends)]
