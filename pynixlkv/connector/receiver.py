"""The consumer's half of a worker: requests whose blocks are to come from a producer.

Each request goes through the states of `_Step` on the connector's thread and ends in exactly one
`EndState`, which is reported once, and only when no byte of the request can move any more.

Pull: at every source rank, read the lease's word until it is the lease's token, then the blocks,
then the word again; only if all words still are the token is the request received. The first look
tells that the blocks are complete, the second that they were not reused.

Push: ask every source rank to write; each says when it has, and that nothing of it moves any more.
Nobody else can say that. So a request that has failed keeps its blocks until all ranks that it has
asked have answered, or are known to be gone; and ranks are asked only once they have proved that
they can answer.
"""

from __future__ import annotations

import enum
import logging
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pynixlkv.connector import messages
from pynixlkv.connector.fences import Fence, has_ended
from pynixlkv.connector.leases import status
from pynixlkv.connector.links import Link, LinkState, Producer
from pynixlkv.connector.log import RequestLog
from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.metadata import EndState, HandOff, Lease, ReqMeta
from pynixlkv.connector.tables import by_group
from pynixlkv.errors import (
    LeaseExpired,
    PeerLostError,
    PlanError,
    PynixlkvError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from pynixlkv.types import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from pynixlkv.agent import Transfer
    from pynixlkv.connector.config import ConnectorConfig
    from pynixlkv.connector.links import Links, Local
    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.connector.stats import ConnectorStats

__all__ = ["Fence", "Receiver", "RequestEnd"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SOON_S = 0.001
"""Pause before looking again at something that tells nobody when it changes."""

_LONGEST_LOOK_S = 0.05
"""The pause doubles up to this while a producer has not granted a lease."""


@dataclass(frozen=True)
class RequestEnd:
    """How the receiving of a request ended.

    Parameters
    ----------
    state : EndState
        Which end.
    error : Exception or None
        Why, unless it was received.
    blocks : tuple of tuple of int
        Local blocks, by group, whose bytes cannot be relied on; empty if it was received.
    """

    state: EndState
    error: Exception | None
    blocks: BlockLists


class _Step(enum.Enum):
    CONNECTING = 0  # waits for the handshake, or for the engine to be done with the blocks
    MOVING = 1
    STAGING = 2  # received into the host cache, on the way to the device
    DRAINING = 3  # has its end, waits for quiet
    OVER = 4


@dataclass(eq=False)
class _Source:
    """What a pull reads from one producer rank."""

    producer: Producer
    running: list[Transfer] = field(default_factory=list)
    """Reads of blocks whose end has not been seen."""
    check_at: float = 0.0
    pause: float = _SOON_S
    is_checking: bool = False
    is_granted: bool = False
    """The lease held before the blocks were read."""
    is_held: bool = False
    """It still did when they had been read."""


@dataclass(eq=False)
class _Request:
    id: str
    meta: ReqMeta
    remote: HandOff
    lease: Lease | None
    link: Link
    fence: Fence | None
    deadline: float
    ticket: int
    step: _Step = _Step.CONNECTING
    sources: list[_Source] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    """All that were ever begun."""
    pushing: set[Producer] = field(default_factory=set)
    """Ranks that have been asked to write and have not said that they are done."""
    ask_at: float = 0.0
    """When to ask them again: the first time, or the answer, may be lost."""
    staging: Fence | None = None
    end: EndState | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Waiting:
    """A request that is queued."""

    remote_id: str
    lease: Lease | None
    link: Link


@dataclass
class _Check:
    """A read of lease words under way."""

    link: Link
    asked: list[tuple[_Request, _Source]]
    slots: list[int]
    transfer: Transfer


class Receiver:
    """Receives requests. Lives on the connector's thread.

    Parameters
    ----------
    this : Local
        This worker.
    words : ndarray of uint64, shape (n,)
        Where lease words are read to; ``this.landing`` describes it.
    links : Links
        Connections to producers.
    config : ConnectorConfig
        Times and mode.
    stats : ConnectorStats
        Counts what happens.
    stage_in : callable, optional
        Begins to copy a request's host blocks to the device.
    """

    def __init__(
        self,
        this: Local,
        words: np.ndarray[tuple[int], np.dtype[np.uint64]],
        links: Links,
        config: ConnectorConfig,
        stats: ConnectorStats,
        stage_in: Callable[[ReqMeta], Fence] | None = None,
    ) -> None:
        self._this = this
        self._words = words
        self._free_words = list(range(len(words)))
        self._links = links
        self._config = config
        self._stats = stats
        self._stage_in = stage_in
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._by_ticket: dict[int, _Request] = {}
        # Where another life of this worker began is far away.
        self._next_ticket = secrets.randbits(61)
        self._releasing: list[tuple[HandOff, Link]] = []
        self._checks: list[_Check] = []
        self._outbox: dict[Producer, list[tuple[str, Lease | None]]] = defaultdict(list)
        self._beat_number = 0

    # ---- what the engine asks for

    def wait_for(self, request_id: str, hand_off: HandOff, now: float) -> None:
        """Connect for a request that is queued, and keep its leases alive."""
        if request_id in self._requests:
            raise PlanError(f"request {request_id!r} is being received, it does not wait")
        self._forget(request_id)
        lease = hand_off.lease_token
        link = self._link(hand_off, now)
        link.requests.add(request_id)
        self._waiting[request_id] = _Waiting(str(hand_off.remote_request_id), lease, link)

    def receive(self, request_id: str, meta: ReqMeta, fence: Fence | None, now: float) -> None:
        """Begin to receive a request, when `fence` says that its blocks are free of older work."""
        remote = meta.remote
        if remote is None or request_id in self._requests:
            raise PlanError(f"request {request_id!r} cannot be received (again)")
        self._forget(request_id)
        lease = remote.lease_token
        link = self._link(remote, now)
        link.requests.add(request_id)
        self._next_ticket += 1
        request = _Request(
            id=request_id,
            meta=meta,
            remote=remote,
            lease=lease,
            link=link,
            fence=fence,
            deadline=now + self._config.transfer_timeout,
            ticket=self._next_ticket,
        )
        self._requests[request_id] = self._by_ticket[request.ticket] = request

    def release(self, request_id: str, hand_off: HandOff, now: float) -> None:
        """Tell a producer, once, that nothing (more) is wanted of a request."""
        self._forget(request_id)
        self._releasing.append((hand_off, self._link(hand_off, now)))

    def abort(self, request_id: str) -> None:
        """End a request that the engine has given up."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(
                request,
                EndState.ABORTED,
                TransferCancelled(f"request {request_id!r} was aborted by its engine"),
            )

    def _link(self, hand_off: HandOff, now: float) -> Link:
        interval = self._config.beat_interval(
            hand_off.lease_duration or self._config.lease_duration
        )
        return self._links.get(hand_off, interval, now)

    def _forget(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.link.requests.discard(request_id)

    # ---- what producers say

    def on_ack(self, agent: str, message: messages.BeatAck) -> None:
        """Take a producer's answer to a heartbeat."""
        link = self._links.of_agent(agent)
        producer = link.of_agent(agent) if link is not None else None
        if producer is None:
            # It may answer before the link that asked has been settled.
            is_early = any(link.state is LinkState.CONNECTING for link in self._links.all())
            self._stats.count("early_notifications" if is_early else "foreign_notifications")
            return
        producer.unanswered = 0
        producer.has_answered = True
        ended = {lease for _, lease, state in message.not_held if state is LeaseStatus.ENDED}
        for request in list(self._requests.values()) if ended else ():
            # A pull finds out by itself, and may yet turn out to have been in time.
            if request.lease in ended and request.step is _Step.CONNECTING:
                self._expire(request, producer)

    def on_push_end(self, agent: str, message: messages.PushEnd) -> None:
        """Take a producer's word that it has written a request, or never will."""
        request = self._by_ticket.get(message.ticket)
        producer = None if request is None else request.link.of_agent(agent)
        if request is None or producer is None:
            self._stats.count("late_notifications")
            return
        if producer not in request.pushing:
            self._stats.count("duplicate_notifications")
            return
        request.pushing.discard(producer)
        if message.expired:
            self._expire(request, producer)
        elif message.error:
            self._fail(
                request,
                TransferError(
                    f"the producer's rank {producer.rank} did not write: {message.error}",
                    peer=producer.peer.name,
                ),
            )

    # ---- the thread's round

    def poll(self, now: float, ends: dict[str, RequestEnd]) -> float:
        """Carry everything on; add what has ended, and is quiet, to `ends`.

        Returns
        -------
        float
            Seconds until it must be called again, whatever happens.
        """
        for link in self._links.settle(now):
            if link.state is LinkState.DEAD:
                self._lose(link)
        due = self._beat(now)
        self._checks = [check for check in self._checks if not self._take_words(check, now)]
        to_check: dict[Producer, list[tuple[_Request, _Source]]] = defaultdict(list)
        for request in list(self._requests.values()):
            try:
                pause = self._advance(request, now, to_check)
            except Exception as error:  # whatever it is, it ends this request and no other
                self._fail(request, error)
                pause = 0.0
            due = min(due, pause)
            if request.step is _Step.OVER:
                del self._requests[request.id], self._by_ticket[request.ticket]
                ends[request.id] = self._close(request, now)
        self._check(to_check, now)
        self._flush_releases()
        return 0.0 if self._links.have_news else due

    def _advance(
        self,
        request: _Request,
        now: float,
        to_check: dict[Producer, list[tuple[_Request, _Source]]],
    ) -> float:
        if request.end is None and now >= request.deadline:
            self._fail(
                request,
                TransferTimeout(
                    f"request {request.id!r} was not received within "
                    f"{self._config.transfer_timeout} s ({request.step.name.lower()})",
                    peer=request.link.engine_id,
                ),
            )
        due = request.deadline - now if request.end is None else float("inf")
        if request.step is _Step.CONNECTING:
            if not self._can_start(request):
                return due
            if request.fence is not None and not request.fence.done():
                return _SOON_S
            self._start(request)
        self._settle_transfers(request)
        if request.pushing:
            due = min(due, self._ask(request, now))
        if request.step is _Step.MOVING:
            for source in request.sources:
                due = min(due, self._advance_source(request, source, now, to_check))
            if not request.pushing and all(source.is_held for source in request.sources):
                request.step = _Step.STAGING
                if self._stage_in is not None and request.meta.host_blocks is not None:
                    request.staging = self._stage_in(request.meta)
        if request.step is _Step.STAGING:
            if request.staging is not None and not request.staging.done():
                return _SOON_S
            self._finish(request, EndState.RECEIVED, None)
        if request.step is _Step.DRAINING:
            if self._is_quiet(request):
                request.step = _Step.OVER
            elif request.staging is not None:
                return _SOON_S
        return max(due, 0.0)

    def _can_start(self, request: _Request) -> bool:
        link = request.link
        if link.state is LinkState.DEAD:
            raise link.error or PeerLostError("the link is dead", peer=link.engine_id)
        if link.state is LinkState.CONNECTING:
            return False
        return self._config.transfer_mode == "pull" or all(p.has_answered for p in link.sources)

    def _start(self, request: _Request) -> None:
        request.step = _Step.MOVING
        if self._config.transfer_mode == "push":
            request.pushing.update(request.link.sources)
            return
        self._check_positions(request)
        request.sources = [_Source(producer) for producer in request.link.sources]

    def _read(self, request: _Request, source: _Source, now: float) -> None:
        """Begin to read what a request gets from a source."""
        meta, remote, producer = request.meta, request.remote, source.producer
        table_of = self._this.table_of
        local, local_starts = by_group(
            self._this.cache.groups,
            table_of,
            meta.host_blocks or meta.blocks,
            meta.starts,
            meta.block_sizes,
        )
        theirs, their_starts = by_group(
            producer.geometry.groups,
            table_of,
            remote.blocks,
            remote.starts,
            remote.remote_block_sizes,
        )
        for plan in producer.plans:
            wanted = plan.groups
            transfer = self._this.agent.read(
                producer.peer,
                plan,
                {name: local[name] for name in wanted},
                {name: theirs[name] for name in wanted},
                timeout=max(request.deadline - now, _SOON_S),
                num_tokens=dict.fromkeys(wanted, meta.num_tokens),
                local_start={name: local_starts[name] for name in wanted},
                remote_start={name: their_starts[name] for name in wanted},
            )
            source.running.append(transfer)
            request.transfers.append(transfer)

    def _settle_transfers(self, request: _Request) -> None:
        """Count reads that have ended, and fail the request if one has failed."""
        for source in request.sources:
            running = []
            for transfer in source.running:
                state = transfer.state
                if not state.is_end:
                    running.append(transfer)
                elif state is TransferState.DONE:
                    self._stats.transfer_done(transfer.result)
                else:
                    self._stats.transfer_failed(transfer)
                    self._fail(request, transfer.error or TransferError("the transfer failed"))
            source.running = running

    def _advance_source(
        self,
        request: _Request,
        source: _Source,
        now: float,
        to_check: dict[Producer, list[tuple[_Request, _Source]]],
    ) -> float:
        if source.running or source.is_held or source.is_checking:
            return float("inf")
        if now < source.check_at:
            return source.check_at - now
        to_check[source.producer].append((request, source))
        return float("inf")

    def _check_positions(self, request: _Request) -> None:
        """Check that every position that is expected here is there: nothing else tells."""
        meta, remote = request.meta, request.remote
        if len(remote.blocks) != len(meta.blocks):
            raise PlanError(
                f"request {request.id!r}: the producer has {len(remote.blocks)} block tables, this "
                f"side {len(meta.blocks)}"
            )
        late = [
            f"table {index} from {there} on, wanted from {here}"
            for index, (here, there) in enumerate(zip(meta.starts, remote.starts, strict=True))
            if there > here
        ]
        if late or meta.num_tokens > (remote.remote_num_tokens or 0):
            raise PlanError(
                f"request {request.id!r}: the producer holds {remote.remote_num_tokens} tokens of "
                f"{meta.num_tokens}; {'; '.join(late) or 'from position 0 on'}"
            )
        slots = min(p.words.remote.groups[0].num_blocks for p in request.link.producers)
        if _held(request).slot >= slots:
            raise PlanError(
                f"request {request.id!r}: its lease is {request.lease}, but the producer has "
                f"{slots} slots"
            )

    def _ask(self, request: _Request, now: float) -> float:
        """Ask the ranks that are to write, or, after the end, to stop; again until they answer."""
        for producer in [p for p in request.pushing if not p.peer.is_connected]:
            # It is gone, as its process or its host is, and writes no more.
            request.pushing.discard(producer)
            self._fail(request, PeerLostError("the producer is gone", peer=producer.peer.name))
        if now < request.ask_at:
            return request.ask_at - now
        request.ask_at = now + request.link.beat_interval
        meta = request.meta
        message: messages.Message = messages.Stop(request.ticket)
        if request.end is None:
            message = messages.Push(
                reader=self._this.reader,
                ticket=request.ticket,
                request_id=str(request.remote.remote_request_id),
                lease=request.lease,
                blocks=meta.host_blocks or meta.blocks,
                starts=meta.starts,
                block_sizes=meta.block_sizes,
                num_tokens=meta.num_tokens,
            )
        data = messages.encode(message)
        for producer in list(request.pushing):
            try:
                if request.link.state is LinkState.DEAD:
                    self._attach(producer)
                self._this.agent.notify(producer.peer, data)
            except PeerLostError as error:
                request.pushing.discard(producer)
                self._fail(request, error)
        return request.ask_at - now

    def _is_quiet(self, request: _Request) -> bool:
        if request.staging is not None and not has_ended(request.staging):
            return False
        return not request.pushing and all(t.is_quiet for t in request.transfers)

    # ---- leases

    def _check(self, to_check: dict[Producer, list[tuple[_Request, _Source]]], now: float) -> None:
        """Read the words that requests want to see: one read per producer."""
        for producer, all_asked in to_check.items():
            # Those that find no word free are there again in the next round.
            asked = [pair for pair in all_asked if pair[0].end is None][: len(self._free_words)]
            if not asked:
                continue
            slots = [self._free_words.pop() for _ in asked]
            try:
                transfer = self._this.agent.read(
                    producer.peer,
                    producer.words,
                    slots,
                    [_held(request).slot for request, _ in asked],
                    timeout=max(max(r.deadline for r, _ in asked) - now, _SOON_S),
                )
            except PynixlkvError as error:
                self._free_words += slots
                for request, _ in asked:
                    self._fail(request, error)
                continue
            for _, source in asked:
                source.is_checking = True
            link = asked[0][0].link
            link.num_checks += 1
            self._checks.append(_Check(link, asked, slots, transfer))

    def _take_words(self, check: _Check, now: float) -> bool:
        """Look at the words of a check; return whether they have come."""
        if not check.transfer.is_quiet:
            return False
        check.link.num_checks -= 1
        error = check.transfer.error
        for (request, source), slot in zip(check.asked, check.slots, strict=True):
            source.is_checking = False
            if request.end is not None:
                continue
            if error is not None:
                self._fail(request, error)
                continue
            found = status(_held(request), int(self._words[slot]))
            if found is LeaseStatus.ENDED:
                self._expire(request, source.producer)
            elif found is LeaseStatus.UNKNOWN:
                # The producer's worker has not heard of the lease from its scheduler yet.
                source.check_at = now + source.pause
                source.pause = min(2 * source.pause, _LONGEST_LOOK_S)
            elif not source.is_granted:
                source.is_granted = True
                try:
                    self._read(request, source, now)
                except PynixlkvError as failure:
                    self._fail(request, failure)
            else:
                source.is_held = True
        self._free_words += check.slots
        return True

    def _beat(self, now: float) -> float:
        due = self._config.peer_ttl
        for link in self._links.all():
            if link.state is not LinkState.READY or not link.requests:
                continue
            if now >= link.next_beat:
                self._send_beats(link, now)
            due = min(due, max(link.next_beat - now, 0.0))
        return due

    def _send_beats(self, link: Link, now: float) -> None:
        link.next_beat = now + link.beat_interval
        wanted = []
        for request_id in link.requests:
            request, waiting = self._requests.get(request_id), self._waiting.get(request_id)
            if request is not None and request.lease is not None and request.end is None:
                wanted.append((str(request.remote.remote_request_id), request.lease))
            elif waiting is not None and waiting.lease is not None:
                wanted.append((waiting.remote_id, waiting.lease))
        beats = []
        for entries in _chunks(wanted) or [[]]:
            self._beat_number += 1
            beats.append(messages.encode(messages.Beat(self._beat_number, entries)))
        for producer in link.producers:
            if producer.unanswered >= self._config.missed_heartbeats:
                error = PeerLostError(
                    f"rank {producer.rank} of engine {link.engine_id!r} left "
                    f"{producer.unanswered} heartbeats unanswered",
                    peer=producer.peer.name,
                )
                self._links.drop(link, error)
                return
            try:
                if producer.unanswered:
                    self._attach(producer)  # it may have missed, or forgotten, this worker
                for beat in beats:
                    self._this.agent.notify(producer.peer, beat)
            except PynixlkvError as error:
                self._links.drop(link, _lost(link, error))
                return
            producer.unanswered += 1

    def _attach(self, producer: Producer) -> None:
        attach = messages.Attach(self._this.reader, self._this.hello)
        self._this.agent.notify(producer.peer, messages.encode(attach))

    def _lose(self, link: Link) -> None:
        """End the requests of a dead link."""
        for request_id in [r for r, waiting in self._waiting.items() if waiting.link is link]:
            self._forget(request_id)
        if not link.requests:
            return
        self._stats.count("peers_lost")
        error = link.error or PeerLostError("the link is dead", peer=link.engine_id)
        _log.warning("producer engine %s is lost: %s", link.engine_id, str(error))
        for request in self._requests.values():
            if request.link is link:
                self._fail(request, error)

    # ---- ends

    def _expire(self, request: _Request, producer: Producer) -> None:
        self._finish(
            request,
            EndState.EXPIRED,
            LeaseExpired(
                f"the lease of request {request.id!r} ended at rank {producer.rank} of engine "
                f"{request.link.engine_id!r} before its bytes had moved; they may be those of "
                "another request",
                peer=producer.peer.name,
            ),
        )

    def _fail(self, request: _Request, error: Exception) -> None:
        self._finish(request, EndState.FAILED, error)
        if isinstance(error, PeerLostError) and request.link.state is LinkState.READY:
            self._links.drop(request.link, error)

    def _finish(self, request: _Request, end: EndState, error: Exception | None) -> None:
        """Give a request its end, once; later calls change nothing."""
        if request.end is not None:
            return
        request.end = end
        request.error = error
        request.step = _Step.DRAINING
        request.ask_at = 0.0  # who is writing may stop
        for transfer in request.transfers:
            if not transfer.state.is_end:
                transfer.cancel()

    def _close(self, request: _Request, now: float) -> RequestEnd:
        link = request.link
        link.requests.discard(request.id)
        link.last_used = now
        end = request.end
        assert end is not None
        has_written = end is EndState.RECEIVED and self._config.transfer_mode == "push"
        self._tell(request.remote, link, only_bystanders=has_written)
        self._stats.ended(end.value, request.error)
        if end is EndState.RECEIVED:
            return RequestEnd(end, None, ())
        RequestLog(_log, request=request.id, peer=link.engine_id).warning(
            "request %s from engine %s: %s: %s",
            request.id, link.engine_id, end.value, str(request.error),
        )  # fmt: skip
        return RequestEnd(end, request.error, request.meta.blocks)

    def _tell(self, hand_off: HandOff, link: Link, *, only_bystanders: bool = False) -> None:
        """Let the producer's ranks know that this reader is done with the request.

        Ranks that have written it know already; bystanders are those that nothing is got from.
        """
        if link.state is LinkState.CONNECTING:
            self._releasing.append((hand_off, link))
            return
        if link.state is LinkState.DEAD:
            self._stats.count("releases_lost")  # its leases run out without us
            return
        lease = hand_off.lease_token
        entry = str(hand_off.remote_request_id), lease
        for producer in link.producers:
            if not (only_bystanders and producer.plans) and entry not in self._outbox[producer]:
                self._outbox[producer].append(entry)

    def _flush_releases(self) -> None:
        releasing, self._releasing = self._releasing, []
        for hand_off, link in releasing:
            self._tell(hand_off, link)
        outbox, self._outbox = self._outbox, defaultdict(list)
        for producer, all_entries in outbox.items():
            for entries in _chunks(all_entries):
                message = messages.Release(self._this.reader, entries)
                try:
                    self._this.agent.notify(producer.peer, messages.encode(message))
                except PynixlkvError as error:
                    # The producer's leases run out without us.
                    _log.info("%s cannot be told of releases: %s", producer.peer.name, str(error))
                    self._stats.count("releases_lost")

    def has(self, request_id: str) -> bool:
        """Whether a request is under way."""
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        """Requests that have not been reported."""
        return len(self._requests)


def _chunks(entries: list[_T]) -> list[list[_T]]:
    step = messages.MAX_ENTRIES
    return [entries[i : i + step] for i in range(0, len(entries), step)]


def _held(request: _Request) -> Lease:
    assert request.lease is not None  # a pull always has one: HandOff checks
    return request.lease


def _lost(link: Link, error: PynixlkvError) -> PeerLostError:
    if isinstance(error, PeerLostError):
        return error
    lost = PeerLostError(f"engine {link.engine_id!r} cannot be told: {error}", peer=link.engine_id)
    lost.__cause__ = error
    return lost
