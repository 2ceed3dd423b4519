"""The consumer's half of a worker: requests whose blocks are to come from a producer.

Each request goes through the states of `_Step` on the connector's thread and ends in exactly one
`EndState`, which is reported once, and only when no byte of the request can move any more.

Pull: read the blocks from every source rank; then read the lease's word at each of them; only if
all words still are the lease's token is the request received. Push: ask every source rank to write;
each says when it has, and that nothing of it moves any more.
"""

from __future__ import annotations

import enum
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pynixlkv.connector import messages
from pynixlkv.connector.leases import status
from pynixlkv.connector.links import Link, LinkState, Producer
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

_SOON_S = 0.001
"""Pause before looking again at something that tells nobody when it changes."""


class Fence(Protocol):
    """Work on a device that is under way."""

    def done(self) -> bool:
        """Return whether it has ended; raise if it has failed. Does not block."""
        ...


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
    CHECKING = 2
    STAGING = 3  # received into the host cache, on the way to the device
    DRAINING = 4  # has its end, waits for quiet
    OVER = 5


@dataclass(eq=False)
class _Request:
    id: str
    meta: ReqMeta
    remote: HandOff
    lease: Lease | None
    link: Link
    fence: Fence | None
    deadline: float
    step: _Step = _Step.CONNECTING
    transfers: list[Transfer] = field(default_factory=list)
    unchecked: set[Producer] = field(default_factory=set)
    """Sources whose word is still to be seen."""
    pushing: set[Producer] = field(default_factory=set)
    """Sources that have been asked to write and have not said that they are done."""
    staging: Fence | None = None
    end: EndState | None = None
    error: Exception | None = None


@dataclass
class _Check:
    """A read of lease words under way."""

    producer: Producer
    requests: list[_Request]
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
        Begins to copy host blocks to the device: ``(host blocks, device blocks) -> Fence``.
    """

    def __init__(
        self,
        this: Local,
        words: np.ndarray[tuple[int], np.dtype[np.uint64]],
        links: Links,
        config: ConnectorConfig,
        stats: ConnectorStats,
        stage_in: Callable[[BlockLists, BlockLists], Fence] | None = None,
    ) -> None:
        self._this = this
        self._words = words
        self._free_words = list(range(len(words)))
        self._links = links
        self._config = config
        self._stats = stats
        self._stage_in = stage_in
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[str, tuple[HandOff, Link]] = {}
        self._releasing: list[tuple[HandOff, Link]] = []
        self._checks: list[_Check] = []
        self._outbox: dict[Producer, list[tuple[str, Lease | None]]] = defaultdict(list)
        self._beat_number = 0
        self._next_check_of: dict[_Request, float] = {}

    # ---- what the engine asks for

    def wait_for(self, request_id: str, hand_off: HandOff, now: float) -> None:
        """Connect for a request that is queued, and keep its leases alive."""
        link = self._link(hand_off, now)
        link.requests.add(request_id)
        self._waiting[request_id] = hand_off, link

    def receive(self, request_id: str, meta: ReqMeta, fence: Fence | None, now: float) -> None:
        """Begin to receive a request, when `fence` says that its blocks are free of older work."""
        remote = meta.remote
        if remote is None or request_id in self._requests:
            raise PlanError(f"request {request_id!r} cannot be received (again)")
        link = self._link(remote, now)
        link.requests.add(request_id)
        self._waiting.pop(request_id, None)
        self._requests[request_id] = _Request(
            id=request_id,
            meta=meta,
            remote=remote,
            lease=remote.lease_token if remote.lease is not None else None,
            link=link,
            fence=fence,
            deadline=now + self._config.transfer_timeout,
        )

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
            waiting[1].requests.discard(request_id)

    # ---- what producers say

    def on_ack(self, agent: str, message: messages.BeatAck) -> None:
        """Take a producer's answer to a heartbeat."""
        link = self._links.of_agent(agent)
        producer = link.of_agent(agent) if link is not None else None
        if producer is None:
            self._stats.count("foreign_notifications")
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
        request = self._requests.get(message.consumer_id)
        producer = None if request is None else request.link.of_agent(agent)
        if request is None or request.lease != message.lease or producer is None:
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
        to_check: dict[Producer, list[_Request]] = defaultdict(list)
        for check in self._checks:
            self._take_words(check, now)
        self._checks = [check for check in self._checks if not check.transfer.is_quiet]
        for request in list(self._requests.values()):
            try:
                pause = self._advance(request, now, to_check)
            except Exception as error:  # whatever it is, it ends this request and no other
                self._fail(request, error)
                pause = 0.0
            due = min(due, pause)
            if request.step is _Step.OVER:
                del self._requests[request.id]
                ends[request.id] = self._close(request, now)
        self._check(to_check, now)
        self._flush_releases()
        return due

    def _advance(
        self, request: _Request, now: float, to_check: dict[Producer, list[_Request]]
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
        if request.step is _Step.CONNECTING:
            if request.link.state is LinkState.CONNECTING:
                return request.deadline - now
            if request.fence is not None and not request.fence.done():
                return _SOON_S
            self._start(request, now)
        if request.step is _Step.MOVING and self._has_moved(request):
            request.step = _Step.CHECKING
            if self._config.transfer_mode == "pull":
                request.unchecked = set(request.link.sources)
                for producer in request.unchecked:
                    to_check[producer].append(request)
        if request.step is _Step.CHECKING and not request.unchecked:
            request.step = _Step.STAGING
            if self._stage_in is not None and request.meta.host_blocks is not None:
                request.staging = self._stage_in(request.meta.host_blocks, request.meta.blocks)
        if request.step is _Step.CHECKING:
            again = self._next_check_of.get(request)
            if again is not None and now >= again:
                del self._next_check_of[request]
                for producer in request.unchecked:
                    to_check[producer].append(request)
            elif again is not None:
                return again - now
        if request.step is _Step.STAGING:
            if request.staging is not None and not request.staging.done():
                return _SOON_S
            self._finish(request, EndState.RECEIVED, None)
        if request.step is _Step.DRAINING and self._is_quiet(request):
            request.step = _Step.OVER
        return max(request.deadline - now, _SOON_S)

    def _start(self, request: _Request, now: float) -> None:
        link = request.link
        if link.state is LinkState.DEAD:
            raise link.error or PeerLostError("the link is dead", peer=link.engine_id)
        request.step = _Step.MOVING
        if self._config.transfer_mode == "push":
            for producer in link.sources:
                self._ask_to_push(request, producer)
                request.pushing.add(producer)
            return
        self._check_positions(request)
        meta, remote = request.meta, request.remote
        table_of = self._this.table_of
        local, local_starts = by_group(
            self._this.cache.groups,
            table_of,
            meta.host_blocks or meta.blocks,
            meta.starts,
            meta.block_sizes,
        )
        for producer in link.sources:
            theirs, their_starts = by_group(
                producer.geometry.groups,
                table_of,
                remote.blocks,
                remote.starts,
                remote.remote_block_sizes,
            )
            for plan in producer.plans:
                wanted = plan.groups
                request.transfers.append(
                    self._this.agent.read(
                        producer.peer,
                        plan,
                        {name: local[name] for name in wanted},
                        {name: theirs[name] for name in wanted},
                        timeout=max(request.deadline - now, _SOON_S),
                        num_tokens=dict.fromkeys(wanted, meta.num_tokens),
                        local_start={name: local_starts[name] for name in wanted},
                        remote_start={name: their_starts[name] for name in wanted},
                    )
                )

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

    def _ask_to_push(self, request: _Request, producer: Producer) -> None:
        meta = request.meta
        push = messages.encode(
            messages.Push(
                reader=self._this.reader,
                request_id=str(request.remote.remote_request_id),
                lease=request.lease,
                consumer_id=request.id,
                blocks=meta.host_blocks or meta.blocks,
                starts=meta.starts,
                block_sizes=meta.block_sizes,
                num_tokens=meta.num_tokens,
            )
        )
        self._this.agent.notify(producer.peer, push)

    def _has_moved(self, request: _Request) -> bool:
        """Return whether all bytes are here; fail the request if some never will be."""
        all_done = not request.pushing
        for transfer in request.transfers:
            state = transfer.state
            if state is TransferState.DONE:
                continue
            all_done = False
            if state.is_end:
                self._stats.transfer_failed(transfer)
                error = transfer.error
                self._fail(request, error or TransferError("the transfer failed"))
                return False
        if all_done:
            for transfer in request.transfers:
                self._stats.transfer_done(transfer.result)
        return all_done

    def _is_quiet(self, request: _Request) -> bool:
        if request.staging is not None and not _ended(request.staging):
            return False
        return not request.pushing and all(t.is_quiet for t in request.transfers)

    # ---- leases

    def _check(self, to_check: dict[Producer, list[_Request]], now: float) -> None:
        """Read the words of all requests that have got their bytes: one read per producer."""
        for producer, requests in to_check.items():
            count = min(len(requests), len(self._free_words))
            for request in requests[count:]:
                self._next_check_of[request] = now  # no word free: next round
            asked = requests[:count]
            if not asked:
                continue
            slots = [self._free_words.pop() for _ in asked]
            try:
                transfer = self._this.agent.read(
                    producer.peer,
                    producer.words,
                    slots,
                    [_held(request).slot for request in asked],
                    timeout=max(min(r.deadline for r in asked) - now, _SOON_S),
                )
            except PynixlkvError as error:
                self._free_words += slots
                for request in asked:
                    self._fail(request, error)
                continue
            self._checks.append(_Check(producer, asked, slots, transfer))

    def _take_words(self, check: _Check, now: float) -> None:
        if not check.transfer.is_quiet:
            return
        error = check.transfer.error
        for request, slot in zip(check.requests, check.slots, strict=True):
            if error is not None:
                self._fail(request, error)
                continue
            found = status(_held(request), int(self._words[slot]))
            if found is LeaseStatus.HELD:
                request.unchecked.discard(check.producer)
            elif found is LeaseStatus.ENDED:
                self._expire(request, check.producer)
            else:
                # The producer's worker has not heard of the lease from its scheduler yet.
                self._next_check_of[request] = now + _SOON_S
        self._free_words += check.slots

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
        self._beat_number += 1
        wanted = []
        for request_id in link.requests:
            request = self._requests.get(request_id)
            hand_off = request.remote if request is not None else self._waiting[request_id][0]
            if hand_off.lease is not None:
                wanted.append((str(hand_off.remote_request_id), hand_off.lease_token))
        beat = messages.encode(messages.Beat(self._beat_number, wanted))
        for producer in link.producers:
            if producer.unanswered >= self._config.missed_heartbeats:
                error = PeerLostError(
                    f"rank {producer.rank} of engine {link.engine_id!r} left "
                    f"{producer.unanswered} heartbeats unanswered",
                    peer=producer.peer.name,
                )
                self._links.drop(link, error)
                self._lose(link)
                return
            producer.unanswered += 1
            try:
                if not producer.has_answered:
                    self._attach(producer)
                self._this.agent.notify(producer.peer, beat)
            except PynixlkvError as error:
                self._links.drop(link, _lost(link, error))
                self._lose(link)
                return
        for request in self._requests.values():
            for producer in request.pushing if request.link is link else ():
                self._ask_to_push(request, producer)  # the first, or its answer, may be lost

    def _attach(self, producer: Producer) -> None:
        attach = messages.Attach(self._this.reader, self._this.hello)
        self._this.agent.notify(producer.peer, messages.encode(attach))

    def _lose(self, link: Link) -> None:
        """End the requests of a dead link."""
        self._stats.count("peers_lost")
        error = link.error or PeerLostError("the link is dead", peer=link.engine_id)
        _log.warning("producer engine %s is lost: %s", link.engine_id, error)
        for request in self._requests.values():
            if request.link is link:
                # A dead producer does not write any more, and cannot say so.
                request.pushing.clear()
                self._fail(request, error)
        for request_id in [r for r, (_, of) in self._waiting.items() if of is link]:
            del self._waiting[request_id]

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
            self._lose(request.link)

    def _finish(self, request: _Request, end: EndState, error: Exception | None) -> None:
        """Give a request its end, once; later calls change nothing."""
        if request.end is not None:
            return
        request.end = end
        request.error = error
        request.step = _Step.DRAINING
        self._next_check_of.pop(request, None)
        for transfer in request.transfers:
            if not transfer.state.is_end:
                transfer.cancel()
        if request.pushing:
            self._tell(request.remote, request.link)  # who is writing may stop

    def _close(self, request: _Request, now: float) -> RequestEnd:
        link = request.link
        link.requests.discard(request.id)
        link.last_used = now
        self._tell(request.remote, link)
        end = request.end
        assert end is not None
        self._stats.ended(end.value, request.error)
        if end is EndState.RECEIVED:
            return RequestEnd(end, None, ())
        _log.warning(
            "request %s from engine %s: %s: %s",
            request.id, link.engine_id, end.value, request.error,
            extra={"request": request.id, "peer": link.engine_id},
        )  # fmt: skip
        return RequestEnd(end, request.error, request.meta.blocks)

    def _tell(self, hand_off: HandOff, link: Link) -> None:
        """Let all ranks of the producer know that this reader is done with the request."""
        lease = hand_off.lease_token if hand_off.lease is not None else None
        for producer in link.producers if link.state is LinkState.READY else ():
            entry = str(hand_off.remote_request_id), lease
            if entry not in self._outbox[producer]:
                self._outbox[producer].append(entry)

    def _flush_releases(self) -> None:
        waiting = []
        for hand_off, link in self._releasing:
            if link.state is LinkState.CONNECTING:
                waiting.append((hand_off, link))
            self._tell(hand_off, link)
        self._releasing = waiting
        outbox, self._outbox = self._outbox, defaultdict(list)
        for producer, entries in outbox.items():
            message = messages.Release(self._this.reader, entries)
            try:
                self._this.agent.notify(producer.peer, messages.encode(message))
            except PynixlkvError as error:
                # The producer's leases run out without us.
                _log.info("%s could not be told of releases: %s", producer.peer.name, error)
                self._stats.count("releases_lost")

    @property
    def num_requests(self) -> int:
        """Requests that have not been reported."""
        return len(self._requests)


def _held(request: _Request) -> Lease:
    assert request.lease is not None  # a pull always has one: HandOff checks
    return request.lease


def _ended(fence: Fence) -> bool:
    try:
        return fence.done()
    except Exception:  # it failed; whoever waited for it has been told
        return True


def _lost(link: Link, error: PynixlkvError) -> PeerLostError:
    if isinstance(error, PeerLostError):
        return error
    lost = PeerLostError(f"engine {link.engine_id!r} cannot be told: {error}", peer=link.engine_id)
    lost.__cause__ = error
    return lost
