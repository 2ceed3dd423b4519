"""A consumer's connections to the ranks of producer engines.

A engine is made on first use, by a handshake in the background that any number of requests can wait
for, and forgotten when it is dead or idle. Its life: CONNECTING, then READY, then DEAD.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pynixlkv.connector import messages, tp_mapping
from pynixlkv.connector.leases import LEASE_GROUP
from pynixlkv.errors import (
    HandshakeError,
    PeerLostError,
    PynixlkvError,
    RankNotFound,
    StateError,
)
from pynixlkv.plan import TransferPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from pynixlkv.agent import Agent, Peer
    from pynixlkv.connector.metadata import KVTransferParams, ParallelSizes, Rank
    from pynixlkv.connector.peers import Peers
    from pynixlkv.geometry import Geometry, KVCache

__all__ = [
    "Fetch",
    "RemoteEngine",
    "RemoteEngineState",
    "RemoteEngines",
    "RemoteRank",
    "WorkerContext",
]


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
        """Return the hello of each rank that was asked for, or raise."""
        ...


@dataclass(frozen=True)
class WorkerContext:
    """What the parts of a worker share: its agent, its place, its memory.

    Parameters
    ----------
    agent : Agent
        Moves bytes and messages.
    identity : ConsumerRank
        Its place in its engine.
    cache : Geometry
        What transfers read and write: the KV cache, or the host cache that it is staged in.
    lease_buffer : KVCache
        Where lease words are read to.
    block_table_index : mapping of str to int
        Which of the engine's block tables each group of the cache uses; the same in both engines.
    hello : bytes
        What producers need to reach it.
    max_bytes : int or None
        Longest descriptor.
    """

    agent: Agent
    identity: messages.ConsumerRank
    cache: Geometry
    lease_buffer: KVCache
    block_table_index: Mapping[str, int]
    hello: bytes
    max_bytes: int | None


class RemoteEngineState(enum.Enum):
    """Life of a engine."""

    CONNECTING = "connecting"
    READY = "ready"
    DEAD = "dead"


@dataclass(eq=False)
class RemoteRank:
    """A rank of a producer engine that this worker reads from, or only tells the end."""

    rank: Rank
    peer: Peer
    plans: tuple[TransferPlan, ...]
    """What to read from it; empty if nothing is."""
    words: TransferPlan
    """From its lease table to the lease_buffer words."""
    geometry: Geometry
    unanswered: int = 0
    """Heartbeats since its last answer."""
    has_answered: bool = False
    """It has this worker's `ConsumerHello`: it can say when its writes have ended."""


@dataclass(eq=False)
class RemoteEngine:
    """The connection to one producer engine."""

    engine_id: str
    address: tuple[str, int]
    parallel: ParallelSizes
    connecting: Future[list[RemoteRank]]
    state: RemoteEngineState = RemoteEngineState.CONNECTING
    producers: list[RemoteRank] = field(default_factory=list)
    error: PynixlkvError | None = None
    requests: set[str] = field(default_factory=set)
    """Local ids of requests that are queued or under way over this engine. While there are any, its
    leases are kept alive, and, after its death, its peers are."""
    num_checks: int = 0
    """Reads of lease words that are not quiet; they need the peers as well."""
    heartbeat_period: float = 0.0
    next_heartbeat: float = 0.0
    last_used: float = 0.0

    @property
    def sources(self) -> list[RemoteRank]:
        """The ranks that bytes are read from."""
        return [producer for producer in self.producers if producer.plans]

    def of_agent(self, name: str) -> RemoteRank | None:
        """Return the producer of an agent's name."""
        for producer in self.producers:
            if producer.peer.name == name:
                return producer
        return None


class RemoteEngines:
    """All engines of a worker, by engine id. Not thread-safe; only the handshakes run elsewhere.

    Parameters
    ----------
    ctx : WorkerContext
        This worker.
    fetch : Fetch
        Gets hello bytes.
    submit : callable
        Runs a function on another thread and returns its future.
    peers : Peers
        Connects to producers.
    timeout : float
        Longest handshake in seconds.
    ttl : float
        Idle engines are forgotten after as many seconds.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        fetch: Fetch,
        submit: Callable[[Callable[[], list[RemoteRank]]], Future[list[RemoteRank]]],
        peers: Peers,
        *,
        timeout: float,
        ttl: float,
    ) -> None:
        self._ctx = ctx
        self._fetch = fetch
        self._submit = submit
        self._peers = peers
        self._timeout = timeout
        self._ttl = ttl
        self._engines: dict[str, RemoteEngine] = {}
        self._by_agent: dict[str, RemoteEngine] = {}
        self._dropped: list[RemoteEngine] = []  # to be told of by `settle`
        self._dead: list[RemoteEngine] = []  # with peers that are still needed, or still connecting

    def __len__(self) -> int:
        return len(self._engines)

    def all(self) -> list[RemoteEngine]:
        """Return all engines."""
        return list(self._engines.values())

    def of_agent(self, name: str) -> RemoteEngine | None:
        """Return the engine of a producer's agent."""
        return self._by_agent.get(name)

    def get(self, params: KVTransferParams, heartbeat_period: float, now: float) -> RemoteEngine:
        """Return the engine to a request's producer; begin to connect if there is none."""
        engine_id, address = str(params.remote_engine_id), _address(params)
        engine = self._engines.get(engine_id)
        if engine is None or engine.address != address:
            for old in self.all():
                if old.address == address or old.engine_id == engine_id:
                    # An address has a new tenant, or an engine has moved.
                    self.drop(old, StateError(f"engine {engine_id!r} is at {address} now"))
            parallel = params.parallel
            future = self._submit(lambda: self._connect(engine_id, address, parallel))
            engine = RemoteEngine(engine_id, address, parallel, future)
            self._engines[engine_id] = engine
        engine.heartbeat_period = heartbeat_period
        engine.last_used = now
        return engine

    def _connect(
        self, engine_id: str, address: tuple[str, int], parallel: ParallelSizes
    ) -> list[RemoteRank]:
        """Connect to all ranks that matter; runs on another thread, and blocks."""
        ctx = self._ctx
        ranks = tp_mapping.ranks_to_tell(
            ctx.cache.groups, ctx.identity.rank, ctx.identity.parallel, parallel
        )
        hellos = self._fetch(address, engine_id=engine_id, ranks=ranks, timeout=self._timeout)
        missing = [rank for rank in ranks if rank not in hellos]
        if missing:
            raise RankNotFound(
                f"engine {engine_id!r} has no rank {missing[0]}; it has {sorted(hellos)}",
                missing=missing,
                available=sorted(hellos),
                peer=engine_id,
            )
        peers: list[Peer] = []
        try:
            for rank in ranks:
                peer = self._peers.connect(hellos[rank])
                peers.append(peer)
            producers = [
                self._describe(rank, peer, parallel)
                for rank, peer in zip(ranks, peers, strict=True)
            ]
            tp_mapping.check_complete(ctx.cache, [p.geometry for p in producers if p.plans])
            attach = messages.encode(messages.ConsumerHello(ctx.identity, ctx.hello))
            for peer in peers:
                ctx.agent.notify(peer, attach)
        except BaseException:
            for peer in peers:
                self._peers.release(peer)
            raise
        return producers

    def _describe(self, rank: Rank, peer: Peer, parallel: ParallelSizes) -> RemoteRank:
        ctx = self._ctx
        cache, words = split(peer)
        plans = tuple(
            TransferPlan(
                ctx.cache,
                cache,
                groups=part.groups,
                heads=part.heads,
                layers=part.layers,
                max_bytes=ctx.max_bytes,
            )
            for part in tp_mapping.transfer_slices(
                ctx.cache, ctx.identity.rank, ctx.identity.parallel, cache, rank, parallel
            )
        )
        return RemoteRank(rank, peer, plans, TransferPlan(ctx.lease_buffer.geometry, words), cache)

    def settle(self, now: float) -> list[RemoteEngine]:
        """Take up what has happened to engines, and forget idle ones.

        Returns
        -------
        list of RemoteEngine
            RemoteEngines that have become READY or DEAD since the last call.
        """
        changed, self._dropped = self._dropped, []
        for engine in self.all():
            if engine.state is RemoteEngineState.CONNECTING and engine.connecting.done():
                error = engine.connecting.exception()
                if error is None:
                    engine.state = RemoteEngineState.READY
                    engine.producers = engine.connecting.result()
                    engine.next_heartbeat = now
                    for producer in engine.producers:
                        self._by_agent[producer.peer.name] = engine
                    changed.append(engine)
                else:
                    self.drop(engine, _reason(engine, error))
            elif engine.requests:
                engine.last_used = now
            elif now - engine.last_used > self._ttl:
                self.drop(engine, StateError(f"engine {engine.engine_id!r} was not used for long"))
        changed += self._dropped
        self._dropped = []
        self._dead = [engine for engine in self._dead if not self._bury(engine)]
        return changed

    @property
    def have_news(self) -> bool:
        """Whether engines have died that `settle` has not told of."""
        return bool(self._dropped)

    def drop(self, engine: RemoteEngine, error: PynixlkvError) -> None:
        """Forget a engine, so that the next request connects anew."""
        if engine.state is RemoteEngineState.DEAD:
            return
        engine.state = RemoteEngineState.DEAD
        engine.error = error
        if self._engines.get(engine.engine_id) is engine:
            del self._engines[engine.engine_id]
        for producer in engine.producers:
            if self._by_agent.get(producer.peer.name) is engine:
                del self._by_agent[producer.peer.name]
        self._dropped.append(engine)
        self._dead.append(engine)

    def _bury(self, engine: RemoteEngine) -> bool:
        """Let go of a dead engine's peers, when nothing under way needs them any more."""
        if (
            engine.requests
            or engine.num_checks
            or engine in self._dropped
            or not engine.connecting.done()
        ):
            return False
        if not engine.connecting.cancelled() and engine.connecting.exception() is None:
            for producer in engine.connecting.result():
                self._peers.release(producer.peer)
        return True


def split(peer: Peer) -> tuple[Geometry, Geometry]:
    """Return the geometries of a connector's hello: the cache, and the lease table.

    Raises
    ------
    HandshakeError
        If it was made by something else than a connector.
    """
    if len(peer.geometries) != 2 or [g.name for g in peer.geometries[1].groups] != [LEASE_GROUP]:
        raise HandshakeError(
            f"the hello of {peer.name!r} describes {len(peer.geometries)} caches; expected a KV "
            "cache and a lease table, as a ConnectorWorker's hello has them",
            peer=peer.name,
        )
    return peer.geometries[0], peer.geometries[1]


def _address(params: KVTransferParams) -> tuple[str, int]:
    return str(params.remote_host), int(params.remote_port or 0)


def _reason(engine: RemoteEngine, error: BaseException) -> PynixlkvError:
    if isinstance(error, (HandshakeError, PeerLostError)):
        return error
    made = HandshakeError(
        f"connecting to engine {engine.engine_id!r} at {engine.address[0]}:{engine.address[1]} failed: "
        f"{error}",
        peer=engine.engine_id,
    )
    made.__cause__ = error
    return made
