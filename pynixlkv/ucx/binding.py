"""The thin binding: UCX's own verbs, with owners instead of handles.

Everything keeps what it hangs from: a `Request` its memory and keys, a `RemoteKey` its `Endpoint`,
an `Endpoint` its `Worker`, a `Worker` its `Context`. All calls release the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Literal

from pynixlkv import _loader, _native
from pynixlkv._closeable import Closeable
from pynixlkv.errors import (
    ClosedError,
    ConfigError,
    ProtocolVersionError,
    StateError,
    TransferTimeout,
    UcxError,
    WireError,
)
from pynixlkv.types import MemoryType

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from typing_extensions import Self

__all__ = [
    "Context",
    "Endpoint",
    "Listener",
    "MemoryHandle",
    "RemoteKey",
    "Request",
    "Worker",
    "am_send_nbx",
    "flush_nbx",
    "get_nbx",
    "put_nbx",
]

# What UCX packs has neither length nor checksum, and UCX trusts it: so it travels in an envelope.
_HEADER = struct.Struct("<8sBBB?II")  # magic, UCX's version, big-endian, length, checksum
_ADDRESS_MAGIC = b"pnkucxA1"
_KEY_MAGIC = b"pnkucxK1"
_RANGE = struct.Struct("<QQ")
_MAX_HEADER_BYTES = 1024
_MAX_ID = 0xFFFF  # of active messages, and of ports


def _here() -> tuple[int, int, int, bool]:
    major, minor, release = (int(part) for part in _loader.load_ucx().version.split("."))
    return major, minor, release, sys.byteorder == "big"


def _seal(magic: bytes, payload: bytes) -> bytes:
    head = _HEADER.pack(magic, *_here(), len(payload), 0)
    checksum = zlib.crc32(payload, zlib.crc32(head))
    return _HEADER.pack(magic, *_here(), len(payload), checksum) + payload


def _unseal(magic: bytes, data: object, what: str) -> bytes:
    if not isinstance(data, bytes):
        raise ConfigError(f"{what} must be bytes, not {type(data).__name__}")
    if len(data) < _HEADER.size or data[: len(magic)] != magic:
        raise WireError(f"{what} of {len(data)} bytes does not begin with {magic!r}")
    *there, length, checksum = _HEADER.unpack_from(data)[1:]
    payload = data[_HEADER.size :]
    if length != len(payload):
        raise WireError(f"{what} promises {length} bytes and has {len(payload)}")
    head = data[: _HEADER.size - 4] + bytes(4)
    if checksum != zlib.crc32(payload, zlib.crc32(head)):
        raise WireError(f"{what} is damaged: its checksum does not fit")
    local, remote = _describe(*_here()), _describe(*there)
    if (_here()[:2], _here()[3]) != (tuple(there[:2]), there[3]):
        raise ProtocolVersionError(
            f"{what} is of {remote}, this side has {local}; the first two numbers of the version "
            "and the byte order must agree",
            local_version=local,
            remote_version=remote,
        )
    return payload


def _describe(major: int, minor: int, release: int, is_big: bool) -> str:
    return f"UCX {major}.{minor}.{release} on a {'big' if is_big else 'little'}-endian machine"


class Context:
    """An instance of UCX with its settings and devices. Safe from several threads.

    Parameters
    ----------
    config : mapping of str to str, optional
        Settings, names without the prefix ``UCX_``, over those of the environment.

    Raises
    ------
    LibraryNotFoundError, LibraryVersionError
        If UCX is not installed or too old.
    ConfigError
        If UCX does not take a setting.
    UcxError
        If UCX does not start.
    """

    def __init__(self, config: Mapping[str, str] | None = None) -> None:
        self._native = _native.ucx.Context(_loader.load_ucx(), dict(config or {}))

    @property
    def config(self) -> dict[str, str]:
        """Settings given to it."""
        return self._native.config

    def map(self, memory: object) -> MemoryHandle:
        """Map memory of the caller, so that it can be moved and peers can be given access.

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
            If it has no bytes, is read-only, not contiguous, or in memory that UCX does not move.
        UcxError
            If UCX refuses it.
        """
        buffer = _native.Buffer(memory)
        kind = MemoryType(buffer.memory)
        if kind not in (MemoryType.DRAM, MemoryType.VRAM):
            raise ConfigError(f"UCX moves host and GPU memory, not {kind.name}")
        native = _native.ucx.Memory.map(
            self._native, buffer.address, buffer.nbytes, int(kind), buffer
        )
        return MemoryHandle(native, kind)

    def allocate(self, nbytes: int) -> MemoryHandle:
        """Let UCX allocate memory, which processes of this host can then reach directly.

        Parameters
        ----------
        nbytes : int
            Bytes, at least 1.

        Returns
        -------
        MemoryHandle
            Its owner; ``memoryview(handle.buffer)`` is the memory.

        Raises
        ------
        ConfigError
            If it is not a positive number of bytes, or more than are free.
        UcxError
            If UCX cannot allocate it.
        """
        if nbytes < 1:
            raise ConfigError(f"{nbytes} bytes cannot be allocated")
        return MemoryHandle(_native.ucx.Memory.allocate(self._native, nbytes), MemoryType.DRAM)


class MemoryHandle(Closeable):
    """Mapped memory; made by `Context.map` and `Context.allocate`.

    Parameters
    ----------
    native : object
        Internal.
    kind : MemoryType
        Where it is.
    """

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
        """First byte."""
        return self._native.address

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._native.nbytes

    @property
    def buffer(self) -> memoryview:
        """Host memory as writable bytes, valid for as long as somebody views them."""
        if self._kind is not MemoryType.DRAM:
            raise StateError(f"{self._kind.name} memory cannot be viewed from the host")
        return memoryview(self._native)

    def pack(self) -> bytes:
        """Return what a peer unpacks to reach the memory, checksummed.

        Returns
        -------
        bytes
            For `RemoteKey`. Whoever holds them can read and write the memory.
        """
        native = self._native
        return _seal(_KEY_MAGIC, _RANGE.pack(native.address, native.nbytes) + native.pack())

    def advise(
        self, advice: Literal["will_need", "normal"], nbytes: int | None = None, *, offset: int = 0
    ) -> None:
        """Tell UCX how the memory will be used; it may prepare it, and may do nothing.

        Parameters
        ----------
        advice : {"will_need", "normal"}
            It is used soon, or there is nothing special about it any more.
        nbytes : int, optional
            How many bytes; by default all from the offset on.
        offset : int
            Where they begin.

        Raises
        ------
        ConfigError
            If the advice is none of these or the range does not lie inside.
        UcxError
            If UCX refuses it.
        """
        if advice not in ("will_need", "normal"):
            raise ConfigError(f"advice must be 'will_need' or 'normal', not {advice!r}")
        length = self.nbytes - offset if nbytes is None else nbytes
        _check_range("mapped", offset, length, self.nbytes)
        self._native.advise(offset, length, advice == "will_need")

    def close(self) -> None:
        """Unmap once no request and no view uses it any more. Idempotent."""
        self._memory = None

    def __repr__(self) -> str:
        if self._memory is None:
            return "<MemoryHandle, closed>"
        return f"<MemoryHandle of {self.nbytes} bytes at {self.address:#x}>"


class _Awaited:
    """What waits for a worker: coroutines of one event loop, and handlers of failures."""

    def __init__(self, native: _native.ucx.Worker) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[tuple[_native.ucx.Request, asyncio.Future[None]]] = []
        self._watched: weakref.WeakKeyDictionary[Endpoint, Callable[[str], object]] = (
            weakref.WeakKeyDictionary()
        )

    def watch(self, endpoint: Endpoint, on_failure: Callable[[str], object]) -> None:
        with self._lock:
            self._watched[endpoint] = on_failure

    async def wait(self, request: _native.ucx.Request) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (request, future)
        with self._lock:
            if self._loop not in (None, loop):
                raise StateError("requests of one worker are awaited in two event loops at once")
            if self._loop is None:
                self._loop = loop
                loop.add_reader(self._native.event_fd, self._on_event)
            self._waiting.append(entry)
        try:
            self._on_event()
            await future
        finally:
            with self._lock:
                self._waiting.remove(entry)
                if not self._waiting:
                    loop.remove_reader(self._native.event_fd)
                    self._loop = None

    def _on_event(self) -> None:
        while True:
            while self._native.progress():
                pass
            self.settle()
            if self._native.arm():
                return

    def settle(self) -> None:
        """Tell those that wait what progress has brought, whichever thread made it."""
        with self._lock:
            waiting, loop = list(self._waiting), self._loop
            failed = [
                (self._watched.pop(endpoint), endpoint.failure)
                for endpoint in list(self._watched)
                if endpoint.failure
            ]
        for on_failure, failure in failed:
            on_failure(failure)
        for request, future in waiting:
            try:
                ended = request.check()
            except Exception:
                ended = True  # the coroutine asks again, and gets it
            if ended and loop is not None:
                with contextlib.suppress(RuntimeError):  # that loop may be closing
                    loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Worker:
    """A progress engine. Safe from several threads, which take turns.

    Parameters
    ----------
    context : Context
        Where it belongs.
    single_thread : bool
        Promise to use it, and what hangs from it, on this thread alone; use on another raises
        `StateError`.

    Raises
    ------
    UcxError
        If UCX refuses, for example because a transport of ``UCX_TLS`` offers no events.
    """

    def __init__(self, context: Context, *, single_thread: bool = False) -> None:
        self._native = _native.ucx.Worker(context._native, single_thread)
        self._awaited = _Awaited(self._native)

    @property
    def address(self) -> bytes:
        """What a peer makes an `Endpoint` with, checksummed."""
        return _seal(_ADDRESS_MAGIC, self._native.address())

    @property
    def event_fd(self) -> int:
        """A descriptor to sleep on when `arm` has returned True; the worker's own."""
        return self._native.event_fd

    def progress(self) -> int:
        """Let UCX work.

        Returns
        -------
        int
            How much was done; 0 if there was nothing to do.
        """
        done = self._native.progress()
        self._awaited.settle()
        return done

    def spin(self, seconds: float) -> None:
        """Let UCX work for some time without a pause, for the shortest delay to peers.

        Parameters
        ----------
        seconds : float
            How long.
        """
        self._native.spin(seconds)
        self._awaited.settle()

    def arm(self) -> bool:
        """Prepare to sleep on `event_fd`.

        Returns
        -------
        bool
            False if there is something to do right now: call `progress` instead of sleeping.
        """
        return self._native.arm()

    def signal(self) -> None:
        """Wake whoever sleeps on `event_fd`."""
        self._native.signal()

    def open_inbox(self, am_id: int) -> None:
        """Keep the active messages of an id for `messages`; others are dropped by UCX.

        Parameters
        ----------
        am_id : int
            0 to 65535.
        """
        self._native.open_inbox(_checked_id(am_id))

    def messages(self, am_id: int, timeout: float = 0.0) -> list[tuple[bytes, bytes]]:
        """Take the active messages of an id that have arrived.

        Parameters
        ----------
        am_id : int
            Of an open inbox.
        timeout : float
            Longest wait in seconds for the first; 0 does not wait.

        Returns
        -------
        list of (bytes, bytes)
            Header and data of each; in order per sender while ``MAX_EAGER_RAILS`` is 1,
            UCX's default.

        Raises
        ------
        StateError
            If no inbox is open for the id.
        """
        taken = self._native.take(_checked_id(am_id), timeout)
        self._awaited.settle()
        return taken


class Endpoint(Closeable):
    """A connection to a peer's worker. Closes when it is dropped.

    Parameters
    ----------
    worker : Worker
        Of this side.
    address : bytes
        `Worker.address` of the other side. Damage is noticed before UCX sees it; a forgery is
        not, so take it from a channel that you trust.
    on_failure : callable, optional
        Called once with UCX's name for what the connection died of, by a thread that makes
        progress on the worker, after that progress.
    error_handling : bool
        Let UCX look after the health of the connection; both sides need the same. See Notes.

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
    notice the death of a peer: what waits for one then waits for ever. Closing asks the peer, and
    gives up after 0.1 s.
    """

    def __init__(
        self,
        worker: Worker,
        address: bytes,
        on_failure: Callable[[str], object] | None = None,
        *,
        error_handling: bool = True,
    ) -> None:
        payload = _unseal(_ADDRESS_MAGIC, address, "a UCX worker address")
        native = _native.ucx.Endpoint(worker._native, payload, error_handling)
        self._set_up(worker, native, on_failure)

    def _set_up(
        self,
        worker: Worker,
        native: _native.ucx.Endpoint,
        on_failure: Callable[[str], object] | None,
    ) -> Self:
        self._worker = worker
        self._native = native
        if on_failure is not None:
            worker._awaited.watch(self, on_failure)
        return self

    @classmethod
    def connect(
        cls,
        worker: Worker,
        ip: str,
        port: int,
        on_failure: Callable[[str], object] | None = None,
    ) -> Self:
        """Make an endpoint by the socket address of a peer's `Listener`.

        Parameters
        ----------
        worker : Worker
            Of this side.
        ip : str
            Numeric address; names are not resolved.
        port : int
            `Listener.port` of the other side.
        on_failure : callable, optional
            As in the constructor; being rejected is a failure too.

        Returns
        -------
        Endpoint
            At once; the first request fails if the connection cannot be made.

        Raises
        ------
        ConfigError
            If it is not an address and a port.
        UcxError
            If no transport of ``UCX_TLS`` connects by socket address.
        """
        native = _native.ucx.Endpoint.connect(worker._native, ip, _checked_port(port, least=1))
        return cls.__new__(cls)._set_up(worker, native, on_failure)

    @property
    def worker(self) -> Worker:
        """The worker of this side."""
        return self._worker

    @property
    def failure(self) -> str:
        """UCX's name for what the connection died of; empty while it is well."""
        return self._native.failure

    @property
    def num_parked(self) -> int:
        """Requests that were dropped before they ended, and still have not."""
        return self._native.num_parked

    def close(self, timeout: float = 0.0) -> bool:
        """Close; what is still under way then ends with an error. Idempotent.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds for what is under way to be complete at the peer, which needs
            the peer's progress. 0 closes without asking it.

        Returns
        -------
        bool
            Whether all is known to be complete at the peer; False with a timeout of 0, or if it
            was closed before.
        """
        complete = False
        if timeout > 0:
            with contextlib.suppress(ClosedError, TransferTimeout, UcxError):
                flush_nbx(self).wait(timeout)
                complete = True
        self._native.close()
        self._worker._awaited.settle()
        return complete


class Listener(Closeable):
    """Waits for peers that connect by socket address, with `Endpoint.connect`.

    Parameters
    ----------
    worker : Worker
        Whose endpoints are made; it must make progress for a request to arrive.
    ip : str
        Numeric address of this host.
    port : int
        0 lets the system choose one.

    Raises
    ------
    ConfigError
        If it is not an address and a port.
    UcxError
        If UCX cannot listen there.

    Notes
    -----
    Whoever connects is accepted unseen: UCX knows no secrets. `Worker.address`, handed over a
    channel that you trust, tells peers apart.
    """

    def __init__(self, worker: Worker, ip: str = "127.0.0.1", port: int = 0) -> None:
        self._worker = worker
        self._native = _native.ucx.Listener(worker._native, ip, _checked_port(port, least=0))

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._native.port

    def accept(
        self, timeout: float, on_failure: Callable[[str], object] | None = None
    ) -> Endpoint | None:
        """Accept the peer that has waited longest.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds for one to come.
        on_failure : callable, optional
            As in `Endpoint`.

        Returns
        -------
        Endpoint or None
            None if nobody came in time.

        Raises
        ------
        ClosedError
            If the listener is closed.
        UcxError
            If the connection cannot be made.
        """
        native = self._native.accept(timeout)
        self._worker._awaited.settle()
        if native is None:
            return None
        return Endpoint.__new__(Endpoint)._set_up(self._worker, native, on_failure)

    def close(self) -> None:
        """Reject who waits, and listen no more; what was accepted stays. Idempotent."""
        self._native.close()


class RemoteKey:
    """Access to a peer's memory through one endpoint.

    Parameters
    ----------
    endpoint : Endpoint
        The connection to the worker's process.
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
        payload = _unseal(_KEY_MAGIC, packed, "a UCX remote key")
        if len(payload) <= _RANGE.size:
            raise WireError(f"a UCX remote key of {len(payload)} bytes is too short")
        address, nbytes = _RANGE.unpack_from(payload)
        self._address: int = address
        self._nbytes: int = nbytes
        self._endpoint = endpoint
        self._native = _native.ucx.RemoteKey(endpoint._native, payload[_RANGE.size :])

    @property
    def endpoint(self) -> Endpoint:
        """The connection that it belongs to."""
        return self._endpoint

    @property
    def address(self) -> int:
        """First byte, as an address of the peer."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._nbytes

    @property
    def is_direct(self) -> bool:
        """Whether the memory is mapped into this process: allocated by UCX, on the same host."""
        return self._native.is_direct(self._address)


class Request:
    """A call under way; made by `get_nbx` and its like, and awaitable.

    Dropping it does not stop it: it and what it uses live on at the endpoint until it has ended.

    Parameters
    ----------
    native, endpoint : object
        Internal.
    """

    def __init__(self, native: _native.ucx.Request, endpoint: Endpoint) -> None:
        self._native = native
        self._endpoint = endpoint

    def poll(self) -> bool:
        """Make progress and tell whether it has ended well.

        Returns
        -------
        bool
            False while it is under way.

        Raises
        ------
        UcxError
            If it has ended otherwise.
        TransferCancelled
            If it was given up by `cancel`.
        """
        self._endpoint.worker.progress()
        return self._native.check()

    def wait(self, timeout: float = 30.0, *, spin: bool = False) -> None:
        """Wait for its end.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds.
        spin : bool
            Burn the processor for the shortest delay instead of sleeping on events.

        Raises
        ------
        TransferTimeout
            If it has not ended in time; it goes on.
        UcxError
            If it has ended without success.
        TransferCancelled
            If it was given up by `cancel`.
        """
        done = self._native.wait(timeout, spin)
        self._endpoint.worker._awaited.settle()
        if not done:
            raise TransferTimeout(f"the UCX request has not ended within {timeout} s; it goes on")

    def cancel(self) -> bool:
        """Give it up, unless it has ended: from now on `poll`, `wait` and ``await`` raise.

        Returns
        -------
        bool
            Whether it is quiet: it has ended, or UCX has taken it back. UCX cannot take back gets,
            puts and messages: with those it goes on, and `is_quiet` says when it is through.
            `Endpoint.close` ends them by force.
        """
        self._native.cancel()
        self._endpoint.worker._awaited.settle()
        return self._native.is_done

    @property
    def is_quiet(self) -> bool:
        """Whether it has ended, so that it moves no byte any more."""
        return self._native.is_done

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> None:
        if not self._native.check():
            await self._endpoint.worker._awaited.wait(self._native)
            self._native.check()


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
        Where to.
    remote : RemoteKey
        Where from.
    nbytes : int, optional
        How many; by default all of the remote memory from the offset on.
    local_offset, remote_offset : int
        Where the bytes begin on each side.

    Returns
    -------
    Request
        Under way, or ended.

    Raises
    ------
    ConfigError
        If the range does not lie inside both memories.
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

    Its end means that the local bytes may change, not that they have arrived: that is known when a
    `flush_nbx` which was started later has ended.
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
        _check_range(side, offset, length, size)
    native = _native.ucx.move(
        local._native, local_offset, remote._native, remote.address + remote_offset, length, is_get
    )
    return Request(native, remote.endpoint)


def flush_nbx(endpoint: Endpoint) -> Request:
    """Start to wait for everything before it on an endpoint to be complete at the peer.

    Parameters
    ----------
    endpoint : Endpoint
        Which connection.

    Returns
    -------
    Request
        Under way, or ended.
    """
    return Request(endpoint._native.flush(), endpoint)


def am_send_nbx(endpoint: Endpoint, am_id: int, header: bytes, data: bytes = b"") -> Request:
    """Start to send an active message, which arrives in an inbox of the peer's worker.

    Parameters
    ----------
    endpoint : Endpoint
        Where to.
    am_id : int
        0 to 65535; see `Worker.open_inbox`.
    header : bytes
        At most 1024 bytes.
    data : bytes
        Any number; sent eagerly, and copied first.

    Returns
    -------
    Request
        Its end means that the message has left, not that it has arrived.

    Raises
    ------
    ConfigError
        If the id or the header are out of range.
    UcxError
        If it fails at once.
    """
    if len(header) > _MAX_HEADER_BYTES:
        raise ConfigError(
            f"a header of {len(header)} bytes exceeds the limit of {_MAX_HEADER_BYTES}"
        )
    return Request(endpoint._native.send(_checked_id(am_id), header, data), endpoint)


def _check_range(side: str, offset: int, length: int, size: int) -> None:
    if offset < 0 or length < 1 or offset + length > size:
        raise ConfigError(
            f"{length} bytes at offset {offset} do not lie inside the {size} bytes of the "
            f"{side} memory"
        )


def _checked_port(port: int, *, least: int) -> int:
    if not least <= port <= _MAX_ID:
        raise ConfigError(f"a port must be {least} to {_MAX_ID}, not {port!r}")
    return port


def _checked_id(am_id: int) -> int:
    if not 0 <= am_id <= _MAX_ID:
        raise ConfigError(f"the id of active messages must be 0 to {_MAX_ID}, not {am_id!r}")
    return am_id
