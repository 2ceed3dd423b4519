"""The consumer's half of a worker: requests whose blocks come from a producer.

Each request passes through the states of `_Step` on the connector's thread. It ends in exactly one
`EndState`, which is reported once, and only after all its bytes have stopped moving.

Pull: at every source rank, read the lease word until it is the lease's token, then the blocks, then
the word again. The request is received only if the word still is the token at every source: the
first look shows that the blocks are complete, the second that they were not reused.

Then compare digests of what has arrived with those that the source ranks compute, while they hold
their blocks (see `pynixlkv.connector.verification`).

Push: ask every source rank to write. Only the source knows when its writes have ended, so a failed
request keeps its blocks until every rank that was asked has answered or is known to be gone, and a
rank is asked only once it has proved that it can answer.
"""

from __future__ import annotations

import enum
import logging
import operator
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pynixlkv.connector import messages
from pynixlkv.connector.leases import status
from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.metadata import EndState, KVTransferParams, Lease, ReqMeta
from pynixlkv.connector.remote_engines import RemoteEngine, RemoteEngineState, RemoteRank
from pynixlkv.connector.spans import HandOffSpan
from pynixlkv.connector.staging import has_completed
from pynixlkv.connector.verification import Verification
from pynixlkv.errors import (
    KVCorruptError,
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
    import numpy as np

    from pynixlkv.agent import Transfer
    from pynixlkv.connector.context import WorkerContext
    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.connector.remote_engines import RemoteEngines
    from pynixlkv.connector.spans import Phase
    from pynixlkv.connector.staging import DeviceEvent

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_POLL_S = 0.001
"""Pause before polling again for something that sends no notification."""

_LONGEST_POLL_S = 0.05
"""The pause doubles up to this while a producer has not granted a lease."""
_POLLED_PART = 1 / 8
"""Or up to this part of the time that the request has taken: the lease may be of an earlier life of
the producer, which never grants it."""


@dataclass(frozen=True)
class RequestEnd:
    """How receiving a request ended."""

    state: EndState
    error: Exception | None
    """Why, unless it was received."""
    blocks: BlockLists
    """Local blocks, by group, whose contents are undefined; empty if it was received."""


class _Step(enum.Enum):
    CONNECTING = 0  # waits for the handshake, or for the device to finish with the blocks
    MOVING = 1
    VERIFYING = 2  # all is here, and was held; digests are compared
    STAGING = 3  # in the host cache, being copied to the device
    DRAINING = 4  # has its end, waits for quiet
    OVER = 5


@dataclass(eq=False)
class _Source:
    """What a pull reads from one producer rank."""

    producer: RemoteRank
    running: list[Transfer] = field(default_factory=list)
    """Reads of blocks whose end has not been seen."""
    check_at: float = 0.0
    pause: float = _POLL_S
    is_checking: bool = False
    is_granted: bool = False
    """The lease held before the blocks were read."""
    is_held: bool = False
    """It still held afterwards."""


@dataclass(eq=False)
class _Request:
    id: str
    meta: ReqMeta
    remote: KVTransferParams
    reader: messages.Reader
    engine: RemoteEngine
    event: DeviceEvent | None
    deadline: float
    push_id: int
    began: float
    queued_at: float
    end: EndState | None = None
    step: _Step = _Step.CONNECTING
    sleeps_until: float = 0.0
    """A round does nothing with it before, unless it has news."""
    passed: dict[str, float] = field(default_factory=dict)
    """When each step was seen first."""
    sources: list[_Source] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    """All reads of blocks, ended ones included."""
    pushing: set[RemoteRank] = field(default_factory=set)
    """Ranks that have been asked to write and have not answered."""
    ask_at: float = 0.0
    """When to ask them again: a request or an answer may be lost."""
    verification: Verification | None = None
    staging: DeviceEvent | None = None
    error: Exception | None = None


_ToCheck: TypeAlias = "dict[RemoteRank, list[tuple[_Request, _Source]]]"
"""Whose lease words to read in this round."""


@dataclass
class _Check:
    """A read of lease words in progress."""

    asked: list[tuple[_Request, _Source]]
    slots: list[int]
    transfer: Transfer


class Receiver:
    """Receives requests. Lives on the connector's thread."""

    def __init__(
        self,
        ctx: WorkerContext,
        words: np.ndarray[tuple[int], np.dtype[np.uint64]],
        engines: RemoteEngines,
    ) -> None:
        self._ctx = ctx
        self._words = words  # the memory of `ctx.lease_buffer`
        self._free_words = list(range(len(words)))
        self._engines = engines
        self._requests: dict[str, _Request] = {}
        self._queued: dict[str, tuple[RemoteEngine, float]] = {}  # and since when
        self._by_push_id: dict[int, _Request] = {}
        # A random start keeps ids of an earlier life of this worker from matching.
        self._next_push_id = secrets.randbits(61)
        self._checks: list[_Check] = []

    # ---- the engine's commands

    def wait_for(self, request_id: str, remote: KVTransferParams, now: float) -> None:
        """Connect for a queued request, and keep its lease alive."""
        if request_id in self._requests:
            raise PlanError(f"request {request_id!r} is being received, it does not wait")
        self._forget(request_id)
        engine = self._engine(remote, now)
        self._queued[request_id] = engine, now
        self._engines.attach(engine, request_id, _reader(remote))

    def receive(
        self, request_id: str, meta: ReqMeta, event: DeviceEvent | None, now: float
    ) -> None:
        """Receive a request, into blocks that are free of older work after `event`."""
        remote = meta.remote
        if remote is None or request_id in self._requests:
            raise PlanError(f"request {request_id!r} cannot be received (again)")
        reader = _reader(remote)
        is_attached = request_id in self._queued
        _, queued_at = self._queued.get(request_id, (None, now))
        self._forget(request_id)
        engine = self._engine(remote, now)
        self._engines.attach(engine, request_id, reader, is_known=is_attached)
        self._next_push_id += 1
        request = _Request(
            id=request_id,
            meta=meta,
            remote=remote,
            reader=reader,
            engine=engine,
            event=event,
            deadline=now + self._ctx.config.transfer_timeout,
            push_id=self._next_push_id,
            began=now,
            queued_at=queued_at,
        )
        self._requests[request_id] = self._by_push_id[request.push_id] = request

    def release(self, request_id: str, remote: KVTransferParams, now: float) -> None:
        """Tell a producer, once, that a request is no longer wanted."""
        self._forget(request_id)
        self._engines.release(self._engine(remote, now), _reader(remote))

    def abort(self, request_id: str) -> None:
        """End a request that the engine has given up."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(
                request,
                EndState.ABORTED,
                TransferCancelled(f"request {request_id!r} was aborted by its engine"),
            )

    def _engine(self, remote: KVTransferParams, now: float) -> RemoteEngine:
        lease_duration = remote.lease_duration or self._ctx.config.lease_duration
        return self._engines.get(remote, self._ctx.config.heartbeat_period(lease_duration), now)

    def _forget(self, request_id: str) -> None:
        engine, _ = self._queued.pop(request_id, (None, 0.0))
        if engine is not None:
            engine.requests.pop(request_id, None)

    # ---- messages of producers

    def on_heartbeat_ack(self, agent: str, message: messages.HeartbeatAck) -> None:
        """Take a producer's answer to a heartbeat."""
        producers = self._engines.ranks_of(agent)
        if not producers:
            # An answer may arrive before `settle` has seen the end of the handshake.
            is_early = any(e.state is RemoteEngineState.CONNECTING for e in self._engines.all())
            self._ctx.stats.count("early_notifications" if is_early else "foreign_notifications")
            return
        if not all(producer.has_answered for producer in producers):
            for request in self._requests.values():
                request.sleeps_until = 0.0  # it may wait for that
        for producer in producers:
            producer.unanswered = 0
            producer.has_answered = True
        ended = {lease for _, lease, state in message.not_held if state is LeaseStatus.ENDED}
        for request in list(self._requests.values()) if ended else ():
            # Once a pull has begun, only the lease word says whether it was in time.
            if request.reader.lease in ended and request.step is _Step.CONNECTING:
                self._expire(request, producers[0])

    def on_push_done(self, agent: str, message: messages.PushDone) -> None:
        """Take the end of a push."""
        request, producer = self._asked(agent, message.push_id)
        if request is None or producer is None:
            self._ctx.stats.count("late_notifications")
            return
        if producer not in request.pushing:
            self._ctx.stats.count("duplicate_notifications")
            return
        request.pushing.discard(producer)
        if message.expired:
            self._expire(request, producer)
        elif message.error:
            self._refused(request, producer, f"did not write: {message.error}")

    def on_digests(self, agent: str, message: messages.Digests) -> None:
        """Take a rank's digests of what it gave."""
        request, producer = self._asked(agent, message.digest_id)
        check = None if request is None else request.verification
        if request is None or producer is None or check is None or producer not in check.ask_at:
            self._ctx.stats.count("late_notifications")
        elif message.expired:
            self._expire(request, producer, "before it gave digests of them")
        elif message.error:
            self._refused(request, producer, f"gave no digests: {message.error}")
        else:
            try:
                check.take(producer, message.values)
            except PynixlkvError as error:
                self._fail(request, error)

    def _asked(self, agent: str, push_id: int) -> tuple[_Request | None, RemoteRank | None]:
        """Return the request and the rank that an answer is for, if there are any."""
        request = self._by_push_id.get(push_id)
        if request is not None:
            request.sleeps_until = 0.0
        ranks = () if request is None else request.engine.ranks
        return request, next((rank for rank in ranks if rank.peer.name == agent), None)

    def _refused(self, request: _Request, producer: RemoteRank, why: str) -> None:
        text = f"the producer's rank {producer.rank} {why}"
        self._fail(request, TransferError(text, peer=producer.peer.name))

    # ---- the thread's round

    def poll(self, now: float, ends: dict[str, RequestEnd]) -> float:
        """Advance everything; add quiet ends to `ends`; return the seconds until the next call."""
        for engine in self._engines.settle(now):
            self._lose(engine)
        due = self._engines.send_heartbeats(now)
        self._checks = [check for check in self._checks if not self._take_words(check, now)]
        to_check: _ToCheck = defaultdict(list)
        for request in list(self._requests.values()):
            if now < request.sleeps_until and not _has_news(request):
                due = min(due, request.sleeps_until - now)
                continue
            try:
                pause = self._advance(request, now, to_check)
            except Exception as error:  # ends this request and no other
                self._fail(request, error)
                pause = 0.0
            if request.step is _Step.MOVING:
                request.sleeps_until = now + pause
            due = min(due, pause)
            if request.step is _Step.OVER:
                del self._requests[request.id], self._by_push_id[request.push_id]
                ends[request.id] = self._close(request, now)
        self._check(to_check, now)
        return 0.0 if self._engines.have_news else due

    def _advance(self, request: _Request, now: float, to_check: _ToCheck) -> float:
        request.passed.setdefault(request.step.name.lower(), now)
        if request.step is _Step.CONNECTING and request.engine.is_queued:
            request.deadline = now + self._ctx.config.transfer_timeout
        if request.end is None and now >= request.deadline:
            self._fail(
                request,
                TransferTimeout(
                    f"request {request.id!r} was not received within "
                    f"{self._ctx.config.transfer_timeout} s ({request.step.name.lower()})",
                    peer=request.engine.engine_id,
                ),
            )
        due = request.deadline - now if request.end is None else float("inf")
        if request.step is _Step.CONNECTING:
            if not self._can_start(request):
                return due
            if request.event is not None and not request.event.query():
                return _POLL_S
            self._start(request)
        self._settle_transfers(request)
        if request.pushing:
            due = min(due, self._ask(request, now))
        if request.step is _Step.MOVING:
            for source in request.sources:
                if source.running or source.is_held or source.is_checking:
                    continue
                if now >= source.check_at:
                    to_check[source.producer].append((request, source))
                else:
                    due = min(due, source.check_at - now)
            if not request.pushing and all(source.is_held for source in request.sources):
                request.step = _Step.VERIFYING
                request.passed.setdefault("verifying", now)
                if self._ctx.config.checksums == "off":
                    self._stage(request)
                else:
                    self._verification(request).begin()
        if self._ctx.config.checksums != "off" and request.end is None:
            due = min(due, self._verify(request, now))
        if request.step is _Step.STAGING:
            if request.staging is not None and not request.staging.query():
                return _POLL_S
            self._finish(request, EndState.RECEIVED, None)
        if request.step is _Step.DRAINING:
            if self._is_quiet(request):
                request.step = _Step.OVER
            elif request.staging is not None:
                return _POLL_S
        return max(due, 0.0)

    def _can_start(self, request: _Request) -> bool:
        engine = request.engine
        if engine.state is RemoteEngineState.DEAD:
            raise engine.death
        if engine.state is RemoteEngineState.CONNECTING:
            return False
        if engine.contact.refusal is not None:
            raise engine.contact.refusal
        return self._ctx.config.transfer_mode == "pull" or all(
            p.has_answered for p in engine.sources
        )

    def _start(self, request: _Request) -> None:
        request.step = _Step.MOVING
        if self._ctx.config.transfer_mode == "push":
            request.pushing.update(request.engine.sources)
            return
        self._check_positions(request)
        request.sources = [_Source(producer) for producer in request.engine.sources]

    def _read(self, request: _Request, source: _Source, now: float) -> None:
        meta, remote, producer = request.meta, request.remote, source.producer
        local, local_starts = self._ctx.local_tables(meta)
        theirs, their_starts = self._ctx.tables_by_group(
            producer.geometry, remote.blocks, remote.starts, remote.remote_block_sizes
        )
        for plan in producer.plans:
            wanted = plan.groups
            transfer = self._ctx.agent.read(
                producer.peer,
                plan,
                {name: local[name] for name in wanted},
                {name: theirs[name] for _, name in plan.pairs},
                timeout=max(request.deadline - now, _POLL_S),
                num_tokens=dict.fromkeys(wanted, meta.num_tokens),
                local_start={name: local_starts[name] for name in wanted},
                remote_start={name: their_starts[name] for _, name in plan.pairs},
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
                    self._ctx.stats.transfer_done(transfer.result)
                else:
                    self._ctx.stats.transfer_failed(transfer)
                    self._fail(request, transfer.error or TransferError("the transfer failed"))
            source.running = running

    def _check_positions(self, request: _Request) -> None:
        """Verify that the producer covers every requested token; no later check would see a gap."""
        meta, remote = request.meta, request.remote
        if len(remote.blocks) != len(meta.blocks):
            raise PlanError(
                f"request {request.id!r}: the producer has {len(remote.blocks)} block tables, this "
                f"side {len(meta.blocks)}"
            )
        self._ctx.check_state(meta.num_tokens, remote.remote_num_tokens or 0)
        state = self._ctx.state_tables
        late = [
            f"table {index} from {there} on, wanted from {here}"
            for index, (here, there) in enumerate(zip(meta.starts, remote.starts, strict=True))
            if there > here and index not in state
        ]
        if late or meta.num_tokens > (remote.remote_num_tokens or 0):
            raise PlanError(
                f"request {request.id!r}: the producer holds {remote.remote_num_tokens} tokens of "
                f"{meta.num_tokens}; {'; '.join(late) or 'from position 0 on'}"
            )
        slots = min(p.words.remote.groups[0].num_blocks for p in request.engine.ranks)
        lease = _lease(request)
        if lease.slot >= slots:
            raise PlanError(
                f"request {request.id!r}: its lease is {lease}, but the producer has {slots} slots"
            )

    def _ask(self, request: _Request, now: float) -> float:
        """Ask source ranks to write or, after the end, to cancel; repeat until they answer."""
        for producer in [p for p in request.pushing if not p.peer.is_connected]:
            # Its process or host is gone, so it writes no more.
            request.pushing.discard(producer)
            self._fail(request, PeerLostError("the producer is gone", peer=producer.peer.name))
        if now < request.ask_at:
            return request.ask_at - now
        request.ask_at = now + request.engine.heartbeat_period
        meta = request.meta
        message: messages.Message = messages.CancelPush(request.push_id)
        if request.end is None:
            message = messages.Push(
                consumer=self._ctx.identity,
                push_id=request.push_id,
                request_id=request.reader.request_id,
                lease=request.reader.lease,
                blocks=meta.host_blocks or meta.blocks,
                starts=meta.starts,
                block_sizes=meta.block_sizes,
                num_tokens=meta.num_tokens,
                is_verified=self._ctx.config.checksums != "off",
                reader_number=request.reader.number,
                num_readers=request.reader.num_readers,
                content=meta.content,
            )
        data = messages.encode(message)
        for producer in list(request.pushing):
            try:
                if request.engine.state is RemoteEngineState.DEAD:
                    self._ctx.introduce(producer.peer)
                self._ctx.agent.notify(producer.peer, data)
            except PeerLostError as error:
                request.pushing.discard(producer)
                self._fail(request, error)
        return request.ask_at - now

    def _verification(self, request: _Request) -> Verification:
        """Return what verifies a request; made once its bytes move, which it need not wait for."""
        if request.verification is None:
            sources = request.engine.sources
            request.verification = Verification(self._ctx, request.id, request.meta, sources)
        return request.verification

    def _verify(self, request: _Request, now: float) -> float:
        """Ask for digests of what is being read or has been written, and compare them at last."""
        asked = {source.producer for source in request.sources if source.is_granted}
        if request.step is _Step.VERIFYING:
            asked.update(request.engine.sources)
        due = float("inf")
        if not asked:
            return due
        check = self._verification(request)
        for producer in [p for p in check.ask_at if p in asked and p.has_answered]:
            if now >= check.ask_at[producer]:
                check.ask_at[producer] = now + request.engine.heartbeat_period
                message = messages.DigestRequest(
                    digest_id=request.push_id,
                    reader=request.reader,
                    scopes=tuple(check.scopes[producer]),
                )
                try:
                    self._ctx.agent.notify(producer.peer, messages.encode(message))
                except PynixlkvError as error:
                    self._fail(request, error)
            due = min(due, check.ask_at[producer] - now)
        if request.step is _Step.VERIFYING and not check.ask_at and check.is_quiet:
            try:
                check.check()
            except KVCorruptError as error:
                self._finish(request, EndState.CORRUPT, error)
            else:
                self._stage(request)
        return due

    def _stage(self, request: _Request) -> None:
        request.step = _Step.STAGING
        request.staging = self._ctx.stage("h2d", request.meta)

    def _is_quiet(self, request: _Request) -> bool:
        if request.verification is not None and not request.verification.is_quiet:
            return False
        if request.staging is not None and not has_completed(request.staging):
            return False
        return not request.pushing and all(t.is_quiet for t in request.transfers)

    # ---- leases

    def _check(self, to_check: _ToCheck, now: float) -> None:
        """Read lease words, in one read per producer."""
        for producer, all_asked in to_check.items():
            # Requests for which no word is free ask again in the next round.
            for request, _ in all_asked:
                request.sleeps_until = 0.0
            asked = [pair for pair in all_asked if pair[0].end is None][: len(self._free_words)]
            if not asked:
                continue
            slots = [self._free_words.pop() for _ in asked]
            try:
                transfer = self._ctx.agent.read(
                    producer.peer,
                    producer.words,
                    slots,
                    [_lease(request).slot for request, _ in asked],
                    timeout=max(max(r.deadline for r, _ in asked) - now, _POLL_S),
                )
            except PynixlkvError as error:
                self._free_words += slots
                for request, _ in asked:
                    self._fail(request, error)
                continue
            for _, source in asked:
                source.is_checking = True
            self._checks.append(_Check(asked, slots, transfer))

    def _take_words(self, check: _Check, now: float) -> bool:
        """Evaluate the words of a check; return whether they have arrived."""
        if not check.transfer.is_quiet:
            return False
        error = check.transfer.error
        for (request, source), slot in zip(check.asked, check.slots, strict=True):
            source.is_checking = False
            request.sleeps_until = 0.0
            if request.end is not None:
                continue
            if error is not None:
                self._fail(request, error)
                continue
            found = status(_lease(request), int(self._words[slot]))
            if found is LeaseStatus.ENDED:
                self._expire(request, source.producer)
            elif found is LeaseStatus.UNKNOWN:
                # The producer's scheduler has not told its worker of the lease yet.
                source.check_at = now + source.pause
                longest = max(_LONGEST_POLL_S, _POLLED_PART * (now - request.began))
                source.pause = min(2 * source.pause, longest)
            elif not source.is_granted:
                source.is_granted = True
                request.passed.setdefault("reading", now)
                try:
                    self._read(request, source, now)
                except PynixlkvError as failure:
                    self._fail(request, failure)
            else:
                source.is_held = True
        self._free_words += check.slots
        return True

    def _lose(self, engine: RemoteEngine) -> None:
        for request_id in [r for r, (its, _) in self._queued.items() if its is engine]:
            self._forget(request_id)
        if not engine.requests:
            return
        self._ctx.stats.count("peers_lost")
        _log.warning("producer engine %s is lost: %s", engine.engine_id, str(engine.death))
        for request in self._requests.values():
            if request.engine is engine:
                self._fail(request, engine.death)

    # ---- ends

    def _expire(
        self, request: _Request, producer: RemoteRank, when: str = "before its bytes had moved"
    ) -> None:
        self._finish(
            request,
            EndState.EXPIRED,
            LeaseExpired(
                f"the lease of request {request.id!r} ended at rank {producer.rank} of engine "
                f"{request.engine.engine_id!r} {when}; they may be those of another request",
                peer=producer.peer.name,
            ),
        )

    def _fail(self, request: _Request, error: Exception) -> None:
        self._finish(request, EndState.FAILED, error)
        if isinstance(error, PeerLostError) and request.engine.state is RemoteEngineState.READY:
            self._engines.drop(request.engine, error)

    def _finish(self, request: _Request, end: EndState, error: Exception | None) -> None:
        """Give a request its end; the first one stays."""
        if request.end is not None:
            return
        request.end = end
        request.error = error
        request.engine.requests[request.id] = None
        request.step = _Step.DRAINING
        request.sleeps_until = 0.0
        request.ask_at = 0.0  # cancel pushes at once
        for transfer in request.transfers:
            if not transfer.state.is_end:
                transfer.cancel()
        if request.verification is not None:
            request.verification.cancel()

    def _close(self, request: _Request, now: float) -> RequestEnd:
        engine = request.engine
        engine.requests.pop(request.id, None)
        engine.last_used = now
        end = request.end
        assert end is not None
        has_written = (
            end is EndState.RECEIVED
            and self._ctx.config.transfer_mode == "push"
            and self._ctx.config.checksums == "off"
        )
        self._engines.release(engine, request.reader, only_bystanders=has_written)
        self._ctx.stats.ended(end.value, request.error)
        self._log_contact(request, now)
        done = [t.result for t in request.transfers if t.state is TransferState.DONE]
        num_bytes = sum(each.bytes for each in done)
        if self._ctx.tracer is not None:
            self._ctx.tracer(_span(request, num_bytes, now))
        if end is EndState.RECEIVED:
            self._ctx.stats.handed_over(now - request.began, num_bytes)
            return RequestEnd(end, None, ())
        _log.warning(
            "request %s from engine %s: %s: %s",
            request.id, engine.engine_id, end.value, str(request.error),
            extra={"request": request.id, "peer": engine.engine_id},
        )  # fmt: skip
        return RequestEnd(end, request.error, request.meta.blocks)

    def _log_contact(self, request: _Request, now: float) -> None:
        """Log how long each phase of the first contact with an engine took, once."""
        contact = request.engine.contact
        phases, contact.seconds = contact.seconds, {}
        if phases:
            begins = [*request.passed.values(), now]
            phases |= zip(request.passed, map(operator.sub, begins[1:], begins), strict=True)
            listed = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in phases.items())
            _log.info("first contact with engine %s: %s", request.engine.engine_id, listed)

    def has(self, request_id: str) -> bool:
        """Whether a request is being received."""
        return request_id in self._requests

    def gauges(self) -> dict[str, int]:
        """Return the fields of a `StatsSnapshot` that are not counted but observed."""
        return {
            "peers": len(self._engines),
            "receiving": len(self._requests),
            "lease_checks": len(self._words) - len(self._free_words),
        }


def _span(request: _Request, num_bytes: int, now: float) -> HandOffSpan:
    begins: dict[Phase, float | None] = {
        "queued": request.queued_at if request.queued_at < request.began else None,
        "handshake": request.began,
        "read": request.passed.get("moving"),
        "verified": request.passed.get("verifying"),
        "staged": request.passed.get("staging"),
    }
    ages = [(name, now - begin) for name, begin in begins.items() if begin is not None]
    ends = [age for _, age in ages[1:]] + [0.0]
    assert request.end is not None
    return HandOffSpan(
        "consumer",
        request.id,
        request.meta.traceparent,
        request.end.value,
        now - request.queued_at,
        tuple((name, age, end) for (name, age), end in zip(ages, ends, strict=True)),
        request.error,
        {
            "engine": request.engine.engine_id,
            "tokens": request.meta.num_tokens,
            "bytes": num_bytes,
        },
    )


def _has_news(request: _Request) -> bool:
    """Return whether a read has ended since the last round, or a rank that writes is lost."""
    for source in request.sources:  # as fast as it can be: a round asks this of all requests
        for transfer in source.running:
            if transfer.state >= TransferState.DONE:
                return True
    return any(not producer.peer.is_connected for producer in request.pushing)


def _reader(remote: KVTransferParams) -> messages.Reader:
    request_id, lease = str(remote.remote_request_id), remote.lease_token
    return messages.Reader(request_id, lease, remote.reader or 0, remote.num_readers)


def _lease(request: _Request) -> Lease:
    assert request.reader.lease is not None  # KVTransferParams requires it for a pull
    return request.reader.lease
