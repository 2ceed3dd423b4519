"""What an agent gives out: peers, transfers and their results, notifications."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pynixlkv._closeable import Closeable, Uncopied
from pynixlkv.errors import (
    PeerLostError,
    StateError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    from_native,
)
from pynixlkv.types import AgentName, TransferState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from collections.abc import Set as AbstractSet

    from pynixlkv import _native
    from pynixlkv.geometry import Geometry
    from pynixlkv.plan import TransferPlan

__all__ = ["CLOSE_TIMEOUT_S", "Completions", "Notification", "Peer", "Transfer", "TransferResult"]

CLOSE_TIMEOUT_S = 5.0
"""How long a close waits for quiet unless its caller says otherwise."""


@dataclass(frozen=True)
class Notification:
    """A message from a peer, delivered once.

    Parameters
    ----------
    peer : str
        Name of the agent that sent it, connected here or not.
    message : bytes
        Exactly the bytes that were sent.
    """

    peer: AgentName
    message: bytes


@dataclass(frozen=True)
class TransferResult:
    """What a finished transfer moved, and how long it took.

    Parameters
    ----------
    bytes : int
        Bytes moved.
    descriptors : int
        Descriptors given to the native library, after merging and cutting.
    batches : int
        Native requests that they were posted in.
    prepared : bool
        Whether the descriptors were chosen by index from a prepared list, which the agent does
        when that is cheaper; they are then counted before merging.
    queued_s : float
        Seconds between the call and the start of work on the agent's thread.
    plan_s : float
        Seconds that thread spent expanding block tables to descriptors.
    make_s : float
        Seconds that thread spent making native requests.
    post_s : float
        Seconds inside the library's post calls (the whole copy, on same-host paths of NIXL).
    transfer_s : float
        Seconds from the call to the end state.
    transports : tuple of str
        As `Peer.transports`.
    """

    bytes: int
    descriptors: int
    batches: int
    prepared: bool
    queued_s: float
    plan_s: float
    make_s: float
    post_s: float
    transfer_s: float
    transports: tuple[str, ...] = ()


class Peer(Uncopied):
    """One generation of a remote agent; made by `Agent.connect`."""

    def __init__(
        self,
        native: _native.transfer.Peer,
        geometries: Sequence[Geometry],
        unused: AbstractSet[str] = frozenset(),
    ) -> None:
        self._native = native
        self._geometries = tuple(geometries)
        self._unused = unused
        self._plans: weakref.WeakSet[TransferPlan] = weakref.WeakSet()

    @property
    def name(self) -> AgentName:
        """Name of the remote agent."""
        return AgentName(self._native.name)

    @property
    def generation(self) -> int:
        """1 for the first connection to this name, one more for each that follows."""
        return self._native.generation

    @property
    def transports(self) -> tuple[str, ...]:
        """UCX's transports to it, such as ``cuda_ipc``; empty under NIXL, which does not say.

        Those of `UcxAgent` for host memory: ``process_vm``, vectored copies by the kernel, or
        ``lane``, a connection of TCP. Without ``cuda_ipc`` if the peer's memory of a GPU cannot be
        opened: it moves through host memory.
        """
        return tuple(name for name in self._native.transports if name not in self._unused)

    @property
    def is_connected(self) -> bool:
        """Whether this generation accepts transfers."""
        return self._native.state == 0

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """Geometries of the caches that the peer described, in its order."""
        return self._geometries

    @property
    def geometry(self) -> Geometry:
        """The geometry of the one cache that the peer described; else raises `StateError`."""
        if len(self._geometries) != 1:
            raise StateError(
                f"peer {self.name!r} described {len(self._geometries)} caches; "
                "choose from peer.geometries"
            )
        return self._geometries[0]

    def __repr__(self) -> str:
        state = ("connected", "lost", "disconnected")[self._native.state]
        return f"<Peer {self.name!r} generation {self.generation}, {state}>"


_FAILURES: dict[TransferState, type[TransferError]] = {
    TransferState.FAILED: TransferError,
    TransferState.TIMED_OUT: TransferTimeout,
    TransferState.PEER_LOST: PeerLostError,
    TransferState.CANCELLED: TransferCancelled,
}


_STATES = tuple(TransferState)  # by number; a call of the class takes ten times as long


class Transfer(Closeable):
    """A transfer, running or ended; made by `Agent.read` and `Agent.write`.

    A transfer ends in exactly one state, which never changes. After a state other than DONE, bytes
    may still arrive until `is_quiet`; do not reuse the buffers before. Safe from several threads.
    """

    def __init__(
        self,
        native: _native.transfer.Transfer,
        peer: Peer,
        cancel: Callable[[_native.transfer.Transfer], None],
        wait_end: Callable[[_native.transfer.Transfer], Awaitable[None]],
    ) -> None:
        self._native = native
        self._peer = peer
        # Methods of the agent and of an object of it: they keep the agent alive.
        self._cancel = cancel
        self._wait_end = wait_end

    @property
    def id(self) -> int:
        """Number of the transfer within its agent."""
        return self._native.id

    @property
    def peer(self) -> Peer:
        """The generation of the peer at the other end."""
        return self._peer

    @property
    def state(self) -> TransferState:
        """Current state; never raises."""
        return _STATES[self._native.state]

    @property
    def is_quiet(self) -> bool:
        """Whether the transfer can no longer move any byte."""
        return self._native.is_quiet

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it runs and after success."""
        cls = _FAILURES.get(self.state)
        if cls is None:
            return None
        error = cls(
            self._native.message,
            peer=self._peer.name,
            transfer_id=self.id,
            bytes_done=self._native.bytes_done,
        )
        cause = self._native.cause
        if cause is not None:
            error.__cause__ = from_native(*cause)
        return error

    def done(self) -> bool:
        """Return whether the transfer has succeeded, without blocking; raises `error` if any."""
        error = self.error
        if error is not None:
            raise error
        return self.state is TransferState.DONE

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Wait for the end, `timeout` seconds or until the transfer's own deadline.

        Blocks without the GIL. Ctrl-C interrupts.

        Raises
        ------
        TransferTimeout
            If the transfer passed its deadline, or has not ended within `timeout`; in the second
            case the transfer goes on, and `state` is not an end state.
        PeerLostError, TransferCancelled, TransferError
            If the transfer ended in another state than DONE.
        """
        # The agent ends the transfer at its own deadline, which bounds this wait.
        if not self._native.wait(float("inf") if timeout is None else timeout):
            raise TransferTimeout(
                f"transfer {self.id} with peer {self._peer.name!r} has not ended after waiting "
                f"{timeout} s; it goes on until its own deadline",
                peer=self._peer.name,
                transfer_id=self.id,
            )
        return self.result

    def wait_quiet(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until `is_quiet`; return whether it is."""
        return self._native.wait(timeout, for_quiet=True)

    @property
    def result(self) -> TransferResult:
        """Bytes moved, and times; raises `error`, or `StateError` before the end."""
        if not self.done():
            raise StateError(f"{self!r} has not ended; wait() for it first")
        return TransferResult(*self._native.result, self._peer.transports)

    def cancel(self) -> None:
        """End the transfer as cancelled unless it has ended. Does not block.

        No library can take back posted operations, so bytes may arrive until `is_quiet`.
        """
        self._cancel(self._native)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """Cancel the transfer if it runs, wait for quiet, and return whether it is quiet.

        If not, the agent keeps the transfer, and its memory registered, until it is.
        """
        if not self.state.is_end:
            self.cancel()
        return self.wait_quiet(timeout)

    def __await__(self) -> Generator[None, None, TransferResult]:
        yield from self._wait_end(self._native).__await__()
        return self.result

    def __repr__(self) -> str:
        quiet = "" if self.is_quiet or not self.state.is_end else ", not quiet"
        return f"<Transfer {self.id} with {self._peer.name!r}: {self.state.name}{quiet}>"


class Completions:
    """Wakes the event loops that await transfers of one agent, through one file descriptor."""

    def __init__(self, native: _native.transfer.Agent) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    async def wait(self, transfer: _native.transfer.Transfer) -> None:
        """Wait for the end state."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting.setdefault(transfer.id, []).append(future)
            self._loops[loop] = self._loops.get(loop, 0) + 1
            if self._loops[loop] == 1:
                loop.add_reader(self._native.completion_fd, self._dispatch)
        try:
            self._native.watch(transfer)
            await future
        finally:
            with self._lock:
                waiting = self._waiting.get(transfer.id, [])
                if future in waiting:
                    waiting.remove(future)
                if not waiting:
                    self._waiting.pop(transfer.id, None)
                self._loops[loop] -= 1
                if self._loops[loop] == 0:
                    del self._loops[loop]
                    loop.remove_reader(self._native.completion_fd)

    def _dispatch(self) -> None:
        with self._lock:
            ended = [
                future for i in self._native.take_completed() for future in self._waiting.pop(i, [])
            ]
        for future in ended:
            # A future may belong to the loop of another thread, which may be closing.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
