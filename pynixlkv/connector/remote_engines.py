"""A consumer's connections to the ranks of producer engines, and the account of its readers there.

A `RemoteEngine` is created on first use and connects in the background; any number of requests can
wait for it. Its states are CONNECTING, READY and DEAD, in this order. It is forgotten once it is
dead or idle.

Hand-offs come from outside and may be stale or made up. So a hand-off whose facts differ from those
of a connection gets a connection of its own, and an older one gives way only when a handshake has
shown that its engine, or the tenant of its address, is another one.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import operator
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pynixlkv._clock import retry_pause
from pynixlkv.connector import messages, tp_mapping, verification
from pynixlkv.connector.leases import LEASE_GROUP
from pynixlkv.errors import (
    HandshakeError,
    IncompatibleLayoutError,
    LayoutError,
    PeerLostError,
    PlanError,
    PynixlkvError,
    RankNotFound,
    StateError,
)
from pynixlkv.plan import TransferPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from pynixlkv.agent import Peer, Transfer
    from pynixlkv.connector.context import WorkerContext
    from pynixlkv.connector.metadata import KVTransferParams, ParallelSizes
    from pynixlkv.geometry import Geometry, KVCache
    from pynixlkv.types import Rank

_log = logging.getLogger(__name__)

_REFUSAL_S = 1.0
"""For about this long after an engine could not be reached, requests that name it fail at once."""

_Key: TypeAlias = "tuple[str, tuple[str, int], ParallelSizes]"


class Fetch(Protocol):
    """Gets the hello bytes of an engine's ranks from its side channel; may block."""

    def __call__(
        self,
        address: tuple[str, int],
        *,
        engine_id: str,
        ranks: list[Rank],
        timeout: float,
    ) -> Mapping[Rank, bytes]:
        """Return the hello of each requested rank, or raise."""
        ...


class RemoteEngineState(enum.Enum):
    """State of a connection."""

    CONNECTING = "connecting"
    READY = "ready"
    DEAD = "dead"


@dataclass(eq=False)
class RemoteRank:
    """A rank of a producer that this worker reads from, or only releases."""

    rank: Rank
    peer: Peer
    plans: tuple[TransferPlan, ...]
    """What to read from it; empty if nothing."""
    words: TransferPlan
    """From its lease table to this worker's lease buffer."""
    geometry: Geometry
    unanswered: int = 0
    """Heartbeats since its last answer."""
    has_answered: bool = False
    """It has this worker's `ConsumerHello`, so it can report the end of a push."""


@dataclass(eq=False)
class _Contact:
    """What the thread that connects to a producer tells of its progress."""

    peers: list[Peer] = field(default_factory=list)
    """Ranks that can be told already that a consumer is on its way."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that each phase took; empty once it was logged."""
    refusal: PynixlkvError | None = None
    """Why nothing can be read from the producer; its leases can be released."""


@dataclass(eq=False)
class RemoteEngine:
    """The connection to one producer."""

    engine_id: str
    address: tuple[str, int]
    parallel: ParallelSizes
    connecting: Future[list[RemoteRank]]
    contact: _Contact
    state: RemoteEngineState = RemoteEngineState.CONNECTING
    ranks: list[RemoteRank] = field(default_factory=list)
    error: PynixlkvError | None = None
    requests: dict[str, messages.Reader | None] = field(default_factory=dict)
    """By local id, the readers of queued and running requests, whose leases are kept alive; None
    for one that has its end. While there are any, a dead engine's peers stay connected."""
    heartbeat_period: float = 0.0
    next_heartbeat: float = 0.0
    last_used: float = 0.0

    @property
    def key(self) -> _Key:
        """What a hand-off says of its engine."""
        return self.engine_id, self.address, self.parallel

    @property
    def is_queued(self) -> bool:
        """Whether the handshake waits for a thread."""
        return not self.connecting.running() and not self.connecting.done()

    @property
    def sources(self) -> list[RemoteRank]:
        """The ranks that bytes are read from."""
        return [rank for rank in self.ranks if rank.plans]

    @property
    def death(self) -> PynixlkvError:
        """Why it is dead."""
        assert self.error is not None  # `RemoteEngines.drop` sets it
        return self.error


class RemoteEngines:
    """A worker's producers. Not thread-safe; only handshakes run on other threads."""

    def __init__(
        self,
        ctx: WorkerContext,
        fetch: Fetch,
        submit: Callable[[Callable[[], list[RemoteRank]]], Future[list[RemoteRank]]],
        draw: Callable[[], float],
    ) -> None:
        self._ctx = ctx
        self._fetch = fetch
        self._submit = submit
        self._draw = draw
        self._engines: dict[_Key, RemoteEngine] = {}
        self._refused: dict[_Key, tuple[float, RemoteEngine]] = {}  # and until when
        self._by_agent: defaultdict[str, list[RemoteRank]] = defaultdict(list)
        self._dropped: list[RemoteEngine] = []  # for `settle` to report
        self._testing = threading.Lock()  # guards the scratch blocks
        self._tests: list[Transfer] = []  # reads into them that may not be quiet
        self._num_tests = 0
        self._dead: list[RemoteEngine] = []  # still connecting, or with peers in use
        self._attaching: dict[RemoteEngine, list[messages.Reader]] = defaultdict(list)
        self._releasing: list[tuple[RemoteEngine, messages.Reader]] = []
        self._outbox: dict[RemoteRank, list[messages.Reader]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._engines)

    def all(self) -> list[RemoteEngine]:
        """Return all engines that are not dead."""
        return list(self._engines.values())

    def ranks_of(self, agent: str) -> list[RemoteRank]:
        """Return the ranks with an agent's name, of the engines that are ready."""
        return self._by_agent.get(agent, [])

    def get(self, params: KVTransferParams, heartbeat_period: float, now: float) -> RemoteEngine:
        """Return a request's producer; begin to connect if it is new."""
        engine_id = str(params.remote_engine_id)
        address = str(params.remote_host), int(params.remote_port or 0)
        parallel = params.parallel
        key = engine_id, address, parallel
        until, engine = self._refused.get(key, (0.0, None))
        if engine is not None and now < until:
            return engine
        engine = self._engines.get(key)
        if engine is None:
            contact = _Contact()
            future = self._submit(lambda: self._connect(engine_id, address, parallel, contact))
            engine = RemoteEngine(engine_id, address, parallel, future, contact)
            self._engines[key] = engine
        engine.heartbeat_period = heartbeat_period
        engine.last_used = now
        return engine

    def _connect(
        self, engine_id: str, address: tuple[str, int], parallel: ParallelSizes, contact: _Contact
    ) -> list[RemoteRank]:
        """Connect to all ranks that matter; blocks, on another thread."""
        ctx, me = self._ctx, self._ctx.identity
        times = [time.perf_counter()]
        ranks = tp_mapping.ranks_to_tell(ctx.cache.groups, me.rank, me.parallel, parallel)
        hellos = self._fetch(
            address, engine_id=engine_id, ranks=ranks, timeout=self._ctx.config.handshake_timeout
        )
        missing = [rank for rank in ranks if rank not in hellos]
        if missing:
            raise RankNotFound(
                f"engine {engine_id!r} has no rank {missing[0]}; it has {sorted(hellos)}",
                missing=missing,
                available=sorted(hellos),
                peer=engine_id,
            )
        times.append(time.perf_counter())
        peers = contact.peers
        try:
            for rank in ranks:
                peer = self._ctx.peers.connect(hellos[rank])
                peers.append(peer)
            times.append(time.perf_counter())
            try:
                connected = [
                    self._plan(rank, peer, parallel)
                    for rank, peer in zip(ranks, peers, strict=True)
                ]
                tp_mapping.check_complete(
                    ctx.cache, [each.geometry for each in connected if each.plans]
                )
            except (PlanError, LayoutError, IncompatibleLayoutError) as error:
                contact.refusal = _refusal(ctx.cache, engine_id, peers, error)
                connected = [
                    self._unread(rank, peer) for rank, peer in zip(ranks, peers, strict=True)
                ]
            for peer in peers:
                ctx.introduce(peer)
            times.append(time.perf_counter())
            names = ("handshake", "connect", "self-test")
            contact.seconds.update(zip(names, map(operator.sub, times[1:], times), strict=True))
        except BaseException:
            for peer in peers:
                self._ctx.peers.release(peer)
            raise
        return connected

    def _plan(self, rank: Rank, peer: Peer, parallel: ParallelSizes) -> RemoteRank:
        ctx, me = self._ctx, self._ctx.identity
        cache, _, *scratch = split(peer)
        slices = tp_mapping.transfer_slices(ctx.cache, me.rank, me.parallel, cache, rank, parallel)
        plans = tuple(
            TransferPlan(
                ctx.cache,
                cache,
                groups=each.groups,
                heads=each.heads,
                layers=each.layers,
                max_bytes=ctx.config.max_bytes,
            )
            for each in slices
        )
        if scratch and ctx.scratch is not None:
            self._test(peer, ctx.scratch, scratch[0], slices)
        return replace(self._unread(rank, peer), plans=plans)

    def _unread(self, rank: Rank, peer: Peer) -> RemoteRank:
        """Return a rank whose leases can be read, and no blocks."""
        cache, lease_table, *_ = split(peer)
        words = TransferPlan(self._ctx.lease_buffer.geometry, lease_table)
        return RemoteRank(rank, peer, (), words, cache)

    def _test(
        self, peer: Peer, ours: KVCache, theirs: Geometry, slices: list[tp_mapping.TransferSlice]
    ) -> None:
        """Make the self-test with a peer, unless the scratch blocks are in use for long."""
        timeout = self._ctx.config.transfer_timeout
        if not self._testing.acquire(timeout=timeout):
            return
        try:
            self._tests = [transfer for transfer in self._tests if not transfer.is_quiet]
            if not self._tests:
                self._num_tests += 1
                agent, turn = self._ctx.agent, self._num_tests
                verification.self_test(
                    agent, ours, peer, theirs, slices, timeout, turn, self._tests
                )
        finally:
            for transfer in self._tests:
                if not transfer.state.is_end:
                    transfer.cancel()
            self._testing.release()

    # ---- readers

    def attach(
        self, engine: RemoteEngine, request_id: str, reader: messages.Reader, is_known: bool = False
    ) -> None:
        """Attach a reader before others of its lease can end it; heartbeats repeat it."""
        engine.requests[request_id] = reader
        is_ready = engine.state is RemoteEngineState.READY
        if is_ready and reader.lease is not None and not is_known:
            self._attaching[engine].append(reader)

    def release(
        self, engine: RemoteEngine, reader: messages.Reader, *, only_bystanders: bool = False
    ) -> None:
        """Release a request at the producer's ranks, or at those that bytes do not come from.

        Ranks that have written the request know already.
        """
        if engine.state is RemoteEngineState.CONNECTING:
            self._releasing.append((engine, reader))
        elif engine.state is RemoteEngineState.DEAD:
            self._ctx.stats.count("releases_lost")  # its leases expire by themselves
        else:
            for producer in engine.ranks:
                if not (only_bystanders and producer.plans):
                    self._outbox[producer].append(reader)

    def send_heartbeats(self, now: float) -> float:
        """Send new readers, and the heartbeats that are due; return when the next one is."""
        due = self._ctx.config.peer_ttl
        for engine in self.all():
            is_ready = engine.state is RemoteEngineState.READY
            if not engine.requests or not (is_ready or engine.contact.peers):
                continue
            if now >= engine.next_heartbeat:
                engine.next_heartbeat = now + engine.heartbeat_period
                if is_ready:
                    self._beat_or_drop(engine)
                else:
                    self._announce(engine)
            due = min(due, max(engine.next_heartbeat - now, 0.0))
        attaching, self._attaching = self._attaching, defaultdict(list)
        for engine, readers in attaching.items():
            if engine.state is RemoteEngineState.READY:
                self._tell(engine, readers, wants_ack=False)
        return due

    def renew_leases(self) -> None:
        """Send heartbeats at once: after a pause of this process, leases may be about to expire."""
        for engine in self.all():
            if engine.state is RemoteEngineState.READY and engine.requests:
                self._beat(engine)

    def _beat_or_drop(self, engine: RemoteEngine) -> None:
        for producer in engine.ranks:
            if producer.unanswered >= self._ctx.config.missed_heartbeats:
                error = PeerLostError(
                    f"rank {producer.rank} of engine {engine.engine_id!r} left "
                    f"{producer.unanswered} heartbeats unanswered",
                    peer=producer.peer.name,
                )
                self.drop(engine, error)
                return
        if self._beat(engine):
            for producer in engine.ranks:
                producer.unanswered += 1

    def _beat(self, engine: RemoteEngine) -> bool:
        return self._tell(engine, _with_lease(engine), wants_ack=True)

    def _announce(self, engine: RemoteEngine) -> None:
        """Keep leases alive during a first contact that takes long; its thread sees what fails."""
        for readers in _chunks(_with_lease(engine)):
            message = messages.encode(messages.Heartbeat(readers, wants_ack=False))
            for peer in list(engine.contact.peers):
                with contextlib.suppress(PynixlkvError):
                    self._ctx.agent.notify(peer, message)

    def _tell(
        self, engine: RemoteEngine, readers: list[messages.Reader], *, wants_ack: bool
    ) -> bool:
        """Send a heartbeat for some readers to all ranks of an engine; drop it if that fails."""
        chunks = _chunks(readers) or [[]]
        heartbeats = [messages.encode(messages.Heartbeat(each, wants_ack)) for each in chunks]
        try:
            for producer in engine.ranks:
                if wants_ack and producer.unanswered:
                    # It may have missed this worker's hello, or forgotten it.
                    self._ctx.introduce(producer.peer)
                for heartbeat in heartbeats:
                    self._ctx.agent.notify(producer.peer, heartbeat)
        except PynixlkvError as error:
            lost = error
            if not isinstance(error, PeerLostError):
                text = f"engine {engine.engine_id!r} cannot be told: {error}"
                lost = PeerLostError(text, peer=engine.engine_id)
                lost.__cause__ = error
            self.drop(engine, lost)
            return False
        return True

    def send_releases(self) -> None:
        """Send the releases since the last call."""
        releasing, self._releasing = self._releasing, []
        for engine, reader in releasing:
            self.release(engine, reader)
        outbox, self._outbox = self._outbox, defaultdict(list)
        for producer, all_readers in outbox.items():
            for readers in _chunks(all_readers):
                message = messages.Release(self._ctx.identity, readers)
                try:
                    self._ctx.agent.notify(producer.peer, messages.encode(message))
                except PynixlkvError as error:
                    _log.info("%s cannot be told of releases: %s", producer.peer.name, str(error))
                    self._ctx.stats.count("releases_lost")

    # ---- connections

    def settle(self, now: float) -> list[RemoteEngine]:
        """Finish handshakes and forget idle engines; return those that have just died."""
        for engine in self.all():
            if engine.state is RemoteEngineState.CONNECTING and engine.connecting.done():
                error = engine.connecting.exception()
                if error is None:
                    engine.state = RemoteEngineState.READY
                    engine.ranks = engine.connecting.result()
                    engine.next_heartbeat = now
                    for rank in engine.ranks:
                        self._by_agent[rank.peer.name].append(rank)
                    self._replace_by(engine)
                    if engine.contact.refusal is not None:
                        _log.error("%s", str(engine.contact.refusal))
                else:
                    until = now + retry_pause(_REFUSAL_S, draw=self._draw)
                    self._refused[engine.key] = until, engine
                    self.drop(engine, _reason(engine, error))
            elif engine.requests:
                engine.last_used = now
            elif now - engine.last_used > self._ctx.config.peer_ttl:
                self.drop(engine, StateError(f"engine {engine.engine_id!r} was not used for long"))
        self._refused = {k: entry for k, entry in self._refused.items() if now < entry[0]}
        dropped, self._dropped = self._dropped, []
        self._dead = [engine for engine in self._dead if not self._bury(engine)]
        return dropped

    def _replace_by(self, engine: RemoteEngine) -> None:
        """Drop the connections that a handshake has shown to be of the past."""
        agents = {(rank.peer.name, rank.peer.generation) for rank in engine.ranks}
        for old in self.all():
            is_same_place = old.engine_id == engine.engine_id or old.address == engine.address
            known = {(rank.peer.name, rank.peer.generation) for rank in old.ranks}
            if is_same_place and known and not known & agents:
                text = f"engine {engine.engine_id!r} is at {engine.address} now"
                self.drop(old, StateError(text))

    @property
    def have_news(self) -> bool:
        """Whether engines have died that `settle` has not returned."""
        return bool(self._dropped)

    def drop(self, engine: RemoteEngine, error: PynixlkvError) -> None:
        """Declare an engine dead, so that the next request connects anew."""
        if engine.state is RemoteEngineState.DEAD:
            return
        engine.state = RemoteEngineState.DEAD
        engine.error = error
        del self._engines[engine.key]
        for rank in engine.ranks:
            ranks = self._by_agent[rank.peer.name]
            ranks.remove(rank)
            if not ranks:
                del self._by_agent[rank.peer.name]
        self._dropped.append(engine)
        self._dead.append(engine)

    def _bury(self, engine: RemoteEngine) -> bool:
        """Release a dead engine's peers once nothing uses them; return whether it is done."""
        if engine.requests or not engine.connecting.done():
            return False
        if not engine.connecting.cancelled() and engine.connecting.exception() is None:
            for rank in engine.connecting.result():
                self._ctx.peers.release(rank.peer)
        return True


def _chunks(readers: list[messages.Reader]) -> list[list[messages.Reader]]:
    step = messages.MAX_ENTRIES
    return [readers[i : i + step] for i in range(0, len(readers), step)]


def split(peer: Peer) -> Sequence[Geometry]:
    """Return the geometries in a connector's hello: cache, lease table, perhaps scratch blocks."""
    found = peer.geometries
    if len(found) not in (2, 3) or [g.name for g in found[1].groups] != [LEASE_GROUP]:
        raise HandshakeError(
            f"the hello of {peer.name!r} describes {len(found)} caches; expected a KV cache, a "
            "lease table and perhaps scratch blocks, as a ConnectorWorker's hello has them",
            peer=peer.name,
        )
    return found


def _with_lease(engine: RemoteEngine) -> list[messages.Reader]:
    return [r for r in engine.requests.values() if r is not None and r.lease is not None]


def _refusal(
    cache: Geometry, engine_id: str, peers: list[Peer], error: PynixlkvError
) -> PynixlkvError:
    here = sorted({group.block_size for group in cache.groups})
    there = sorted({group.block_size for peer in peers for group in split(peer)[0].groups})
    hint = f"; blocks have {here} tokens here, {there} there (--block-size of vLLM)"
    made = IncompatibleLayoutError(
        f"nothing can be read from engine {engine_id!r}: {error}{hint if here != there else ''}",
        differences=getattr(error, "differences", ()),
        peer=engine_id,
    )
    made.__cause__ = error
    return made


def _reason(engine: RemoteEngine, error: BaseException) -> PynixlkvError:
    if isinstance(error, (HandshakeError, PeerLostError)):
        return error
    host, port = engine.address
    made = HandshakeError(
        f"connecting to engine {engine.engine_id!r} at {host}:{port} failed: {error}",
        peer=engine.engine_id,
    )
    made.__cause__ = error
    return made
