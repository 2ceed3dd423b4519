"""Layer 3, what users see of it: agents, peers, registered memory, transfers, notifications.

`Agent` is the protocol that the layers above rely on; `pynixlkv.engine.EngineAgent` implements it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from pynixlkv._closeable import Closeable
from pynixlkv.errors import (
    ClosedError,
    PeerLostError,
    StateError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    from_native,
)
from pynixlkv.types import AgentName, MemorySpan, TransferState

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Self

    from pynixlkv import _native
    from pynixlkv.engine import EngineAgent
    from pynixlkv.geometry import Geometry, KVCache
    from pynixlkv.plan import TransferPlan

__all__ = [
    "CLOSE_TIMEOUT_S",
    "DEFAULT_TIMEOUT_S",
    "MAX_NOTIFICATION_BYTES",
    "Agent",
    "BlockTable",
    "Notification",
    "Peer",
    "Positions",
    "Registerable",
    "Registration",
    "Transfer",
    "TransferResult",
]

MAX_NOTIFICATION_BYTES = 1 << 20
"""Longest notification: one eager message of the library must carry it."""

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of a transfer whose caller names none."""

CLOSE_TIMEOUT_S = 5.0
"""How long a close waits for quiet unless its caller says otherwise."""

BlockTable: TypeAlias = "npt.ArrayLike | Mapping[str, npt.ArrayLike]"
"""Physical block numbers, of one group or by group name."""

Positions: TypeAlias = "int | Mapping[str, int]"
"""A token position, for all groups or by group name."""

Registerable: TypeAlias = "KVCache | MemorySpan | object"
"""What `Agent.register` takes: a cache, a span, a torch tensor or a numpy array."""


@dataclass(frozen=True)
class Notification:
    """An exact byte string that a peer sent, delivered once.

    Parameters
    ----------
    peer : str
        Name of the agent that sent it, connected here or not.
    message : bytes
        What it sent.
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
        Rows given to the native library, after merging and cutting.
    batches : int
        Native requests that they were posted in.
    prepared : bool
        Whether the rows were chosen by index from prepared ones, which the engine does when it
        pays; they are then counted before merging.
    queued_s : float
        Seconds from the call to the engine's thread taking it up.
    plan_s : float
        Seconds the engine's thread spent turning block tables into rows.
    make_s : float
        Seconds it spent making native requests out of the rows.
    post_s : float
        Seconds inside the library's post calls (the whole copy, on same-host paths of NIXL).
    transfer_s : float
        Seconds from the call to the end state.
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


class Peer:
    """One generation of a remote agent; made by `Agent.connect`.

    Parameters
    ----------
    native : object
        Internal.
    geometries : sequence of Geometry
        What the peer's hello described.
    """

    def __init__(self, native: _native.transfer.Peer, geometries: Sequence[Geometry]) -> None:
        self._native = native
        self._geometries = tuple(geometries)
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
    def is_connected(self) -> bool:
        """Whether transfers to this generation are accepted."""
        return self._native.state == 0

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """Geometries of the caches that the peer described, in its order."""
        return self._geometries

    @property
    def geometry(self) -> Geometry:
        """The geometry, where the peer described exactly one cache.

        Raises
        ------
        StateError
            If it described none or several.
        """
        if len(self._geometries) != 1:
            raise StateError(
                f"peer {self.name!r} described {len(self._geometries)} caches; "
                "choose from peer.geometries"
            )
        return self._geometries[0]

    def __repr__(self) -> str:
        state = ("connected", "lost", "disconnected")[self._native.state]
        return f"<Peer {self.name!r} generation {self.generation}, {state}>"


class Registration:
    """Memory registered with an agent; a context manager that deregisters.

    The agent holds it, and with it the tensors, until it is closed.
    """

    def __init__(
        self,
        agent: EngineAgent,
        native: _native.transfer.Registration,
        spans: tuple[MemorySpan, ...],
    ) -> None:
        self._agent = weakref.ref(agent)
        self._native = native
        self._spans = spans

    @property
    def spans(self) -> tuple[MemorySpan, ...]:
        """The registered ranges."""
        return self._spans

    @property
    def nbytes(self) -> int:
        """Bytes registered."""
        return sum(span.nbytes for span in self._spans)

    def close(self) -> None:
        """Deregister.

        Raises
        ------
        RegistrationInUseError
            If a transfer that is not quiet still uses the memory.
        ClosedError
            If it was deregistered before.
        """
        agent = self._agent()
        if agent is None or not self._native.is_open:
            raise ClosedError(f"{self!r} was deregistered before, or its agent is closed")
        agent._deregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._native.is_open:
            self.close()

    def __repr__(self) -> str:
        state = f"{self._native.uses} uses" if self._native.is_open else "closed"
        return f"<Registration of {self.nbytes} bytes in {len(self._spans)} spans, {state}>"


_FAILURES: dict[TransferState, type[TransferError]] = {
    TransferState.FAILED: TransferError,
    TransferState.TIMED_OUT: TransferTimeout,
    TransferState.PEER_LOST: PeerLostError,
    TransferState.CANCELLED: TransferCancelled,
}


class Transfer(Closeable):
    """A transfer under way, or ended; made by `Agent.read` and `Agent.write`.

    It ends in exactly one state, which never changes. After a state other than DONE, bytes may
    still arrive until `is_quiet`: the buffers must not be reused before. Safe from several threads.
    """

    def __init__(self, agent: EngineAgent, native: _native.transfer.Transfer, peer: Peer) -> None:
        self._agent = agent
        self._native = native
        self._peer = peer

    @property
    def id(self) -> int:
        """Number of the transfer within its agent."""
        return self._native.id

    @property
    def peer(self) -> Peer:
        """The generation of the peer that it runs against."""
        return self._peer

    @property
    def state(self) -> TransferState:
        """Where it stands; never raises."""
        return TransferState(self._native.state)

    @property
    def is_quiet(self) -> bool:
        """Whether no byte of it can move any more."""
        return self._native.is_quiet

    @property
    def error(self) -> TransferError | None:
        """Why it ended without success; None while it runs and after success."""
        cls = _FAILURES.get(self.state)
        if cls is None:
            return None
        error = cls(
            self._native.message,
            peer=self._peer.name,
            transfer_id=self.id,
            bytes_done=self._native.stats["bytes_done"],
        )
        cause = self._native.cause
        if cause is not None:
            error.__cause__ = from_native(*cause)
        return error

    def done(self) -> bool:
        """Return whether it has ended well.

        Raises
        ------
        TransferError
            If it has ended without success; the subclass tells how.

        Notes
        -----
        Does not block.
        """
        error = self.error
        if error is not None:
            raise error
        return self.state is TransferState.DONE

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Wait for the end.

        Parameters
        ----------
        timeout : float, optional
            Longest wait in seconds; None waits for the transfer's own deadline.

        Returns
        -------
        TransferResult
            What was moved.

        Raises
        ------
        TransferTimeout
            If the transfer passed its deadline, or has not ended within `timeout`; in the second
            case it goes on, and `state` is not an end state.
        PeerLostError, TransferCancelled, TransferError
            If it ended in another way than DONE.

        Notes
        -----
        Blocks without the GIL. Ctrl-C interrupts.
        """
        # The transfer's own deadline bounds this wait; the engine keeps it.
        if not self._native.wait(float("inf") if timeout is None else timeout):
            raise TransferTimeout(
                f"transfer {self.id} with peer {self._peer.name!r} has not ended after waiting "
                f"{timeout} s; it goes on until its own deadline",
                peer=self._peer.name,
                transfer_id=self.id,
            )
        return self.result

    def wait_quiet(self, timeout: float) -> bool:
        """Wait until no byte of it can move any more.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds.

        Returns
        -------
        bool
            Whether it is quiet.
        """
        return self._native.wait(timeout, for_quiet=True)

    @property
    def result(self) -> TransferResult:
        """What was moved.

        Raises
        ------
        StateError
            If it has not ended.
        TransferError
            If it ended without success.
        """
        if not self.done():
            raise StateError(f"{self!r} has not ended; wait() for it first")
        stats = self._native.stats
        return TransferResult(
            bytes=stats["bytes"],
            descriptors=stats["descriptors"],
            batches=stats["batches"],
            prepared=stats["prepared"],
            queued_s=stats["queued_ns"] * 1e-9,
            plan_s=stats["expand_ns"] * 1e-9,
            make_s=stats["make_ns"] * 1e-9,
            post_s=stats["post_ns"] * 1e-9,
            transfer_s=stats["total_ns"] * 1e-9,
        )

    def cancel(self) -> None:
        """End it as cancelled unless it has ended; what is in flight becomes quiet later.

        Notes
        -----
        No library can take back posted operations, so bytes may arrive until `is_quiet`. Does not
        block.
        """
        self._agent._native.cancel(self._native)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """Cancel it if it runs, and wait for quiet.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds.

        Returns
        -------
        bool
            Whether it is quiet. If not, the agent keeps it, and the memory that it touches
            registered, until it is.
        """
        if not self.state.is_end:
            self.cancel()
        return self.wait_quiet(timeout)

    def __await__(self) -> Generator[None, None, TransferResult]:
        yield from self._agent._completions.wait(self._native).__await__()
        return self.result

    def __repr__(self) -> str:
        quiet = "" if self.is_quiet or not self.state.is_end else ", not quiet"
        return f"<Transfer {self.id} with {self._peer.name!r}: {self.state.name}{quiet}>"


@runtime_checkable
class Agent(Protocol):
    """What the layers above need of a transfer engine.

    `pynixlkv.engine.EngineAgent` spells the contract out; `pynixlkv.testing.conformance` tests it.
    """

    @property
    def name(self) -> AgentName:
        """Name of the agent, unique among those that talk to each other."""
        ...

    def register(self, *memory: Registerable) -> Registration:
        """Register memory for transfers, without copying it."""
        ...

    def hello(self, *caches: KVCache) -> bytes:
        """Describe this agent and some caches in its memory to a peer."""
        ...

    def connect(self, hello: bytes) -> Peer:
        """Connect to the agent that gave the hello."""
        ...

    def read(
        self,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        *,
        notify: bytes | None = None,
        timeout: float = ...,
        num_tokens: Positions | None = None,
        local_start: Positions = 0,
        remote_start: Positions = 0,
    ) -> Transfer:
        """Pull blocks of the peer into local blocks."""
        ...

    def write(
        self,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        *,
        notify: bytes | None = None,
        timeout: float = ...,
        num_tokens: Positions | None = None,
        local_start: Positions = 0,
        remote_start: Positions = 0,
    ) -> Transfer:
        """Push local blocks into blocks of the peer."""
        ...

    def notify(self, peer: Peer, message: bytes) -> None:
        """Send a notification by itself."""
        ...

    def notifications(self, timeout: float = 0.0) -> list[Notification]:
        """Take the notifications that have arrived, each once."""
        ...

    def wait_activity(self, seen: int, timeout: float) -> int:
        """Wait until a notification has come or a transfer has ended or become quiet."""
        ...

    def wake(self) -> None:
        """Let `wait_activity` return."""
        ...

    def is_alive(self, peer: Peer) -> bool:
        """Ask whether the connection to a peer still stands."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Cancel the peer's transfers and forget it."""
        ...

    def close(self, timeout: float = ...) -> bool:
        """Cancel what runs, wait for quiet, give everything back."""
        ...
