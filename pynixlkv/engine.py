"""`EngineAgent`: the `pynixlkv.agent.Agent` protocol over the native transfer engine.

The engine owns deadlines, end states, quarantine and peer generations, the same for every library;
`pynixlkv.nixl.NixlAgent` and `pynixlkv.testing.FakeAgent` add nothing but the driver under it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pynixlkv import _native, wire
from pynixlkv._closeable import Closeable
from pynixlkv.agent import (
    CLOSE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    MAX_NOTIFICATION_BYTES,
    Notification,
    Peer,
    Registration,
    Transfer,
)
from pynixlkv.errors import (
    ConfigError,
    DuplicatePeerError,
    HandshakeError,
    PlanError,
    ProtocolVersionError,
)
from pynixlkv.geometry import Geometry, KVCache, memory_spans
from pynixlkv.types import AgentName, MemorySpan, MemoryType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from pynixlkv.agent import BlockTable, Positions, Registerable
    from pynixlkv.plan import TransferPlan

__all__ = ["EngineAgent", "num_parked"]

_EXIT_TIMEOUT_S = 1.0


class _Completions:
    """Wakes the event loops that await transfers of one agent, through one file descriptor."""

    def __init__(self, native: _native.transfer.Engine) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}

    async def wait(self, transfer: _native.transfer.Transfer) -> None:
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


class EngineAgent(Closeable):
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
        make_engine: Callable[[bytes], _native.transfer.Engine],
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
        self._close_lock = threading.Lock()
        self._closed = False
        _keeper.add(self)

    @staticmethod
    def _check_name(name: object) -> None:
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
        NativeError
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
                byte_order=sys.byteorder,
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
        NativeError
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
        if body.byte_order != sys.byteorder:
            raise HandshakeError(
                f"peer {body.agent!r} runs on a {body.byte_order}-endian machine, this agent on a "
                f"{sys.byteorder}-endian one; both sides need the same",
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
        num_tokens: Positions | None = None,
        local_start: Positions = 0,
        remote_start: Positions = 0,
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
        num_tokens, local_start, remote_start : int or mapping of str to int
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
        num_tokens: Positions | None = None,
        local_start: Positions = 0,
        remote_start: Positions = 0,
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
        num_tokens: Positions | None,
        local_start: Positions,
        remote_start: Positions,
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
        native = self._native.submit_plan(int(op), peer._native, tables, notify, timeout)
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

    def wait_activity(self, seen: int, timeout: float) -> int:
        """Wait until something has happened here.

        That is: a notification has come, a transfer has ended or become quiet, or `wake` was
        called. One thread can so look after any number of transfers and peers.

        Parameters
        ----------
        seen : int
            What the call before returned; 0 at first.
        timeout : float
            Longest wait in seconds.

        Returns
        -------
        int
            A count that grows with whatever happens; equal to `seen` if nothing did in time.

        Notes
        -----
        Blocks without the GIL. What happened between two calls is never missed.
        """
        return self._native.wait_activity(seen, timeout)

    def wake(self) -> None:
        """Let `wait_activity` return, in whichever threads wait in it."""
        self._native.wake_waiters()

    # ---- life

    @property
    def quarantined(self) -> int:
        """Transfers that have ended but may still move bytes."""
        return self._native.quarantined

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
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

    def __del__(self) -> None:
        if getattr(self, "_native", None) is None or os.getpid() != self._pid:
            return
        if sys.is_finalizing():  # all engines were stopped at exit
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
        self._parked: list[tuple[_native.transfer.Engine, object]] = []
        self._pid = os.getpid()

    def add(self, agent: EngineAgent) -> None:
        if os.getpid() != self._pid:  # a forked child: what the parent had is not ours
            self.__init__()  # type: ignore[misc]
        self.reap()
        self._live.add(agent)

    def reap(self) -> int:
        self._parked = [(engine, kept) for engine, kept in self._parked if not engine.is_closed]
        return len(self._parked)

    def park(self, engine: _native.transfer.Engine, kept: object) -> None:
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


def num_parked() -> int:
    """Return how many agents were dropped while transfers could still move bytes, and still can.

    Returns
    -------
    int
        Each keeps its thread and its registered memory until it is quiet.
    """
    return _keeper.reap()


def _span_arrays(spans: Iterable[MemorySpan]) -> tuple[npt.NDArray[np.uint64], list[int]]:
    spans = tuple(spans)
    rows = np.array([(s.address, s.nbytes, s.device) for s in spans], dtype=np.uint64)
    return rows.reshape(-1, 3), [int(MemoryType(s.memory)) for s in spans]


def _checked_rows(side: str, rows: object) -> npt.NDArray[np.uint64]:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint64 or rows.shape[1:] != (3,):
        seen = (
            f"{rows.dtype} of shape {rows.shape}"
            if isinstance(rows, np.ndarray)
            else type(rows).__name__
        )
        raise PlanError(f"{side} descriptors must be a uint64 array of shape (n, 3), not {seen}")
    return np.ascontiguousarray(rows)


def _check_message(message: object) -> None:
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
