"""A consumer's connections to the ranks of producer engines.

A link is made on first use, by a handshake in the background that any number of requests can wait
for, and forgotten when it is dead or idle. Its life: CONNECTING, then READY, then DEAD.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pynixlkv.connector import messages, pairing
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
    from pynixlkv.connector.metadata import EngineShape, HandOff, Rank
    from pynixlkv.connector.peers import Peers
    from pynixlkv.geometry import Geometry, KVCache

__all__ = ["Fetch", "Link", "LinkState", "Links", "Producer", "Local"]


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
class Local:
    """What the parts of a worker share: its agent, its place, its memory.

    Parameters
    ----------
    agent : Agent
        Moves bytes and messages.
    reader : Reader
        Its place in its engine.
    cache : Geometry
        What transfers read and write: the KV cache, or the host cache that it is staged in.
    landing : KVCache
        Where lease words are read to.
    table_of : mapping of str to int
        Which of the engine's block tables each group of the cache uses; the same in both engines.
    hello : bytes
        What producers need to reach it.
    max_bytes : int or None
        Longest descriptor.
    """

    agent: Agent
    reader: messages.Reader
    cache: Geometry
    landing: KVCache
    table_of: Mapping[str, int]
    hello: bytes
    max_bytes: int | None


class LinkState(enum.Enum):
    """Life of a link."""

    CONNECTING = "connecting"
    READY = "ready"
    DEAD = "dead"


@dataclass(eq=False)
class Producer:
    """A rank of a producer engine that this worker reads from, or only tells the end."""

    rank: Rank
    peer: Peer
    plans: tuple[TransferPlan, ...]
    """What to read from it; empty if nothing is."""
    words: TransferPlan
    """From its lease table to the landing words."""
    geometry: Geometry
    unanswered: int = 0
    """Heartbeats since its last answer."""
    has_answered: bool = False
    """It has this worker's `Attach`: it can say when its writes have ended."""


@dataclass(eq=False)
class Link:
    """The connection to one producer engine."""

    engine_id: str
    address: tuple[str, int]
    shape: EngineShape
    connecting: Future[list[Producer]]
    state: LinkState = LinkState.CONNECTING
    producers: list[Producer] = field(default_factory=list)
    error: PynixlkvError | None = None
    requests: set[str] = field(default_factory=set)
    """Local ids of requests that are queued or under way over this link. While there are any, its
    leases are kept alive, and, after its death, its peers are."""
    num_checks: int = 0
    """Reads of lease words that are not quiet; they need the peers as well."""
    beat_interval: float = 0.0
    next_beat: float = 0.0
    last_used: float = 0.0

    @property
    def sources(self) -> list[Producer]:
        """The ranks that bytes are read from."""
        return [producer for producer in self.producers if producer.plans]

    def of_agent(self, name: str) -> Producer | None:
        """Return the producer of an agent's name."""
        for producer in self.producers:
            if producer.peer.name == name:
                return producer
        return None


class Links:
    """All links of a worker, by engine id. Not thread-safe; only the handshakes run elsewhere.

    Parameters
    ----------
    this : Local
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
        Idle links are forgotten after as many seconds.
    """

    def __init__(
        self,
        this: Local,
        fetch: Fetch,
        submit: Callable[[Callable[[], list[Producer]]], Future[list[Producer]]],
        peers: Peers,
        *,
        timeout: float,
        ttl: float,
    ) -> None:
        self._this = this
        self._fetch = fetch
        self._submit = submit
        self._peers = peers
        self._timeout = timeout
        self._ttl = ttl
        self._links: dict[str, Link] = {}
        self._by_agent: dict[str, Link] = {}
        self._dropped: list[Link] = []  # to be told of by `settle`
        self._dead: list[Link] = []  # with peers that are still needed, or still connecting

    def __len__(self) -> int:
        return len(self._links)

    def all(self) -> list[Link]:
        """Return all links."""
        return list(self._links.values())

    def of_agent(self, name: str) -> Link | None:
        """Return the link of a producer's agent."""
        return self._by_agent.get(name)

    def get(self, hand_off: HandOff, beat_interval: float, now: float) -> Link:
        """Return the link to a request's producer; begin to connect if there is none."""
        engine_id, address = str(hand_off.remote_engine_id), _address(hand_off)
        link = self._links.get(engine_id)
        if link is None or link.address != address:
            for old in self.all():
                if old.address == address or old.engine_id == engine_id:
                    # An address has a new tenant, or an engine has moved.
                    self.drop(old, StateError(f"engine {engine_id!r} is at {address} now"))
            shape = hand_off.shape
            future = self._submit(lambda: self._connect(engine_id, address, shape))
            link = Link(engine_id, address, shape, future)
            self._links[engine_id] = link
        link.beat_interval = beat_interval
        link.last_used = now
        return link

    def _connect(
        self, engine_id: str, address: tuple[str, int], shape: EngineShape
    ) -> list[Producer]:
        """Connect to all ranks that matter; runs on another thread, and blocks."""
        this = self._this
        ranks = pairing.ranks_to_tell(this.cache.groups, this.reader.rank, this.reader.shape, shape)
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
                self._describe(rank, peer, shape) for rank, peer in zip(ranks, peers, strict=True)
            ]
            pairing.check_complete(this.cache, [p.geometry for p in producers if p.plans])
            attach = messages.encode(messages.Attach(this.reader, this.hello))
            for peer in peers:
                this.agent.notify(peer, attach)
        except BaseException:
            for peer in peers:
                self._peers.release(peer)
            raise
        return producers

    def _describe(self, rank: Rank, peer: Peer, shape: EngineShape) -> Producer:
        this = self._this
        cache, words = split(peer)
        plans = tuple(
            TransferPlan(
                this.cache,
                cache,
                groups=part.groups,
                heads=part.heads,
                layers=part.layers,
                max_bytes=this.max_bytes,
            )
            for part in pairing.parts(
                this.cache, this.reader.rank, this.reader.shape, cache, rank, shape
            )
        )
        return Producer(rank, peer, plans, TransferPlan(this.landing.geometry, words), cache)

    def settle(self, now: float) -> list[Link]:
        """Take up what has happened to links, and forget idle ones.

        Returns
        -------
        list of Link
            Links that have become READY or DEAD since the last call.
        """
        changed, self._dropped = self._dropped, []
        for link in self.all():
            if link.state is LinkState.CONNECTING and link.connecting.done():
                error = link.connecting.exception()
                if error is None:
                    link.state = LinkState.READY
                    link.producers = link.connecting.result()
                    link.next_beat = now
                    for producer in link.producers:
                        self._by_agent[producer.peer.name] = link
                    changed.append(link)
                else:
                    self.drop(link, _reason(link, error))
            elif link.requests:
                link.last_used = now
            elif now - link.last_used > self._ttl:
                self.drop(link, StateError(f"engine {link.engine_id!r} was not used for long"))
        changed += self._dropped
        self._dropped = []
        self._dead = [link for link in self._dead if not self._bury(link)]
        return changed

    @property
    def have_news(self) -> bool:
        """Whether links have died that `settle` has not told of."""
        return bool(self._dropped)

    def drop(self, link: Link, error: PynixlkvError) -> None:
        """Forget a link, so that the next request connects anew."""
        if link.state is LinkState.DEAD:
            return
        link.state = LinkState.DEAD
        link.error = error
        if self._links.get(link.engine_id) is link:
            del self._links[link.engine_id]
        for producer in link.producers:
            if self._by_agent.get(producer.peer.name) is link:
                del self._by_agent[producer.peer.name]
        self._dropped.append(link)
        self._dead.append(link)

    def _bury(self, link: Link) -> bool:
        """Let go of a dead link's peers, when nothing under way needs them any more."""
        if link.requests or link.num_checks or link in self._dropped or not link.connecting.done():
            return False
        if not link.connecting.cancelled() and link.connecting.exception() is None:
            for producer in link.connecting.result():
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


def _address(hand_off: HandOff) -> tuple[str, int]:
    return str(hand_off.remote_host), int(hand_off.remote_port or 0)


def _reason(link: Link, error: BaseException) -> PynixlkvError:
    if isinstance(error, (HandshakeError, PeerLostError)):
        return error
    made = HandshakeError(
        f"connecting to engine {link.engine_id!r} at {link.address[0]}:{link.address[1]} failed: "
        f"{error}",
        peer=link.engine_id,
    )
    made.__cause__ = error
    return made
