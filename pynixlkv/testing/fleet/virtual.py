"""Virtual time, and agents on a network in it: `FakeAgent` without threads.

A call that waits lets the time pass that it waits for, unless it is made by an event.

Everything happens in events, one after another, on one thread. So a run depends on its seed alone,
and takes as long as the events need, not as long as the time that they are about.

A `VirtualAgent` is an `Agent` whose native half is replaced. It keeps the same promises: end states
that never change, transfers that are not quiet before their bytes are, generations of peers. Its
transfers are made by the real planner, and copy real bytes when the virtual network has moved them.
"""

from __future__ import annotations

import ctypes
import heapq
from collections import deque
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pynixlkv.agent import Agent
from pynixlkv.errors import (
    AlreadyRegisteredError,
    ClosedError,
    ConfigError,
    DuplicatePeerError,
    NotRegisteredError,
    PeerLostError,
    RegistrationInUseError,
    StalePeerError,
)
from pynixlkv.types import Operation, TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    import numpy.typing as npt

    from pynixlkv import _native

_Row: TypeAlias = tuple[int, int, int]
"""Local and remote address, and length."""
_Span: TypeAlias = tuple[int, int]
"""Begin and end of registered memory."""

_CONNECTED, _LOST, _DISCONNECTED = range(3)


def _spans(rows: Iterable[Any]) -> list[_Span]:
    return [(int(row[0]), int(row[0] + row[1])) for row in rows]


def _is_inside(address: int, length: int, spans: list[_Span]) -> bool:
    return any(begin <= address and address + length <= end for begin, end in spans)


class Events:
    """The queue of what is going to happen, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._next = 0
        self._is_running = False

    def at(self, when: float, action: Callable[..., object], *args: object) -> None:
        """Call a function at a time; those of one time run in the order of these calls."""
        self._next += 1
        heapq.heappush(self._queue, (max(when, self.now), self._next, action, args))

    def after(self, seconds: float, action: Callable[..., object], *args: object) -> None:
        """Call a function after some time."""
        self.at(self.now + seconds, action, *args)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, until then or something."""
        queue, self._is_running = self._queue, True
        try:
            while not is_over():
                if not queue or queue[0][0] > until:
                    self.now = until
                    return
                self.now, _, action, args = heapq.heappop(queue)
                self.num_done += 1
                action(*args)
        finally:
            self._is_running = False

    def wait(self, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Let time pass until something, and return whether it came; an event waits for nothing."""
        if not self._is_running:
            self.run(self.now + timeout, is_over)
        return is_over()


class Link:
    """A cable, or the share of a switch: transfers pass through it one after another."""

    def __init__(self, gb_per_s: float) -> None:
        """Make a link of a speed in Gb/s."""
        self.bytes_per_s = gb_per_s * 1e9 / 8
        self.free_at = 0.0

    def pass_through(self, now: float, num_bytes: float) -> float:
        """Return when the last byte has passed."""
        self.free_at = max(self.free_at, now) + num_bytes / self.bytes_per_s
        return self.free_at


class Host:
    """Where the ranks of an engine run; its state is that of its network."""

    def __init__(self, rack: int, uplink: Link, latency: float, slowness: float = 1.0) -> None:
        self.rack, self.uplink, self.latency, self.slowness = rack, uplink, latency, slowness
        self.is_silent = False
        """Its power is gone: nothing answers, and no connection is closed."""


class Network:
    """The hosts and agents that reach each other.

    Parameters
    ----------
    events : Events
        Time.
    detection : float
        Seconds until a connection over which nothing passes counts as lost.
    """

    def __init__(self, events: Events, detection: float = 20.0) -> None:
        self.events, self.detection = events, detection
        self.agents: dict[str, VirtualNative] = {}
        self.split: frozenset[int] = frozenset()
        """Racks that do not reach the others."""
        self.num_notifications = self.num_notification_bytes = 0
        self.num_transfers = self.num_rows = self.num_moved = self.num_connects = 0
        self.num_peers = 0
        self.changed_at = 0.0
        self._stalled: list[VirtualTransfer] = []

    def reaches(self, one: Host, other: Host) -> bool:
        """Whether packets pass."""
        if one.is_silent or other.is_silent:
            return False
        return (one.rack in self.split) == (other.rack in self.split)

    @staticmethod
    def latency(one: Host, other: Host) -> float:
        """Return the time of a packet in one direction."""
        way = one.latency + (0 if one is other else other.latency)
        return way * max(one.slowness, other.slowness)

    def stall(self, transfer: VirtualTransfer) -> None:
        """Keep a transfer until packets pass again, or its deadline comes."""
        self._stalled.append(transfer)
        self.events.at(transfer.deadline, transfer.expire)

    def changed(self) -> None:
        """Go on with what passes again; later, lose the connections over which nothing does."""
        self.changed_at = self.events.now
        stalled, self._stalled = self._stalled, []
        for transfer in stalled:
            transfer.go_on()
        self.events.after(self.detection, self._detect, self.split)

    def _detect(self, split: frozenset[int]) -> None:
        if self.split is not split:
            return  # each partition has its own time to be noticed
        for agent in list(self.agents.values()):
            for peer in list(agent.links.values()):
                if peer.state == _CONNECTED and not self.reaches(agent.host, peer.target.host):
                    peer.lose()


class VirtualPeer:
    """Stands for the native peer of one agent at another."""

    transports: ClassVar[list[str]] = ["virtual"]

    def __init__(self, owner: VirtualNative, target: VirtualNative, generation: int) -> None:
        self.owner, self.target, self.generation = owner, target, generation
        self.name = target.name
        self.state = _CONNECTED
        self.last_used = self.last_heard = owner.events.now
        self.memory: list[_Span] = []
        owner.network.num_peers += 1

    def lose(self) -> None:
        """Note that the connection is gone: it ends what runs over it."""
        if self.state == _CONNECTED:
            self.end(_LOST, TransferState.PEER_LOST, f"the connection to {self.name!r} broke")

    def end(self, state: int, of_transfers: TransferState, why: str) -> None:
        """Leave the connected state."""
        self.state = state
        self.owner.network.num_peers -= 1
        self.target.users.discard(self)
        for transfer in [t for t in self.owner.active.values() if t.peer is self]:
            transfer.end(of_transfers, why)
            if state == _LOST:
                transfer.be_quiet()
        if self.owner.links.get(self.name) is self:
            del self.owner.links[self.name]
        self.owner.wake_waiters()


class VirtualTransfer:
    """Stands for a native transfer."""

    cause = None

    def __init__(
        self, owner: VirtualNative, peer: VirtualPeer, op: int, rows: list[_Row], timeout: float
    ) -> None:
        self.owner, self.peer, self.op, self.rows = owner, peer, op, rows
        self.id = owner.next_id()
        self.began = owner.events.now
        self.deadline = self.began + timeout
        self.state: int = TransferState.RUNNING
        self.is_quiet = False
        self.message = ""
        self.notify: bytes | None = None
        """What the peer is told when all bytes have moved."""
        self.took = 0.0
        self.left = list(rows)
        self.num_bytes = sum(row[2] for row in rows)

    @property
    def bytes_done(self) -> int:
        """Bytes that have arrived."""
        return self.num_bytes - sum(row[2] for row in self.left)

    @property
    def result(self) -> tuple[int, int, int, bool, float, float, float, float, float]:
        """The fields of a `TransferResult`."""
        return self.num_bytes, len(self.rows), 1, False, 0.0, 0.0, 0.0, 0.0, self.took

    def copy(self, count: int) -> None:
        """Move the next rows."""
        now, self.left = self.left[:count], self.left[count:]
        for here, there, size in now:
            ctypes.memmove(*((here, there) if self.op == Operation.READ else (there, here)), size)

    def begin(self, finish: float) -> None:
        """Let the first half of the bytes move; the rest follows."""
        if self.is_quiet:
            return
        if not self._passes():
            self.owner.network.stall(self)
            return
        self.copy(len(self.left) // 2)
        self.owner.events.at(finish, self.go_on)

    def go_on(self) -> None:
        """Let the rest of the bytes move, unless packets do not pass."""
        if self.is_quiet:
            return
        if not self._passes():
            self.owner.network.stall(self)
            return
        self.copy(len(self.left))
        self.end(TransferState.DONE, "")
        if self.state == TransferState.DONE and self.notify is not None:
            self.owner.notify(self.peer, self.notify)
        self.be_quiet()

    def _passes(self) -> bool:
        return self.owner.reaches(self.peer.target)

    def expire(self) -> None:
        """Note that the deadline has come."""
        self.end(TransferState.TIMED_OUT, f"transfer {self.id} passed its deadline")

    def end(self, state: TransferState, message: str) -> None:
        """Reach an end state, once."""
        if self.state < TransferState.DONE:
            self.state, self.message = int(state), message
            self.took = self.owner.events.now - self.began
            self.owner.wake_waiters()

    def be_quiet(self) -> None:
        """Note that no byte moves any more."""
        if not self.is_quiet:
            self.is_quiet = True
            self.owner.active.pop(self.id, None)
            self.peer.target.served.pop((self.owner.name, self.id), None)
            self.owner.wake_waiters()

    def wait(self, timeout: float, for_quiet: bool = False) -> bool:
        """Wait for its end, or for quiet."""
        return self.owner.events.wait(
            timeout, lambda: self.is_quiet if for_quiet else self.state >= TransferState.DONE
        )


class VirtualRegistration:
    """Stands for a native registration."""

    def __init__(self, owner: VirtualNative, spans: list[_Span], read_only: list[bool]) -> None:
        self._owner, self.spans, self.read_only = owner, spans, read_only

    @property
    def is_open(self) -> bool:
        """Whether its memory is registered."""
        return set(self.spans) <= set(self._owner.memory)

    @property
    def uses(self) -> int:
        """Transfers that may move its bytes."""
        moving = self._owner.active.values()
        return sum(any(_is_inside(r[0], r[2], self.spans) for r in t.rows) for t in moving)


class VirtualNative:
    """Stands for the native half of an agent."""

    completion_fd = -1

    def __init__(self, name: str, incarnation: bytes, network: Network, host: Host) -> None:
        if name in network.agents:
            raise DuplicatePeerError(f"the network has a live agent of the name {name!r}")
        self.name, self.incarnation, self.network, self.host = name, incarnation, network, host
        self.events = network.events
        self.link = Link(100.0)
        self.on_activity: Callable[[], None] = lambda: None
        self.factors: list[tuple[int, int, float]] = []
        """Ranges of memory, and how many bytes of the network one byte there stands for."""
        self.memory: list[_Span] = []
        self.links: dict[str, VirtualPeer] = {}
        self.users: set[VirtualPeer] = set()
        """Connections of others to this agent."""
        self.active: dict[int, VirtualTransfer] = {}
        """Its transfers that are not quiet."""
        self.served: dict[tuple[str, int], VirtualTransfer] = {}
        """Those of others that touch its memory."""
        self.inbox: list[tuple[str, bytes]] = []
        self.is_closed = False
        self.num_sent = self.num_submitted = 0
        self._generations: dict[str, int] = {}
        self._last_id = 0
        network.agents[name] = self

    def next_id(self) -> int:
        """Return a number for a transfer."""
        self._last_id += 1
        return self._last_id

    # ---- what `Agent` calls

    def register_memory(
        self, rows: Iterable[Any], kinds: list[int], read_only: list[bool]
    ) -> VirtualRegistration:
        """Note ranges of memory."""
        self._check_open()
        spans = _spans(rows)
        if not spans:
            raise ConfigError("there is no memory to register")
        if any(a < end and begin < b for begin, end in spans for a, b in self.memory):
            raise AlreadyRegisteredError("a part of the memory is registered")
        self.memory += spans
        return VirtualRegistration(self, spans, list(read_only)[: len(kinds)])

    def check_registered(self, rows: Iterable[Any]) -> None:
        """Raise unless ranges are registered."""
        for begin, end in _spans(rows):
            if not _is_inside(begin, end - begin, self.memory):
                raise NotRegisteredError(f"{end - begin} bytes at {begin:#x} are not registered")

    def deregister(self, registration: VirtualRegistration) -> None:
        """Forget a registration."""
        if registration.uses:
            raise RegistrationInUseError(f"{registration.uses} transfers may move its bytes")
        self.memory = [span for span in self.memory if span not in registration.spans]

    def metadata(self) -> bytes:
        """Return what `connect` of another agent needs."""
        self._check_open()
        return self.incarnation

    def connect(
        self, name: str, incarnation: bytes, _metadata: bytes, rows: Iterable[Any], *_: object
    ) -> VirtualPeer:
        """Connect, or return the connection with what is registered there now."""
        self._check_open()
        known = self.links.get(name)
        if known is not None and known.target.incarnation == incarnation:
            known.memory = _spans(rows)
            return known
        if known is not None:
            if self.is_alive(known):
                raise DuplicatePeerError(f"another live agent named {name!r} is connected")
            known.lose()
        target = self.network.agents.get(name)
        if target is None or target.incarnation != incarnation or not self.reaches(target):
            raise PeerLostError(f"{name!r} cannot be reached", peer=name)
        generation = self._generations[name] = self._generations.get(name, 0) + 1
        peer = self.links[name] = VirtualPeer(self, target, generation)
        peer.memory = _spans(rows)
        target.users.add(peer)
        self.network.num_connects += 1
        return peer

    def reaches(self, target: VirtualNative) -> bool:
        """Whether packets reach a living agent."""
        return not target.is_closed and self.network.reaches(self.host, target.host)

    def is_alive(self, peer: VirtualPeer) -> bool:
        """Whether the other end has not closed the connection; one that is silent has not."""
        return peer.state == _CONNECTED and not peer.target.is_closed

    def disconnect(self, peer: VirtualPeer) -> None:
        """Forget a peer."""
        if peer.state == _CONNECTED:
            peer.end(_DISCONNECTED, TransferState.CANCELLED, "the peer was disconnected")

    def submit_plan(
        self,
        op: int,
        peer: VirtualPeer,
        tables: _native.kv.BlockTables,
        notify: bytes | None,
        timeout: float,
    ) -> VirtualTransfer:
        """Begin a transfer."""
        tables.check_written_once(remote=op == Operation.WRITE)
        local, remote = tables.descriptors()
        return self.submit_descriptors(op, peer, local, remote, notify, timeout)

    def submit_descriptors(
        self,
        op: int,
        peer: VirtualPeer,
        local: npt.NDArray[np.uint64],
        remote: npt.NDArray[np.uint64],
        notify: bytes | None,
        timeout: float,
    ) -> VirtualTransfer:
        """Begin a transfer of rows that fit each other."""
        self._check_usable(peer)
        if not timeout > 0:
            raise ConfigError(f"the timeout is {timeout}; expected seconds above 0")
        pairs = zip(local.tolist(), remote.tolist(), strict=True)
        rows = [(here[0], there[0], here[1]) for here, there in pairs]
        for here, there, size in rows:
            if not _is_inside(here, size, self.memory):
                raise NotRegisteredError(f"{size} bytes at {here:#x} are not registered")
            if not _is_inside(there, size, peer.memory):
                raise NotRegisteredError(f"{peer.name!r} has not registered {size} at {there:#x}")
        transfer = VirtualTransfer(self, peer, op, rows, timeout)
        transfer.notify = notify
        target, events = peer.target, self.events
        self.active[transfer.id] = target.served[self.name, transfer.id] = transfer
        network = self.network
        network.num_transfers += 1
        network.num_rows += len(rows)
        self.num_submitted += 1
        first = rows[0][0] if rows else 0
        factor = next((f for begin, end, f in self.factors if begin <= first < end), 0.0)
        way = network.latency(self.host, target.host)
        there = events.now + way
        if factor == 0.0:
            # So few bytes that only the way counts. What is read is what is there at half of it.
            finish = there + way
            events.at(there, self._sample, transfer, finish)
        else:
            num_bytes = transfer.num_bytes * factor * max(self.host.slowness, target.host.slowness)
            links = [self.link, target.link]
            if self.host.rack != target.host.rack:
                links += [self.host.uplink, target.host.uplink]
            finish = max(link.pass_through(there, num_bytes) for link in links) + way
            network.num_moved += transfer.num_bytes
            events.at(there, transfer.begin, finish)
        if finish > transfer.deadline:
            events.at(transfer.deadline, transfer.expire)
        return transfer

    def _sample(self, transfer: VirtualTransfer, finish: float) -> None:
        if transfer.is_quiet:
            return
        if self.reaches(transfer.peer.target):
            transfer.copy(len(transfer.left))
            self.events.at(finish, transfer.go_on)
        else:
            self.network.stall(transfer)

    def cancel(self, transfer: VirtualTransfer) -> None:
        """End a transfer; it becomes quiet when its bytes have moved."""
        transfer.end(TransferState.CANCELLED, f"transfer {transfer.id} was cancelled")

    def notify(self, peer: VirtualPeer, message: bytes) -> None:
        """Send a message, which a silent network loses."""
        self._check_usable(peer)
        target, network = peer.target, self.network
        network.num_notifications += 1
        network.num_notification_bytes += len(message)
        self.num_sent += 1
        way = network.latency(self.host, target.host)
        self.events.after(way, self._arrive, target, message)

    def _arrive(self, target: VirtualNative, message: bytes) -> None:
        if self.reaches(target):
            target.inbox.append((self.name, message))
            back = target.links.get(self.name)
            if back is not None:
                back.last_heard = self.events.now
            target.wake_waiters()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError(f"agent {self.name!r} is closed")

    def _check_usable(self, peer: VirtualPeer) -> None:
        self._check_open()
        if peer.state == _DISCONNECTED:
            raise StalePeerError(f"generation {peer.generation} of {peer.name!r} is disconnected")
        if peer.state != _CONNECTED:
            raise PeerLostError(f"peer {peer.name!r} is not connected", peer=peer.name)
        peer.last_used = self.events.now

    def take_notifications(self, timeout: float) -> list[tuple[str, bytes]]:
        """Return what has arrived, after waiting for the first."""
        if timeout:
            self.events.wait(timeout, lambda: bool(self.inbox))
        taken, self.inbox = self.inbox, []
        return taken

    def wake_waiters(self) -> None:
        """Let the owner of the agent look."""
        if not self.is_closed:
            self.on_activity()

    @property
    def running(self) -> int:
        """Transfers without an end state."""
        return sum(t.state < TransferState.DONE for t in self.active.values())

    @property
    def quarantined(self) -> int:
        """Transfers that have ended and are not quiet."""
        return len(self.active) - self.running

    def close(self, timeout: float) -> bool:
        """End everything that runs, and go once it is quiet; return whether it is."""
        self.is_closed = True
        for transfer in list(self.active.values()):
            transfer.end(TransferState.CANCELLED, "the agent was closed")
        if self.events.wait(timeout, lambda: not self.active):
            self.kill()
        return not self.active

    def kill(self) -> None:
        """End all at once, as a process does; the other ends notice, unless the host is silent."""
        self.is_closed = True
        self.memory.clear()
        if self.network.agents.get(self.name) is self:
            del self.network.agents[self.name]
        for peer in list(self.links.values()):
            peer.end(_DISCONNECTED, TransferState.CANCELLED, "the agent was closed")
        for transfer in list(self.active.values()):
            transfer.be_quiet()
        for user in list(self.users):
            way = self.network.latency(self.host, user.owner.host)
            silent = not self.network.reaches(self.host, user.owner.host)
            self.events.after(self.network.detection if silent else way, user.lose)

    def stop(self, _timeout: float) -> None:
        """Stop; there is no thread."""
        self.kill()


class VirtualAgent(Agent):
    """An agent of a `Network` of virtual time."""

    transfer_backend: ClassVar[str] = "fake"

    def __init__(
        self, name: str, network: Network, host: Host, *, secret: bytes | str | None = None
    ) -> None:
        self._place = network, host
        super().__init__(name, backend_version="1.0", secret=secret)

    def _start(self, name: str, incarnation: bytes) -> Any:  # noqa: ANN401 - duck-typed
        self.native = VirtualNative(name, incarnation, *self._place)
        return self.native

    def _check_reserve(self) -> None:
        """Check nothing: a virtual connection takes no descriptors."""


class Suspended(Exception):
    """Raised by a function of a `VirtualExecutor` that is to be called again later.

    `begin` is called with what then lets it go on.
    """

    def __init__(self, begin: Callable[[Callable[[], None]], None]) -> None:
        self.begin = begin


class VirtualExecutor(Executor):
    """Runs blocking functions in virtual time, a number of them at once.

    A function that waits raises `Suspended`, and is called anew when that says so.
    """

    def __init__(self, events: Events, num_threads: int, cost: float) -> None:
        self._events, self._free, self._cost = events, num_threads, cost
        self._queue: deque[tuple[Future[Any], Callable[..., Any]]] = deque()
        self._is_over = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:  # noqa: ANN401
        """Run a function of no arguments when a thread is free."""
        assert not args, "arguments are not used by the connector"
        assert not options, "options are not used by the connector"
        future: Future[Any] = Future()
        self._queue.append((future, function))
        self._start()
        return future

    def _start(self) -> None:
        while self._free and self._queue:
            future, function = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._free -= 1
                self._events.after(self._cost, self._run, future, function)

    def _run(self, future: Future[Any], function: Callable[..., Any]) -> None:
        if self._is_over:
            return
        try:
            value = function()
        except Suspended as wait:
            wait.begin(partial(self._run, future, function))
            return
        except AssertionError:
            raise  # a check has failed
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(value)
        self._free += 1
        self._start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Forget everything."""
        self._is_over = True
        self._queue.clear()
