"""Layer 3: agents, peers, registered memory, transfers, notifications; the same for every engine.

`Agent` is the protocol. `EngineAgent` implements it over the native transfer engine, which owns
deadlines, end states, quarantine and peer generations; `pynixlkv.nixl.NixlAgent` and
`pynixlkv.testing.FakeAgent` add nothing but the driver under it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

from pynixlkv import wire
from pynixlkv.errors import (
    ClosedError,
    ConfigError,
    DuplicatePeerError,
    HandshakeError,
    PeerLostError,
    PlanError,
    ProtocolVersionError,
    StateError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    WireError,
    from_native,
)
from pynixlkv.geometry import Geometry, KVCache, memory_spans
from pynixlkv.types import AgentName, MemorySpan, MemoryType, Operation, TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Self

    from pynixlkv import _native
    from pynixlkv.plan import TransferPlan

__all__ = [
    "MAX_NOTIFICATION_BYTES",
    "Agent",
    "EngineAgent",
    "Notification",
    "Peer",
    "Registration",
    "Transfer",
    "TransferResult",
]

MAX_NOTIFICATION_BYTES = 1 << 20
"""Longest notification: one eager message of the library must carry it."""

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of a transfer whose caller names none."""

_CLOSE_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 1.0

BlockTable: TypeAlias = "npt.ArrayLike | Mapping[str, npt.ArrayLike]"
"""Physical block numbers, of one group or by group name."""

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
    queued_s : float
        Seconds from the call to the engine's thread taking it up.
    plan_s : float
        Seconds the engine's thread spent turning block tables into rows.
    post_s : float
        Seconds inside the library's post calls (the whole copy, on same-host paths of NIXL).
    transfer_s : float
        Seconds from the call to the end state.
    """

    bytes: int
    descriptors: int
    batches: int
    queued_s: float
    plan_s: float
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

    def __init__(self, native: _native.EnginePeer, geometries: Sequence[Geometry]) -> None:
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
        self, agent: EngineAgent, native: _native.EngineRegistration, spans: tuple[MemorySpan, ...]
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


class Transfer:
    """A transfer under way, or ended; made by `Agent.read` and `Agent.write`.

    It ends in exactly one state, which never changes. After a state other than DONE, bytes may still
    arrive until `is_quiet`: the buffers must not be reused before. Safe from several threads.
    """

    def __init__(self, agent: EngineAgent, native: _native.EngineTransfer, peer: Peer) -> None:
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
            queued_s=stats["queued_ns"] * 1e-9,
            plan_s=stats["expand_ns"] * 1e-9,
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

    def close(self, timeout: float = _CLOSE_TIMEOUT_S) -> bool:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        quiet = "" if self.is_quiet or not self.state.is_end else ", not quiet"
        return f"<Transfer {self.id} with {self._peer.name!r}: {self.state.name}{quiet}>"


class _Completions:
    """Wakes the event loops that await transfers of one agent, through one file descriptor."""

    def __init__(self, native: _native.Engine) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    async def wait(self, transfer: _native.EngineTransfer) -> None:
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


@runtime_checkable
class Agent(Protocol):
    """What the layers above need of a transfer engine; see `EngineAgent` for the contract."""

    @property
    def name(self) -> AgentName: ...
    def register(self, memory: Registerable, /) -> Registration: ...
    def hello(self, *caches: KVCache) -> bytes: ...
    def connect(self, hello: bytes) -> Peer: ...
    def read(
        self,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        *,
        notify: bytes | None = None,
        timeout: float = ...,
        num_tokens: int | None = None,
        local_start: int = 0,
        remote_start: int = 0,
    ) -> Transfer: ...
    def write(
        self,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        *,
        notify: bytes | None = None,
        timeout: float = ...,
        num_tokens: int | None = None,
        local_start: int = 0,
        remote_start: int = 0,
    ) -> Transfer: ...
    def notify(self, peer: Peer, message: bytes) -> None: ...
    def notifications(self, timeout: float = 0.0) -> list[Notification]: ...
    def disconnect(self, peer: Peer) -> None: ...
    def close(self, timeout: float = ...) -> bool: ...


class EngineAgent:
    """An agent over a native transfer engine. Safe from several threads.

    Parameters
    ----------
    make_engine : callable
        Makes the native engine from the agent's incarnation.
    engine_version : str
        Version of the library under it.
    secret : bytes or str, optional
        Key of the MAC on hello bytes; both sides need the same. Default: the environment variable
        ``PYNIXLKV_SECRET``, or none.
    """

    engine: ClassVar[str] = ""

    def __init__(
        self,
        make_engine: Callable[[bytes], _native.Engine],
        *,
        engine_version: str,
        secret: bytes | str | None = None,
    ) -> None:
        self._engine_version = engine_version
        self._secret = wire.check_secret(secret)
        self._incarnation = os.urandom(16)
        self._pid = os.getpid()
        self._native = native = make_engine(self._incarnation)
        self._completions = _Completions(native)
        self._registrations: dict[int, Registration] = {}
        self._programs: weakref.WeakKeyDictionary[TransferPlan, _native.EnginePlan] = (
            weakref.WeakKeyDictionary()
        )
        self._close_lock = threading.Lock()
        self._closed = False
        _keeper.add(self)

    @staticmethod
    def _check_name(name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an agent's name must be a non-empty string, not {name!r}")

    # ---- memory

    @property
    def name(self) -> AgentName:
        """Name of the agent, unique among the agents that talk to each other."""
        return AgentName(self._native.name)

    def register(self, *memory: Registerable) -> Registration:
        """Register memory for transfers, without copying it.

        Parameters
        ----------
        *memory : KVCache, MemorySpan, torch tensor or numpy array
            What to register. Tensors and arrays must be contiguous.

        Returns
        -------
        Registration
            A context manager; the agent keeps it and the memory until it is closed.

        Raises
        ------
        ConfigError
            If there is nothing to register, or something of 0 bytes.
        LayoutError
            If a tensor is not contiguous, or something is neither tensor nor array.
        AlreadyRegisteredError
            If a range overlaps one that is registered.
        NixlError
            If the library refuses the memory.
        """
        spans = tuple(span for item in memory for span in memory_spans(item))
        rows, kinds = _span_arrays(spans)
        native = self._native.register_memory(rows, kinds)
        registration = Registration(self, native, spans)
        self._registrations[id(native)] = registration
        return registration

    def _deregister(self, registration: Registration) -> None:
        self._native.deregister(registration._native)
        del self._registrations[id(registration._native)]

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """What is registered now."""
        return tuple(self._registrations.values())

    # ---- peers

    def hello(self, *caches: KVCache) -> bytes:
        """Describe this agent, its registered memory and some caches in it to a peer.

        Parameters
        ----------
        *caches : KVCache
            Caches that the peer shall be able to plan against; their memory must be registered.

        Returns
        -------
        bytes
            For `connect` of the other side. Whoever holds them can read and write the registered
            memory.

        Raises
        ------
        NotRegisteredError
            If a cache lies outside the registered memory.
        ClosedError
            If the agent is closed.
        """
        for cache in caches:
            rows, _ = _span_arrays(cache.spans)
            self._native.check_registered(rows)
        spans = [span for r in self.registrations for span in r.spans]
        return wire.seal(
            wire.Hello(
                agent=self.name,
                incarnation=self._incarnation,
                engine=self.engine,
                engine_version=self._engine_version,
                metadata=self._native.metadata(),
                spans=[
                    wire.SpanRecord(s.address, s.nbytes, s.device, int(s.memory)) for s in spans
                ],
                geometries=[cache.geometry.to_bytes() for cache in caches],
            ),
            secret=self._secret,
        )

    def connect(self, hello: bytes) -> Peer:
        """Connect to the agent that gave the hello, or refresh what is known of it.

        A newer hello of the same agent object updates the peer's memory. One of a successor with
        the same name gives a new generation, once the old one is lost or disconnected.

        Parameters
        ----------
        hello : bytes
            From `hello` of the other side. Untrusted: verified before anything native sees it.

        Returns
        -------
        Peer
            The connected generation.

        Raises
        ------
        WireError
            If the bytes are damaged or forged.
        ProtocolVersionError
            If hello format or library version differ.
        HandshakeError
            If the other side runs another engine.
        DuplicatePeerError
            If a live agent with the same name is connected, or it is this agent's own name.
        NixlError
            If the library refuses the metadata.
        """
        body = wire.unseal(hello, secret=self._secret)
        self._check_compatible(body)
        geometries = [Geometry.from_bytes(raw) for raw in body.geometries]
        rows = np.array(
            [(s.address, s.nbytes, s.device) for s in body.spans], dtype=np.uint64
        ).reshape(-1, 3)
        native = self._native.connect(
            body.agent, body.incarnation, body.metadata, rows, [s.memory for s in body.spans]
        )
        return Peer(native, geometries)

    def _check_compatible(self, body: wire.Hello) -> None:
        if body.agent == self.name:
            raise DuplicatePeerError(
                f"the hello is from an agent with this agent's own name {body.agent!r}; "
                "agent names must be unique"
            )
        if body.engine != self.engine:
            raise HandshakeError(
                f"peer {body.agent!r} runs the {body.engine!r} engine, this agent {self.engine!r}; "
                "both sides need the same",
                peer=body.agent,
            )
        if _release(body.engine_version) != _release(self._engine_version):
            raise ProtocolVersionError(
                f"peer {body.agent!r} runs {body.engine} {body.engine_version}, this agent "
                f"{self._engine_version}; their first two numbers must agree",
                peer=body.agent,
                local_version=self._engine_version,
                remote_version=body.engine_version,
            )

    def is_alive(self, peer: Peer) -> bool:
        """Ask the library whether the connection to a peer still stands; costs a small message.

        A stopped process counts as alive. False also ends the peer's transfers.
        """
        return self._native.is_alive(peer._native)

    def disconnect(self, peer: Peer) -> None:
        """Cancel the peer's transfers and forget it once they are quiet."""
        self._native.disconnect(peer._native)

    # ---- transfers

    def read(
        self,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        *,
        notify: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        num_tokens: int | None = None,
        local_start: int = 0,
        remote_start: int = 0,
    ) -> Transfer:
        """Pull blocks of the peer into local blocks.

        Parameters
        ----------
        peer : Peer
            Where from.
        plan : TransferPlan
            Local geometry against the peer's.
        local_blocks, remote_blocks : array_like of int
            Physical block numbers in token order, as in `TransferPlan.descriptors`.
        notify : bytes, optional
            Sent to the peer once all bytes are here; at most `MAX_NOTIFICATION_BYTES`.
        timeout : float
            Seconds until the transfer ends as timed out.
        num_tokens, local_start, remote_start : int
            As in `TransferPlan.descriptors`.

        Returns
        -------
        Transfer
            At once; whatever goes wrong later is its end state.

        Raises
        ------
        PlanError
            If the block tables do not fit, or the plan was made for another geometry of the peer.
        NotRegisteredError
            If the plan's memory is not registered on either side.
        PeerLostError, StalePeerError
            If this generation of the peer is not connected any more.
        ClosedError
            If the agent is closed.

        Notes
        -----
        Returns in microseconds without blocking: rows are made, posted and progressed on the
        engine's thread.
        """
        return self._submit(
            Operation.READ, peer, plan, local_blocks, remote_blocks, notify, timeout,
            num_tokens, local_start, remote_start,
        )  # fmt: skip

    def write(
        self,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        *,
        notify: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        num_tokens: int | None = None,
        local_start: int = 0,
        remote_start: int = 0,
    ) -> Transfer:
        """Push local blocks into blocks of the peer; everything else is as in `read`.

        The notification is sent when the bytes are visible at the peer.
        """
        return self._submit(
            Operation.WRITE, peer, plan, local_blocks, remote_blocks, notify, timeout,
            num_tokens, local_start, remote_start,
        )  # fmt: skip

    def _submit(
        self,
        op: Operation,
        peer: Peer,
        plan: TransferPlan,
        local_blocks: BlockTable,
        remote_blocks: BlockTable,
        notify: bytes | None,
        timeout: float,
        num_tokens: int | None,
        local_start: int,
        remote_start: int,
    ) -> Transfer:
        _check_message(notify)
        self._check_plan(peer, plan)
        tables = plan.tables(
            local_blocks,
            remote_blocks,
            num_tokens=num_tokens,
            local_start=local_start,
            remote_start=remote_start,
        )
        native = self._native.submit_plan(
            int(op),
            peer._native,
            self._program(plan),
            tables.ids,
            tables.headers,
            notify,
            timeout,
        )
        return Transfer(self, native, peer)

    def read_descriptors(
        self,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        *,
        notify: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Transfer:
        """Pull rows of memory that the caller has worked out.

        Parameters
        ----------
        peer : Peer
            Where from.
        local, remote : ndarray of uint64, shape (n, 3)
            Rows of address, length in bytes, device number, paired row by row; rows that are
            written must not overlap. Copied before this returns.
        notify, timeout
            As in `read`.

        Returns
        -------
        Transfer
            At once.

        Raises
        ------
        PlanError
            If rows do not pair, differ in length, are empty, or overlap where they are written.
        NotRegisteredError
            If a row is outside the registered memory of its side.
        PeerLostError, StalePeerError, ClosedError
            As in `read`.
        """
        return self._submit_rows(Operation.READ, peer, local, remote, notify, timeout)

    def write_descriptors(
        self,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        *,
        notify: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Transfer:
        """Push rows of memory that the caller has worked out; as `read_descriptors`."""
        return self._submit_rows(Operation.WRITE, peer, local, remote, notify, timeout)

    def _submit_rows(
        self,
        op: Operation,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        notify: bytes | None,
        timeout: float,
    ) -> Transfer:
        _check_message(notify)
        native = self._native.submit_rows(
            int(op), peer._native, _checked_rows("local", local), _checked_rows("remote", remote),
            notify, timeout,
        )  # fmt: skip
        return Transfer(self, native, peer)

    def _program(self, plan: TransferPlan) -> _native.EnginePlan:
        from pynixlkv import _native

        program = self._programs.get(plan)
        if program is None:
            program = self._programs[plan] = _native.EnginePlan(plan.program)
        return program

    def _check_plan(self, peer: Peer, plan: TransferPlan) -> None:
        if plan in peer._plans:
            return
        if plan.remote not in peer.geometries:
            raise PlanError(
                f"the plan's remote geometry is none of those that peer {peer.name!r} (generation "
                f"{peer.generation}) described; make a plan from peer.geometry"
            )
        peer._plans.add(plan)

    # ---- notifications

    def notify(self, peer: Peer, message: bytes) -> None:
        """Send a notification by itself.

        Parameters
        ----------
        peer : Peer
            Whom to tell.
        message : bytes
            At most `MAX_NOTIFICATION_BYTES`; may be empty.

        Raises
        ------
        ConfigError
            If the message is not bytes or too long.
        PeerLostError
            If the peer is not connected.

        Notes
        -----
        Returns when the library has queued it; delivery is not confirmed.
        """
        _check_message(message)
        self._native.notify(peer._native, message)

    def notifications(self, timeout: float = 0.0) -> list[Notification]:
        """Take the notifications that have arrived, each once, in order per sender.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds for the first; 0 does not wait.

        Returns
        -------
        list of Notification
            Empty if none came in time.
        """
        return [
            Notification(AgentName(peer), message)
            for peer, message in self._native.take_notifications(timeout)
        ]

    # ---- life

    @property
    def quarantined(self) -> int:
        """Transfers that have ended but may still move bytes."""
        return self._native.quarantined

    def close(self, timeout: float = _CLOSE_TIMEOUT_S) -> bool:
        """Cancel what runs, wait for quiet, deregister, disconnect. Idempotent.

        Parameters
        ----------
        timeout : float
            Longest wait in seconds.

        Returns
        -------
        bool
            True when everything is quiet and given back. False if transfers are still not quiet
            (a peer that hangs): then a background thread keeps them and their memory until they
            are, and the buffers must not be reused before another call returns True.
        """
        if os.getpid() != self._pid:
            return True  # the parent's agent is the parent's to close
        with self._close_lock:
            self._closed = True
            closed = self._native.close(timeout)
            if closed:
                self._registrations.clear()
        return closed

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_native", None) is None or os.getpid() != self._pid:
            return
        if not self._closed:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2)
        if not self._native.close(0.0):
            # Its thread and its buffers must outlive it until all is quiet.
            _keeper.park(self._native, self._registrations)

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        else:
            state = (
                f"{len(self._registrations)} registrations, {self._native.running} running, "
                f"{self._native.quarantined} quarantined"
            )
        return f"<{type(self).__name__} {self.name!r}: {state}>"


class _Keeper:
    """Knows the engines of the process: keeps dropped ones until quiet, stops all at exit."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[EngineAgent] = weakref.WeakSet()
        self._parked: list[tuple[_native.Engine, object]] = []
        self._pid = os.getpid()

    def add(self, agent: EngineAgent) -> None:
        if os.getpid() != self._pid:  # a forked child: what the parent had is not ours
            self.__init__()  # type: ignore[misc]
        self._parked = [(engine, kept) for engine, kept in self._parked if not engine.is_closed]
        self._live.add(agent)

    def park(self, engine: _native.Engine, kept: object) -> None:
        self._parked.append((engine, kept))

    def stop_all(self) -> None:
        if os.getpid() != self._pid:
            return
        engines = [agent._native for agent in self._live] + [engine for engine, _ in self._parked]
        for engine in engines:
            if not engine.close(_EXIT_TIMEOUT_S):
                engine.stop(_EXIT_TIMEOUT_S)


_keeper = _Keeper()
atexit.register(_keeper.stop_all)


def _span_arrays(spans: Iterable[MemorySpan]) -> tuple[npt.NDArray[np.uint64], list[int]]:
    spans = tuple(spans)
    rows = np.array([(s.address, s.nbytes, s.device) for s in spans], dtype=np.uint64)
    return rows.reshape(-1, 3), [int(MemoryType(s.memory)) for s in spans]


def _checked_rows(side: str, rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64 or rows.shape[1:] != (3,):
        seen = (
            f"{rows.dtype} of shape {rows.shape}"
            if isinstance(rows, np.ndarray)
            else type(rows).__name__
        )
        raise PlanError(f"{side} descriptors must be a uint64 array of shape (n, 3), not {seen}")
    return np.ascontiguousarray(rows)


def _check_message(message: bytes | None) -> None:
    if message is None:
        return
    if not isinstance(message, bytes):
        raise ConfigError(f"a notification must be bytes, not {type(message).__name__}")
    if len(message) > MAX_NOTIFICATION_BYTES:
        raise ConfigError(
            f"a notification of {len(message)} bytes exceeds the limit of {MAX_NOTIFICATION_BYTES}"
        )


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
