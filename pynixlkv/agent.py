"""`Agent`: registered memory, peers, transfers and notifications, over any transfer backend.

The native agent owns deadlines, end states, quarantine and peer generations, alike for every
backend. `NixlAgent`, `UcxAgent` and `FakeAgent` only start it with their driver.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import msgspec
import numpy as np

from pynixlkv._closeable import Closeable
from pynixlkv._limits import check_reserve
from pynixlkv._loader import has_rdma, rdma_devices, summary
from pynixlkv._secret import check_secret
from pynixlkv.errors import (
    ClosedError,
    ConfigError,
    DuplicatePeerError,
    HandshakeError,
    PeerLostError,
    PlanError,
    ProtocolVersionError,
)
from pynixlkv.geometry import memory_spans
from pynixlkv.hello import Hello
from pynixlkv.transfer import CLOSE_TIMEOUT_S, Completions, Notification, Peer, Transfer
from pynixlkv.transfer import TransferResult as TransferResult  # part of this module's face
from pynixlkv.types import AgentName, MemorySpan, MemoryType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from pynixlkv import _native
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
    "num_quarantined_agents",
]

MAX_NOTIFICATION_BYTES = 1 << 20
"""Longest notification: one eager message of the library must carry it."""

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of a transfer whose caller names none."""

_Result = TypeVar("_Result")

BlockTable: TypeAlias = "npt.ArrayLike | Mapping[str, npt.ArrayLike]"
"""Physical block numbers, of one group or by group name."""

Positions: TypeAlias = "int | Mapping[str, int]"
"""A token position, for all groups or by group name."""

Registerable: TypeAlias = "KVCache | MemorySpan | object"
"""What `Agent.register` takes: a cache, a span, a torch tensor or a numpy array."""

_log = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 0.8
_STOP_TIMEOUT_S = 0.2
_UINT64 = np.dtype(np.uint64)


class Registration(Closeable):
    """Memory registered with an agent; a context manager that deregisters.

    Until then the agent keeps the registration, and the registration keeps the tensors.
    """

    def __init__(
        self,
        agent: Agent,
        native: _native.transfer.Registration,
        spans: tuple[MemorySpan, ...],
        owners: object,
    ) -> None:
        self._agent = weakref.ref(agent)
        self._native = native
        self._spans = spans
        self._owners = owners

    @property
    def spans(self) -> tuple[MemorySpan, ...]:
        """The registered ranges."""
        return self._spans

    @property
    def nbytes(self) -> int:
        """Bytes registered."""
        return sum(span.nbytes for span in self._spans)

    def close(self) -> None:
        """Deregister; raises `RegistrationInUseError` while a transfer may move its bytes."""
        agent = self._agent()
        if agent is None or not self._native.is_open:
            raise ClosedError(f"{self!r} was deregistered before, or its agent is closed")
        agent._deregister(self._native)

    def __exit__(self, *exception: object) -> None:
        if self._native.is_open:
            self.close()

    def __repr__(self) -> str:
        state = f"{self._native.uses} uses" if self._native.is_open else "closed"
        return f"<Registration of {self.nbytes} bytes in {len(self._spans)} spans, {state}>"


class Agent(Closeable, ABC):
    """Moves bytes between registered memory here and at its peers. Safe from several threads.

    The base of `pynixlkv.nixl.NixlAgent`, `pynixlkv.ucx.UcxAgent` and
    `pynixlkv.testing.FakeAgent`, which pass one suite, `pynixlkv.testing.conformance`.

    Parameters
    ----------
    name : str
        Unique among the agents that talk to each other.
    backend_version : str
        Version of the library under the agent.
    secret : bytes or str, optional
        Key of the MAC on hello bytes; both sides need the same. Default: the environment variable
        ``PYNIXLKV_SECRET``, or none.
    """

    transfer_backend: ClassVar[str]
    """``"nixl"``, ``"ucx"`` or ``"fake"``; both sides of a connection need the same."""

    def __init__(
        self, name: str, *, backend_version: str, secret: bytes | str | None = None
    ) -> None:
        if not name or not isinstance(name, str):
            raise ConfigError(f"an agent's name must be a non-empty string, not {name!r}")
        self._backend_version = backend_version
        self._secret = check_secret(secret)
        self._incarnation = os.urandom(16)
        self._pid = os.getpid()
        self._native = self._start(name, self._incarnation)
        self._completions = Completions(self._native)
        self._registrations: dict[int, Registration] = {}
        self._close_lock = threading.Lock()
        self._closed = False
        _keeper.add(self)
        if _log.isEnabledFor(logging.INFO) and (transports := self._transports()):
            what = f"{type(self).__name__} {name!r} on {self.transfer_backend} {backend_version}"
            _log.info("%s: %s", what, summary(transports))

    @abstractmethod
    def _start(self, name: str, incarnation: bytes) -> _native.transfer.Agent:
        """Start the native agent."""

    def _transports(self) -> tuple[str, ...]:
        """Return UCX's transports, as "transport/device"; empty without UCX."""
        return ()

    # ---- memory

    @property
    def name(self) -> AgentName:
        """Name of the agent, unique among the agents that talk to each other."""
        return AgentName(self._native.name)

    def register(self, *memory: Registerable) -> Registration:
        """Register memory for transfers, without copying it.

        Tensors and arrays must be contiguous. The agent keeps the memory until the registration is
        closed.

        Raises
        ------
        ConfigError
            If there is nothing to register, or an array has 0 bytes.
        LayoutError
            If an argument is not contiguous, or neither tensor nor array.
        AlreadyRegisteredError
            If a range overlaps registered memory.
        NativeError
            If the library refuses the memory.
        """
        spans = tuple(span for item in memory for span in memory_spans(item))
        native = self._native.register_memory(*span_arrays(spans))
        spans = tuple(
            msgspec.structs.replace(span, read_only=True) if read_only else span
            for span, read_only in zip(spans, native.read_only, strict=True)
        )
        registration = Registration(self, native, _with_kinds(spans), memory)
        self._registrations[id(native)] = registration
        return registration

    def _deregister(self, native: _native.transfer.Registration) -> None:
        self._native.deregister(native)
        self._registrations.pop(id(native), None)  # a close of the agent may have been faster

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The open registrations."""
        return tuple(self._registrations.values())

    # ---- peers

    def hello(self, *caches: KVCache) -> bytes:
        """Return this agent's metadata for a peer's `connect`, with caches for it to plan against.

        The bytes are a secret: every holder can read and write the registered memory.

        Raises
        ------
        NotRegisteredError
            If a cache lies outside the registered memory.
        ClosedError
            If the agent is closed.
        """
        for cache in caches:
            self._native.check_registered(span_arrays(cache.spans)[0])
        return Hello(
            agent=self.name,
            incarnation=self._incarnation,
            transfer_backend=self.transfer_backend,
            backend_version=self._backend_version,
            metadata=self._native.metadata(),
            byte_order=sys.byteorder,
            spans=[span for r in self.registrations for span in r.spans],
            geometries=[cache.geometry for cache in caches],
        ).seal(self._secret)

    def connect(self, hello: bytes) -> Peer:
        """Connect to the agent of a hello, or update its registered memory if it is connected.

        A successor of the same name becomes a new generation, once the old one is lost or
        disconnected. The hello is untrusted, and verified before any native code sees it.

        Raises
        ------
        WireError
            If the bytes are damaged or forged.
        ProtocolVersionError
            If the hello's format or the library's version differs.
        HandshakeError
            If the transfer backend or the byte order differs.
        DuplicatePeerError
            If a live agent of that name is connected, or the name is this agent's own.
        NativeError
            If the library refuses the metadata.
        """
        self._check_reserve()
        body = Hello.unseal(hello, self._secret)
        self._check_compatible(body)
        native = self._native.connect(
            body.agent, body.incarnation, body.metadata, *span_arrays(body.spans)
        )
        theirs = [span for span in body.spans if span.memory is MemoryType.VRAM]
        is_closed = bool(theirs) and not any(span.is_exportable for span in theirs)
        peer = Peer(native, body.geometries, {"cuda_ipc"} if is_closed else set())
        self._warn_of_staging(peer, theirs)
        return peer

    def _warn_of_staging(self, peer: Peer, theirs: list[MemorySpan]) -> None:
        """Say so if GPU memory of either side has no way to the other but through the host."""
        spans = (span for each in self.registrations for span in each.spans)
        mine = [span for span in spans if span.memory is MemoryType.VRAM]
        if not mine and not theirs:
            return
        names = set(peer.transports)
        if not names:  # NIXL's: what its UCX has opened, as far as it can reach the peer
            names = {each.split("/")[0] for each in self._transports()} - peer._unused
            if not peer._native.is_local:
                names.discard("cuda_ipc")
        # The side that posts opens the other's memory; network cards reach into both.
        has_ipc, has_cards = "cuda_ipc" in names, has_rdma(names)
        staged = [s for s in mine if not has_ipc and not (has_cards and s.is_rdma_capable)]
        staged += [
            s
            for s in theirs
            if not (has_ipc and s.is_exportable) and not (has_cards and s.is_rdma_capable)
        ]
        if staged and names:
            _log.warning(
                "GPU memory, %.1f MiB of both sides, moves to and from peer %r through host memory "
                "and %s, %.1f KiB for each token: UCX has neither cuda_ipc (for processes of one "
                "host) nor RDMA for it; see pynixlkv.native_report(), and what the log says of "
                "its allocation",
                sum(span.nbytes for span in staged) / (1 << 20),
                peer.name,
                ", ".join(sorted(names - {"cuda_copy", "cuda_ipc", "self"})),
                max(map(_bytes_per_token, peer.geometries), default=0.0) / (1 << 10),
            )

    def _check_reserve(self) -> None:
        """Raise `ResourceExhausted` unless the library can open what a connection takes."""
        check_reserve("a connection")

    def _check_compatible(self, hello: Hello) -> None:
        if hello.agent == self.name:
            raise DuplicatePeerError(
                f"the hello is from an agent with this agent's own name {hello.agent!r}; "
                "agent names must be unique"
            )
        if hello.transfer_backend != self.transfer_backend:
            raise HandshakeError(
                f"peer {hello.agent!r} has the transfer backend {hello.transfer_backend!r}, this "
                f"agent {self.transfer_backend!r}; both sides need the same",
                peer=hello.agent,
            )
        if hello.byte_order != sys.byteorder:
            raise HandshakeError(
                f"peer {hello.agent!r} runs on a {hello.byte_order}-endian machine, this agent on "
                f"a {sys.byteorder}-endian one; both sides need the same",
                peer=hello.agent,
            )
        if hello.backend_version.split(".")[:2] != self._backend_version.split(".")[:2]:
            raise ProtocolVersionError(
                f"peer {hello.agent!r} runs {hello.transfer_backend} {hello.backend_version}, this "
                f"agent {self._backend_version}; their first two numbers must agree",
                peer=hello.agent,
                local_version=self._backend_version,
                remote_version=hello.backend_version,
            )

    def is_alive(self, peer: Peer) -> bool:
        """Ask the library whether the connection to a peer stands; costs a small message.

        A stopped process counts as alive. If the connection is gone, the peer's transfers end.
        """
        return self._native.is_alive(peer._native)

    def disconnect(self, peer: Peer) -> None:
        """Cancel the peer's transfers and forget it once they are quiet."""
        self._native.disconnect(peer._native)

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
            Sent to the peer when all bytes have arrived; at most `MAX_NOTIFICATION_BYTES`.
        timeout : float
            Seconds until the transfer ends as timed out.
        num_tokens, local_start, remote_start : int or mapping of str to int
            As in `TransferPlan.descriptors`.

        Returns
        -------
        Transfer
            In microseconds: the agent's thread expands, posts and progresses the transfer. Later
            failures are end states of the transfer.

        Raises
        ------
        PlanError
            If the block tables do not fit, or the plan is for another geometry of the peer.
        NotRegisteredError
            If the plan's memory is not registered on one of the sides.
        PeerLostError, StalePeerError
            If this generation of the peer is no longer connected.
        ClosedError
            If the agent is closed.
        """
        tables = plan.tables(local_blocks, remote_blocks, num_tokens, local_start, remote_start)
        return self._submit(Operation.READ, peer, plan, tables, notify, timeout)

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
        """Push local blocks into blocks of the peer; otherwise as `read`.

        The notification is sent when the bytes are visible at the peer.
        """
        tables = plan.tables(local_blocks, remote_blocks, num_tokens, local_start, remote_start)
        return self._submit(Operation.WRITE, peer, plan, tables, notify, timeout)

    def _submit(
        self,
        op: Operation,
        peer: Peer,
        plan: TransferPlan,
        tables: _native.kv.BlockTables,
        notify: bytes | None,
        timeout: float,
    ) -> Transfer:
        _check_message(notify)
        self._check_plan(peer, plan)
        submit = self._native.submit_plan
        native = self._with(peer, submit, int(op), peer._native, tables, notify, timeout)
        return self._transfer(native, peer)

    def read_descriptors(
        self,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        *,
        notify: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Transfer:
        """Pull memory by descriptors instead of by a plan; otherwise as `read`.

        Parameters
        ----------
        peer : Peer
            Where from.
        local, remote : ndarray of uint64, shape (n, 3)
            Descriptors (address, length in bytes, device number), paired by index; those that are
            written must not overlap. Copied before the call returns.
        notify, timeout
            As in `read`.

        Raises
        ------
        PlanError
            If descriptors do not pair, are empty, or overlap on the written side.
        """
        return self._submit_descriptors(Operation.READ, peer, local, remote, notify, timeout)

    def write_descriptors(
        self,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        *,
        notify: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Transfer:
        """Push memory by descriptors; otherwise as `read_descriptors`."""
        return self._submit_descriptors(Operation.WRITE, peer, local, remote, notify, timeout)

    def _submit_descriptors(
        self,
        op: Operation,
        peer: Peer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        notify: bytes | None,
        timeout: float,
    ) -> Transfer:
        _check_message(notify)
        _check_descriptors("local", local)
        _check_descriptors("remote", remote)
        submit = self._native.submit_descriptors
        native = self._with(peer, submit, int(op), peer._native, local, remote, notify, timeout)
        return self._transfer(native, peer)

    def _with(self, peer: Peer, call: Callable[..., _Result], *args: object) -> _Result:
        """Make a native call that concerns a peer; the error names one that is lost."""
        try:
            return call(*args)
        except PeerLostError as error:
            error.peer = peer.name
            raise

    def _transfer(self, native: _native.transfer.Transfer, peer: Peer) -> Transfer:
        return Transfer(native, peer, self._cancel, self._completions.wait)

    def _cancel(self, native: _native.transfer.Transfer) -> None:
        self._native.cancel(native)

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
        """Send a notification of at most `MAX_NOTIFICATION_BYTES`, without a transfer.

        Returns when the library has queued the message; delivery is not confirmed.

        Raises
        ------
        ConfigError
            If the message is not bytes, or too long.
        PeerLostError
            If the peer is not connected.
        """
        _check_message(message)
        self._with(peer, self._native.notify, peer._native, message)

    def notifications(self, timeout: float = 0.0) -> list[Notification]:
        """Take the notifications that have arrived, each once, in order per sender.

        Waits up to `timeout` seconds for the first; returns an empty list if none came.
        """
        return [
            Notification(AgentName(peer), message)
            for peer, message in self._native.take_notifications(timeout)
        ]

    def wait_activity(self, seen: int, timeout: float) -> int:
        """Wait up to `timeout` seconds for activity, and return the activity counter.

        Activity is a notification, a transfer that ended or became quiet, or a call of `wake`; one
        thread can watch any number of transfers and peers. `seen` is the counter of the previous
        call, 0 at first; activity between two calls is not missed. The counter is unchanged on
        timeout. Blocks without the GIL.
        """
        return self._native.wait_activity(seen, timeout)

    def wake(self) -> None:
        """Let `wait_activity` return in all threads."""
        self._native.wake_waiters()

    # ---- life

    @property
    def quarantined(self) -> int:
        """Transfers that have ended but may still move bytes."""
        return self._native.quarantined

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """Cancel all transfers, wait for quiet, deregister, disconnect. Idempotent.

        Returns whether everything is released. If not within `timeout` seconds (a peer hangs), a
        background thread keeps the transfers and their memory until they are quiet; do not reuse
        the buffers before another call returns True.
        """
        if os.getpid() != self._pid:
            return True  # only the parent can close its agent
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
        if sys.is_finalizing():  # all agents were stopped at exit
            return
        if not self._closed:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2)
        if not self._native.close(0.0):
            # Its thread and its buffers must outlive the agent until all transfers are quiet.
            _keeper.quarantined.append((self._native, self._registrations))

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
    """Keeps dropped agents until they are quiet, and stops all agents at exit."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Agent] = weakref.WeakSet()
        self.quarantined: list[tuple[_native.transfer.Agent, object]] = []
        self._pid = os.getpid()

    def add(self, agent: Agent) -> None:
        if os.getpid() != self._pid:  # a forked child does not own the parent's agents
            self.__init__()  # type: ignore[misc]
        self.reap()
        self._live.add(agent)

    def reap(self) -> int:
        self.quarantined = [entry for entry in self.quarantined if not entry[0].is_closed]
        return len(self.quarantined)

    def stop_all(self) -> None:
        if os.getpid() != self._pid:
            return
        agents = [agent._native for agent in self._live]
        agents += [native for native, _ in self.quarantined]
        for native in agents:
            native.close(0.0)  # all begin to close before the first is waited for
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        late = [a for a in agents if not a.close(max(deadline - time.monotonic(), 0.0))]
        for timeout in (0.0, _STOP_TIMEOUT_S):
            for native in late:
                native.stop(timeout / len(late))


_keeper = _Keeper()
atexit.register(_keeper.stop_all)


def num_quarantined_agents() -> int:
    """Return how many dropped agents still have transfers that may move bytes.

    Each keeps its thread and its registered memory until it is quiet.
    """
    return _keeper.reap()


def check_strings(what: str, settings: Mapping[Any, Any]) -> None:
    """Raise `ConfigError` for a setting of a transfer backend that is not a string for a string."""
    for key, value in settings.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"{what} {key!r}: {value!r} must be a string for a string")


def _bytes_per_token(geometry: Geometry) -> float:
    groups = [group for group in geometry.groups if group.block_size]
    return sum(
        math.prod(axis.count for axis in (r.layer, r.kv, r.head, r.token, r.dim))
        * (group.element_bytes / group.block_tokens)
        for group in groups
        for r in group.regions
    )


def _with_kinds(spans: tuple[MemorySpan, ...]) -> tuple[MemorySpan, ...]:
    """Say of device memory what can reach it, and warn of what only the host's copies can."""
    from pynixlkv import _native

    found = []
    sizes: Counter[tuple[int, str, str, bool, bool]] = Counter()
    for span in spans:
        is_on_device = span.memory is MemoryType.VRAM
        kind = _native.transfer.device_memory_kind(span.address) if is_on_device else None
        if kind is not None:
            sizes.update({(span.device, *kind): span.nbytes})
            span = msgspec.structs.replace(span, is_exportable=kind[2], is_rdma_capable=kind[3])
        found.append(span)
    for (device, name, advice, is_exportable, is_rdma_capable), nbytes in sizes.items():
        unable = [] if is_exportable else ["other processes of this host"]
        if not is_rdma_capable and (cards := rdma_devices()):
            unable.append(f"the network cards {', '.join(cards)}")
        if unable:
            what = f"{nbytes} bytes on GPU {device} are {name}, which {' and '.join(unable)}"
            _log.warning(
                "%s cannot reach: they will be copied through host memory; %s", what, advice
            )
    return tuple(found)


def span_arrays(
    spans: Iterable[MemorySpan],
) -> tuple[npt.NDArray[np.uint64], list[int], list[bool]]:
    spans = tuple(spans)
    rows = np.array([(s.address, s.nbytes, s.device) for s in spans], dtype=np.uint64)
    kinds = [int(MemoryType(s.memory)) for s in spans]
    return rows.reshape(-1, 3), kinds, [s.read_only for s in spans]


def _check_descriptors(side: str, rows: object) -> None:
    if not isinstance(rows, np.ndarray) or rows.dtype != _UINT64 or rows.shape[1:] != (3,):
        seen = (
            f"{rows.dtype} of shape {rows.shape}"
            if isinstance(rows, np.ndarray)
            else type(rows).__name__
        )
        raise PlanError(f"{side} descriptors must be a uint64 array of shape (n, 3), not {seen}")


def _check_message(message: object) -> None:
    if message is None:
        return
    if not isinstance(message, bytes):
        raise ConfigError(f"a notification must be bytes, not {type(message).__name__}")
    if len(message) > MAX_NOTIFICATION_BYTES:
        raise ConfigError(
            f"a notification of {len(message)} bytes exceeds the limit of {MAX_NOTIFICATION_BYTES}"
        )
