"""The thin binding: UCX's one-sided verbs, with owners instead of handles.

Each object keeps its parent alive: a `Request` its memory and keys, a `RemoteKey` its `Endpoint`,
an `Endpoint` its `Worker`, a `Worker` its `Context`. All calls release the GIL. How addresses and
keys travel between the processes is up to the caller.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from pynixlkv import _loader, _native, wire
from pynixlkv._closeable import Closeable
from pynixlkv.errors import ClosedError, ConfigError, ProtocolVersionError, StateError
from pynixlkv.types import MemoryType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pynixlkv._native.ucx import Request

_ADDRESS = "UCX worker address"
_KEY = "UCX remote key"


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker's address or a remote key; in an envelope, because UCX crashes on damaged ones."""

    ucx_version: str
    byte_order: str
    data: bytes
    address: int = 0  # of the memory of a key, as its length
    nbytes: int = 0


def _here() -> tuple[str, str]:
    return _loader.load_ucx().version, sys.byteorder


def _seal(what: str, data: bytes, *memory: int) -> bytes:
    return wire.seal(_Packed(*_here(), data, *memory), what)


def _unseal(what: str, data: object) -> _Packed:
    if not isinstance(data, bytes):
        raise ConfigError(f"a {what} must be bytes, not {type(data).__name__}")
    packed = wire.unseal(data, _Packed, what)
    version, byte_order = _here()
    local = f"UCX {version} on a {byte_order}-endian machine"
    remote = f"UCX {packed.ucx_version} on a {packed.byte_order}-endian machine"
    does_fit = packed.ucx_version.split(".")[:2] == version.split(".")[:2]
    if not does_fit or packed.byte_order != byte_order:
        raise ProtocolVersionError(
            f"a {what} is of {remote}, this side has {local}; the first two numbers of the version "
            "and the byte order must agree",
            local_version=local,
            remote_version=remote,
        )
    return packed


class Context:
    """An instance of UCX with its settings and devices. Thread-safe.

    Parameters
    ----------
    config : mapping of str to str, optional
        Settings, names without the prefix ``UCX_``; they override those of the environment.

    Raises
    ------
    LibraryNotFoundError, LibraryVersionError
        If UCX is not installed or too old.
    ConfigError
        If UCX rejects a setting.
    UcxError
        If UCX does not start.
    """

    def __init__(self, config: Mapping[str, str] | None = None) -> None:
        self._native = _native.ucx.Context(_loader.load_ucx(), dict(config or {}))

    @property
    def config(self) -> dict[str, str]:
        """The settings that it was given."""
        return self._native.config

    def map(self, memory: object) -> MemoryHandle:
        """Map memory of the caller, which local requests and peers with its key can then access.

        Parameters
        ----------
        memory : numpy array, torch tensor or other contiguous buffer
            Writable; kept alive until it is unmapped.

        Returns
        -------
        MemoryHandle
            Its owner.

        Raises
        ------
        ConfigError
            If it is empty, read-only, not contiguous, or of a kind that UCX does not move.
        UcxError
            If UCX refuses it.
        """
        buffer = _native.ArrayMemory(memory)
        kind = MemoryType(buffer.memory)
        if kind not in (MemoryType.DRAM, MemoryType.VRAM):
            raise ConfigError(f"UCX moves host and GPU memory, not {kind.name}")
        native = _native.ucx.Memory.map(
            self._native, buffer.address, buffer.nbytes, int(kind), buffer
        )
        return MemoryHandle(native, kind)

    def allocate(self, nbytes: int) -> MemoryHandle:
        """Let UCX allocate host memory, which other processes of this host can map.

        Raises `ConfigError` for less than one byte or more than are free, `UcxError` if UCX
        cannot allocate it.
        """
        if nbytes < 1:
            raise ConfigError(f"{nbytes} bytes cannot be allocated")
        native = _native.ucx.Memory.allocate(self._native, nbytes)
        return MemoryHandle(native, MemoryType.DRAM)


class MemoryHandle(Closeable):
    """Mapped memory; made by `Context.map` and `Context.allocate`."""

    def __init__(self, native: _native.ucx.Memory, kind: MemoryType) -> None:
        self._memory: _native.ucx.Memory | None = native
        self._kind = kind

    @property
    def _native(self) -> _native.ucx.Memory:
        if self._memory is None:
            raise ClosedError(f"{self!r} is closed")
        return self._memory

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._native.address

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._native.nbytes

    @property
    def buffer(self) -> memoryview:
        """Host memory as writable bytes; the view keeps it mapped."""
        if self._kind is not MemoryType.DRAM:
            raise StateError(f"{self._kind.name} memory cannot be viewed from the host")
        return self._native.view()

    def pack(self) -> bytes:
        """Return the key for a peer's `RemoteKey`; its holder can read and write the memory."""
        native = self._native
        return _seal(_KEY, native.pack(), native.address, native.nbytes)

    def close(self) -> None:
        """Unmap the memory once no request and no view uses it. Idempotent."""
        self._memory = None

    def __repr__(self) -> str:
        if self._memory is None:
            return "<MemoryHandle, closed>"
        return f"<MemoryHandle of {self.nbytes} bytes at {self.address:#x}>"


class Worker:
    """A progress engine. Threads may share it; they take turns.

    Raises `UcxError` if UCX refuses, for example because a transport of ``UCX_TLS`` offers no
    events.
    """

    def __init__(self, context: Context) -> None:
        self._native = _native.ucx.Worker(context._native)

    @property
    def address(self) -> bytes:
        """The address for a peer's `Endpoint`."""
        return _seal(_ADDRESS, self._native.address())

    @property
    def event_fd(self) -> int:
        """A file descriptor to poll after `arm` has returned True; the worker owns it."""
        return self._native.event_fd

    def progress(self) -> int:
        """Progress communication once and return the number of events; 0 if there were none."""
        return self._native.progress()

    def spin(self, seconds: float) -> None:
        """Progress communication without a pause for some time, for the lowest latency."""
        self._native.spin(seconds)

    def arm(self) -> bool:
        """Prepare to sleep on `event_fd`; False means that events wait: call `progress` first."""
        return self._native.arm()


class Endpoint(Closeable):
    """A connection to a peer's worker. Closes when it is dropped.

    Parameters
    ----------
    worker : Worker
        Of this side.
    address : bytes
        `Worker.address` of the other side. Damage is detected before UCX sees the bytes, forgery
        is not: take them from a channel that you trust.
    error_handling : bool
        Let UCX monitor the connection; both sides need the same. See Notes.

    Raises
    ------
    WireError
        If the address is damaged or not an address.
    ProtocolVersionError
        If it is of another UCX version or byte order.
    UcxError
        If no transport reaches the peer; the message names what to check.

    Notes
    -----
    Returns before the peer is reached; over TCP only with the setting ``TCP_CONN_NB=y``, otherwise
    UCX waits for the peer's host. Progress on both sides completes the connection.

    Without error handling UCX may use shared memory and, inside one worker, ``self``, which cannot
    detect the death of a peer: requests to one then never complete. Closing asks the peer, and
    gives up after 0.1 s.
    """

    def __init__(self, worker: Worker, address: bytes, *, error_handling: bool = True) -> None:
        packed = _unseal(_ADDRESS, address)
        self._native = _native.ucx.Endpoint(worker._native, packed.data, error_handling)

    @property
    def failure(self) -> str:
        """UCX's name for the error that ended the connection; empty while it works."""
        return self._native.failure

    def close(self) -> None:
        """Close without asking the peer; requests in flight end with an error. Idempotent.

        To know that earlier puts are complete at the peer, wait for a `flush_nbx` first.
        """
        self._native.close()


class RemoteKey:
    """Access to a peer's memory through one endpoint.

    Parameters
    ----------
    endpoint : Endpoint
        The connection to the process that owns the memory.
    packed : bytes
        `MemoryHandle.pack` of the other side; checked like an address.

    Raises
    ------
    WireError
        If the bytes are damaged or not a key.
    ProtocolVersionError
        If they are of another UCX version or byte order.
    ClosedError
        If the endpoint is closed.
    UcxError
        If UCX cannot use the key.
    """

    def __init__(self, endpoint: Endpoint, packed: bytes) -> None:
        key = _unseal(_KEY, packed)
        self._address, self._nbytes = key.address, key.nbytes
        self._native = _native.ucx.RemoteKey(endpoint._native, key.data)

    @property
    def address(self) -> int:
        """Address of the first byte at the peer."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._nbytes

    @property
    def is_direct(self) -> bool:
        """Whether the memory is mapped into this process: allocated by UCX, on the same host."""
        return self._native.is_direct(self._address)


def get_nbx(
    local: MemoryHandle,
    remote: RemoteKey,
    nbytes: int | None = None,
    *,
    local_offset: int = 0,
    remote_offset: int = 0,
) -> Request:
    """Start to copy bytes of a peer's memory into local memory.

    Parameters
    ----------
    local : MemoryHandle
        Destination.
    remote : RemoteKey
        Source.
    nbytes : int, optional
        Bytes to copy; by default the rest of the remote memory.
    local_offset, remote_offset : int
        Where the bytes begin on each side.

    Returns
    -------
    Request
        In flight, or complete.

    Raises
    ------
    ConfigError
        If the range is empty or does not lie inside both memories.
    ClosedError
        If memory or endpoint are closed.
    UcxError
        If it fails at once.
    """
    return _move(local, remote, nbytes, local_offset, remote_offset, is_get=True)


def put_nbx(
    local: MemoryHandle,
    remote: RemoteKey,
    nbytes: int | None = None,
    *,
    local_offset: int = 0,
    remote_offset: int = 0,
) -> Request:
    """Start to copy local bytes into a peer's memory; as `get_nbx`.

    A complete put means that the local bytes may change. They have arrived when a later `flush_nbx`
    is complete.
    """
    return _move(local, remote, nbytes, local_offset, remote_offset, is_get=False)


def _move(
    local: MemoryHandle,
    remote: RemoteKey,
    nbytes: int | None,
    local_offset: int,
    remote_offset: int,
    *,
    is_get: bool,
) -> Request:
    length = remote.nbytes - remote_offset if nbytes is None else nbytes
    for side, offset, size in (
        ("local", local_offset, local.nbytes),
        ("remote", remote_offset, remote.nbytes),
    ):
        if offset < 0 or length < 1 or offset + length > size:
            raise ConfigError(
                f"{length} bytes at offset {offset} do not lie inside the {size} bytes of the "
                f"{side} memory"
            )
    return _native.ucx.move(
        local._native, local_offset, remote._native, remote.address + remote_offset, length, is_get
    )


def flush_nbx(endpoint: Endpoint) -> Request:
    """Start to wait until all earlier requests of an endpoint are complete at the peer."""
    return endpoint._native.flush()
