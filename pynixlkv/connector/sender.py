"""The producer's half of a worker: requests whose blocks are held for consumers.

Each held request has a lease, which any number of readers can share. A reader attaches with its
first message. The lease ends when as many readers as are expected have come and each has released
it, or expires if none of those left is heard for `lease_duration`. The lease word is bumped before
the blocks are freed, and writes and digests of the blocks have ended before that.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pynixlkv.connector import messages, tp_mapping, verification
from pynixlkv.connector.leases import HeldRequest, LeaseReader
from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.metadata import MAX_READERS
from pynixlkv.connector.remote_engines import split
from pynixlkv.connector.spans import HandOffSpan
from pynixlkv.connector.staging import has_completed
from pynixlkv.errors import HandshakeError, PlanError, PynixlkvError
from pynixlkv.geometry import meetings
from pynixlkv.plan import TransferPlan
from pynixlkv.types import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from pynixlkv.agent import Peer, Transfer
    from pynixlkv.connector.context import WorkerContext
    from pynixlkv.connector.leases import LeaseTable
    from pynixlkv.connector.metadata import Lease, ParallelSizes, ReqMeta
    from pynixlkv.connector.staging import DeviceEvent
    from pynixlkv.geometry import Geometry, Group

_log = logging.getLogger(__name__)

_POLL_S = 0.001
_HELLO_ACK = messages.HeartbeatAck([])
"""Acknowledges a `ConsumerHello`."""
_MAX_ERROR = 1000
"""Longest text of an error that a consumer is told."""
_MAX_REMEMBERED = 4096
"""Most entries of each kind that messages of peers can make a producer remember."""
_MAX_READERS_IN_ALL = 65536
"""Most readers of all leases together."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class _Recent(OrderedDict[_K, _V]):
    """Keeps the last `_MAX_REMEMBERED` entries."""

    def put(self, key: _K, value: _V) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > _MAX_REMEMBERED:
            self.popitem(last=False)


@dataclass(eq=False)
class Consumer:
    """A consumer's rank that has introduced itself."""

    hello: messages.ConsumerHello
    peer: Peer
    geometry: Geometry
    slices: list[tp_mapping.TransferSlice]
    meetings: list[list[tuple[Group, Group, frozenset[int]]]]
    """Of each slice: a group of the consumer, one of ours, and the layers that both hold."""
    plans: dict[tuple[int, tuple[int, ...], tuple[str, ...]], TransferPlan] = field(
        default_factory=dict
    )
    """By index of the slice, layers, and groups."""
    last_heard: float = 0.0


@dataclass(eq=False)
class _Push:
    """Writes one request into the blocks of one consumer rank."""

    agent: str
    consumer: Consumer
    message: messages.Push
    deadline: float
    pushed: dict[tuple[int, int], int] = field(default_factory=dict)
    """By slice and layer: tokens up to this position are written or being written."""
    transfers: list[Transfer] = field(default_factory=list)
    void: list[Transfer] = field(default_factory=list)
    """Writes of what was in the blocks before the request was preempted."""
    is_complete: bool = False
    """All writes have been handed to the agent."""
    error: str = ""
    expired: bool = False


@dataclass(eq=False)
class _Layer:
    """A layer of a step's requests, which the device may not have finished."""

    number: int
    requests: dict[str, ReqMeta]
    event: DeviceEvent | None


class Sender:
    """Holds requests for consumers. Lives on the connector's thread."""

    def __init__(
        self,
        ctx: WorkerContext,
        table: LeaseTable,
        submit: Callable[[Callable[[], Consumer]], Future[Consumer]],
    ) -> None:
        self._ctx = ctx
        self._groups = {group.name: group for group in ctx.cache.groups}
        self._table = table
        self._submit = submit
        self._saving: dict[str, ReqMeta] = {}
        self._layers: deque[_Layer] = deque()
        self._held: dict[str, HeldRequest] = {}
        self._consumers: OrderedDict[str, Consumer] = OrderedDict()  # by time of the last message
        self._connecting: dict[str, Future[Consumer]] = {}
        self._pushes: dict[tuple[str, int], _Push] = {}  # by agent and push id
        self._pushes_of: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._digesting: dict[tuple[str, int], tuple[HeldRequest, Future[list[bytes]]]] = {}
        self._early_releases: _Recent[str, list[tuple[messages.ConsumerRank, messages.Reader]]] = (
            _Recent()
        )
        self._answers: _Recent[tuple[str, int], messages.PushDone] = _Recent()
        # Why requests are not held, or no longer. An id may have a new life, so that only a push
        # without a lease is refused for it, and not at once.
        self._over: _Recent[str, str] = _Recent()
        self._past_readers: _Recent[int, None] = _Recent()  # of requests that are over
        self._ranks_of_readers: _Recent[ParallelSizes, int] = _Recent()
        self._num_readers = 0

    # ---- the engine's commands

    def begin(self, request_id: str) -> None:
        """Note that a request is going to be computed; its id may have been used before."""
        self._over.pop(request_id, None)

    def save(self, requests: dict[str, ReqMeta]) -> None:
        """Take the requests of this step, whose layers can be pushed as they finish."""
        self._saving = dict(requests)
        for request_id in requests if self._over else ():
            self.begin(request_id)

    def restart(self, request_id: str) -> None:
        """Void what was pushed of a preempted request: it is computed again."""
        self._forget_layers(request_id)
        for push in self._of(request_id):
            for transfer in push.transfers:
                if not transfer.state.is_end:
                    transfer.cancel()
            push.void += push.transfers
            push.transfers = []
            push.pushed.clear()

    def layer_done(self, layer: int, event: DeviceEvent | None) -> None:
        """Push a layer of this step's requests once `event` completes."""
        if self._saving:
            self._layers.append(_Layer(layer, self._saving, event))

    def _push_layers(self) -> float:
        """Push the layers that the device has finished; it finishes them in order."""
        while self._layers:
            layer = self._layers[0]
            try:
                if layer.event is not None and not layer.event.query():
                    return _POLL_S
                error = ""
            except Exception as failure:
                error = str(failure) or type(failure).__name__
            self._layers.popleft()
            for request_id, meta in layer.requests.items():
                for push in self._of(request_id):
                    if error:
                        self._stop(push, error)
                    elif not push.error:
                        self._try_write(push, meta, layer.number)
        return math.inf

    def _forget_layers(self, request_id: str) -> None:
        self._saving.pop(request_id, None)
        for layer in self._layers:
            layer.requests.pop(request_id, None)

    def hold(self, request_id: str, meta: ReqMeta, event: DeviceEvent | None, now: float) -> None:
        """Hold a request under its lease, which readers see after `event`.

        A request that is held already gets more readers.
        """
        deadline = now + (meta.keep_seconds or self._ctx.config.lease_duration)
        held = self._find(request_id, meta.lease)
        if held is not None:
            held.num_readers = max(held.num_readers, meta.num_readers)
            held.deadline = deadline
            return
        if meta.lease is None or request_id in self._held:
            raise PlanError(f"request {request_id!r} cannot be kept (again), or has no lease")
        if self._table.status(meta.lease) is LeaseStatus.ENDED:
            return  # before it got more readers
        self.begin(request_id)
        self._forget_layers(request_id)  # the rest of it is written in one piece
        held = HeldRequest(request_id, meta, meta.lease, meta.num_readers, deadline, now, event)
        self._held[request_id] = held
        for push in self._of(request_id, held.lease):
            if not push.error and self._is_for(push, meta):
                self._attach(held, push.message.reader, now)
        for consumer, reader in self._early_releases.pop(request_id, ()):
            self._release(consumer, reader, now)

    def _find(self, request_id: str, lease: Lease | None) -> HeldRequest | None:
        """Return a held request; by its id alone only if the lease is not known."""
        held = self._held.get(request_id)
        return held if held is not None and lease in (None, held.lease) else None

    def end(self, request_id: str, why: str) -> None:
        """End the lease of a request for all of its readers."""
        if request_id in self._held:
            self._end(self._held[request_id], why)

    def await_readers(self, now: float) -> None:
        """Extend leases without a reader, each once: a consumer is on its way."""
        for held in self._held.values():
            if not (held.readers or held.ending or held.is_extended):
                held.is_extended = True
                held.deadline = max(held.deadline, now + self._ctx.config.lease_duration)

    def not_held(self, request_id: str, why: str) -> None:
        """Fail the pushes of a request that will never be held."""
        self._forget_layers(request_id)
        self._early_releases.pop(request_id, None)
        self._over.put(request_id, why)
        for push in self._of(request_id):
            self._past_readers.put(push.message.reader_number, None)
            self._stop(push, why)

    def gauges(self) -> dict[str, int]:
        """Return its part of the gauges, as `Receiver.gauges` does."""
        return {
            "live_leases": len(self._held),
            "pushes": len(self._pushes),
            "consumers": len(self._consumers),
        }

    # ---- messages of consumers

    def on_consumer_hello(self, agent: str, message: messages.ConsumerHello) -> None:
        """Connect to a consumer's rank."""
        known = self._consumers.get(agent)
        if known is not None and known.hello == message and known.peer.is_connected:
            self._answer(agent, _HELLO_ACK)
        elif agent not in self._connecting:
            self._connecting[agent] = self._submit(lambda: self._connect(agent, message))

    def _connect(self, agent: str, message: messages.ConsumerHello) -> Consumer:
        """Connect to a consumer's rank; blocks, on another thread."""
        peer = self._ctx.peers.connect(message.hello)
        try:
            if peer.name != agent:
                raise HandshakeError(f"agent {agent!r} attached with the hello of {peer.name!r}")
            theirs = split(peer)[0]
            me, them = self._ctx.identity, message.consumer
            slices = tp_mapping.transfer_slices(
                theirs, them.rank, them.parallel, self._ctx.cache, me.rank, me.parallel
            )
        except BaseException:
            self._ctx.peers.release(peer)
            raise
        met = [
            [
                (group, ours, frozenset(layers))
                for group, ours, layers in meetings(
                    theirs.select(part.groups), self._ctx.cache.groups
                )
            ]
            for part in slices
        ]
        return Consumer(message, peer, theirs, slices, met)

    def _forget(self, agent: str) -> None:
        """Disconnect from a consumer's rank; if it lives, it introduces itself again."""
        self._ctx.peers.release(self._consumers.pop(agent).peer)

    def on_any(self, agent: str, now: float) -> None:
        """Note that an agent is alive."""
        consumer = self._consumers.get(agent)
        if consumer is not None:
            consumer.last_heard = now
            self._consumers.move_to_end(agent)

    def on_heartbeat(self, agent: str, message: messages.Heartbeat, now: float) -> None:
        """Extend the leases of the requests that a consumer still wants, and answer it."""
        not_held = []
        for reader in message.requests:
            held = self._find(reader.request_id, reader.lease)
            if held is not None and not held.ending:
                self._attach(held, reader, now)
            elif reader.lease is not None:
                state = self._table.status(reader.lease)
                if state is LeaseStatus.HELD:  # it is about to end
                    state = LeaseStatus.ENDED
                not_held.append((reader.request_id, reader.lease, state))
        if message.wants_ack:
            self._answer(agent, messages.HeartbeatAck(not_held))

    def _attach(self, held: HeldRequest, reader: messages.Reader, now: float) -> LeaseReader | None:
        """Extend a lease for a reader, new or known; return None if there are too many."""
        known = held.readers.get(reader.number)
        if known is None:
            if len(held.readers) >= MAX_READERS or self._num_readers >= _MAX_READERS_IN_ALL:
                self._ctx.stats.count("refused_readers")
                return None
            known = held.readers[reader.number] = LeaseReader(now)
            self._num_readers += 1
            if reader.num_readers > 1:
                held.num_readers = max(held.num_readers, reader.num_readers)
            elif reader.num_readers == 0 and held.num_readers == 1:
                held.num_readers = 0
        if not known.is_done:
            known.deadline = now + self._ctx.config.lease_duration
            held.deadline = max(held.deadline, known.deadline)
        return known

    def on_release(self, message: messages.Release, now: float) -> None:
        """Note that a consumer's rank is done with requests."""
        consumer = message.consumer
        (stage, rank), parallel = consumer.rank, consumer.parallel
        is_valid = 0 <= stage < parallel.pp and 0 <= rank < parallel.tp
        # Only a consumer that did not wait for the prefill does not know the lease.
        lacks_lease = any(reader.lease is None for reader in message.requests)
        if not is_valid or (lacks_lease and self._ctx.config.transfer_mode == "pull"):
            self._ctx.stats.count("foreign_notifications")
            return
        self._ranks_of(parallel)  # raises if no engine of these sizes can read from this one
        for reader in message.requests:
            self._release(consumer, reader, now)

    def _release(
        self, consumer: messages.ConsumerRank, reader: messages.Reader, now: float
    ) -> None:
        held = self._find(reader.request_id, reader.lease)
        if reader.lease is not None:
            is_late = held is None and self._table.status(reader.lease) is LeaseStatus.ENDED
        else:
            is_late = reader.number in self._past_readers
        if is_late:
            self._ctx.stats.count("late_notifications")
            return
        if held is None:
            self._keep_early(consumer, reader)
            return
        known = self._attach(held, reader, now)
        if known is None:
            return
        if known.is_done or consumer.rank in known.released_by:
            self._ctx.stats.count("duplicate_notifications")
            return
        known.released_by.add(consumer.rank)
        if len(known.released_by) < self._ranks_of(consumer.parallel):
            return
        known.is_done = True
        held.num_done += 1
        held.released_at = now
        if held.is_done and held.num_readers == 0:
            # The samples of a prompt may reach their engine in different steps.
            config = self._ctx.config
            held.deadline = now + config.heartbeat_period(config.lease_duration)
        elif held.is_done:
            self._end(held, "released")
        elif held.have_all_come:
            held.deadline = max(r.deadline for r in held.readers.values() if not r.is_done)

    def _keep_early(self, consumer: messages.ConsumerRank, reader: messages.Reader) -> None:
        """Remember a release that comes before its request."""
        request_id = reader.request_id
        if reader.lease is None and request_id in self._over:
            # It may mean an earlier life of the id: the next one gets time for a reader.
            reader = messages.Reader(request_id, None, reader.number, 0)
        early = self._early_releases.get(request_id, [])
        if (consumer, reader) in early:
            self._ctx.stats.count("duplicate_notifications")
        elif len(early) < MAX_READERS and self._num_early() < _MAX_READERS_IN_ALL:
            self._ctx.stats.count("early_notifications")
            self._early_releases.put(request_id, [*early, (consumer, reader)])

    def _num_early(self) -> int:
        return sum(map(len, self._early_releases.values()))

    def _ranks_of(self, parallel: ParallelSizes) -> int:
        """Return how many ranks of a reader of these sizes release a lease of this rank."""
        if parallel not in self._ranks_of_readers:
            me = self._ctx.identity
            count = tp_mapping.num_readers(self._groups.values(), me.rank, me.parallel, parallel)
            self._ranks_of_readers.put(parallel, count)
        return self._ranks_of_readers[parallel]

    def on_push(self, agent: str, message: messages.Push, now: float) -> None:
        """Start to write a request into a consumer's blocks, or note why that is impossible."""
        key = agent, message.push_id
        request_id, lease = message.request_id, message.lease
        held = self._find(request_id, lease)
        answer = self._answers.get(key)
        if answer is not None:
            self._ctx.stats.count("duplicate_notifications")
            self._answer(agent, answer)
            return
        if key in self._pushes:
            if held is not None:
                self._attach(held, message.reader, now)
            if lease is not None or request_id not in self._over:
                self._pushes[key].deadline = now + self._ctx.config.lease_duration
            self._ctx.stats.count("duplicate_notifications")
            return
        consumer = self._consumers.get(agent)
        if consumer is None or consumer.hello.consumer != message.consumer:
            # It will introduce itself, and ask, again.
            self._ctx.stats.count("unanswered_notifications")
            return
        config = self._ctx.config
        wait = config.lease_duration
        if lease is None and request_id in self._over:
            wait = config.heartbeat_period(wait)
        push = _Push(agent, consumer, message, now + wait)
        self._pushes[key] = push
        self._pushes_of[request_id].add(key)
        if held is not None and not self._is_for(push, held.meta):
            return
        reader = None if held is None else self._attach(held, message.reader, now)
        has_released = any(
            early == message.consumer and released.number == message.reader_number
            for early, released in self._early_releases.get(request_id, ())
        )
        if reader is not None and message.consumer.rank in reader.released_by:
            has_released = True
        if len(self._pushes) > _MAX_REMEMBERED:
            push.error = f"there are {_MAX_REMEMBERED} pushes under way already"
        elif held is not None and reader is None:
            push.error = f"the lease has {len(held.readers)} readers already"
        elif has_released:
            push.error = "the reader has released the request"
        elif (held is not None and held.ending) or (
            lease is not None and self._table.status(lease) is LeaseStatus.ENDED
        ):
            push.error, push.expired = "its lease is over", True

    def on_cancel_push(self, agent: str, message: messages.CancelPush) -> None:
        """Stop a push; the consumer waits until it is quiet."""
        key = agent, message.push_id
        push = self._pushes.get(key)
        if push is not None:
            if not push.error:
                self._stop(push, "the reader gave the request up")
            return
        if key not in self._answers:  # the push was lost, or has not arrived yet
            self._answers.put(key, messages.PushDone(message.push_id, False, "it was never asked"))
        self._answer(agent, self._answers[key])

    def on_digest_request(self, agent: str, message: messages.DigestRequest, now: float) -> None:
        """Start to compute digests of a request, if it is held for this reader."""
        key, reader = (agent, message.digest_id), message.reader
        if key in self._digesting:
            self._attach(self._digesting[key][0], reader, now)  # it still waits
            self._ctx.stats.count("duplicate_notifications")
            return
        if agent not in self._consumers or len(self._digesting) >= _MAX_REMEMBERED:
            self._ctx.stats.count("unanswered_notifications")  # it will ask again
            return
        held = self._find(reader.request_id, reader.lease)
        if (
            held is None
            or not held.is_granted
            or held.ending
            # Without a lease, the id may have a new life, which this reader has not come for.
            or (reader.lease is None and reader.number not in held.readers)
            or self._attach(held, reader, now) is None
        ):
            self._answer(agent, messages.Digests(message.digest_id, expired=True))
            return
        held.digesting += 1
        self._digesting[key] = (
            held,
            self._ctx.compute(
                partial(verification.answer, self._ctx, held.meta, message.scopes),
                verification.num_bytes(self._ctx, message.scopes),
            ),
        )

    def _answer_digests(self) -> None:
        """Answer requests for digests that have been computed, or whose lease has ended."""
        for key, (held, future) in list(self._digesting.items()):
            if held.ending:
                future.cancel()
            if not future.done():
                continue
            del self._digesting[key]
            held.digesting -= 1
            agent, digest_id = key
            if future.cancelled():
                done = messages.Digests(digest_id, expired=True)
            elif (error := future.exception()) is not None:
                done = messages.Digests(digest_id, error=str(error)[:_MAX_ERROR])
            else:
                done = messages.Digests(digest_id, future.result())
            self._answer(agent, done)

    def _of(self, request_id: str, lease: Lease | None = None) -> list[_Push]:
        """Return the pushes of a request; those that name a lease only if it is this one."""
        pushes = (self._pushes[key] for key in self._pushes_of.get(request_id, ()))
        return [push for push in pushes if push.message.lease in (None, lease)]

    # ---- the thread's round

    def poll(self, now: float, sent: set[str]) -> float:
        """Advance everything; add freed requests to `sent`; return as `Receiver.poll` does."""
        self._settle_connecting(now)
        self._answer_digests()
        due = self._push_layers()
        for push in list(self._pushes.values()):
            due = min(due, self._advance(push, now))
        for held in list(self._held.values()):
            if not held.is_granted and not held.ending:
                due = min(due, self._grant(held))
            if now >= held.deadline:
                self._end(held, "released" if held.is_done else "expired")
            if not held.ending:
                due = min(due, held.deadline - now)
            elif held.event is not None and not has_completed(held.event):
                due = min(due, _POLL_S)
            elif not self._of(held.id, held.lease) and not held.digesting:
                self._free(held, now)
                sent.add(held.id)
        while self._consumers:
            agent, consumer = next(iter(self._consumers.items()))
            # Later than the consumer forgets this rank: it would wait for answers in vain.
            config = self._ctx.config
            is_idle = now - consumer.last_heard > config.peer_ttl + config.lease_duration
            if not is_idle or any(push.agent == agent for push in self._pushes.values()):
                break
            self._forget(agent)
        return max(due, 0.0)

    def _settle_connecting(self, now: float) -> None:
        for agent, future in list(self._connecting.items()):
            if not future.done():
                continue
            del self._connecting[agent]
            error = future.exception()
            if error is None:
                if agent in self._consumers:
                    self._forget(agent)
                self._consumers[agent] = future.result()
                self.on_any(agent, now)
                self._answer(agent, _HELLO_ACK)
            else:
                _log.warning("consumer %s cannot be reached: %s", agent, str(error))
                self._ctx.stats.count("attach_failures")

    def _grant(self, held: HeldRequest) -> float:
        """Let readers see the lease once the bytes are where they read them."""
        try:
            if held.event is not None and not held.event.query():
                return _POLL_S
            if not held.is_staged:
                held.is_staged = True
                held.event = self._ctx.stage("d2h", held.meta)
                if held.event is not None and not held.event.query():
                    return _POLL_S
            self._table.grant(held.lease)
        except Exception as error:
            _log.warning("request %s cannot be sent: %s", held.id, str(error))
            self._end(held, str(error) or type(error).__name__)
            return 0.0
        held.is_granted = True
        held.event = None
        return 0.0  # its pushes can go on

    def _advance(self, push: _Push, now: float) -> float:
        message = push.message
        held = self._find(message.request_id, message.lease)
        if not push.error:
            if self._consumers.get(push.agent) is not push.consumer:
                self._stop(push, "the reader is gone, or has a new life")
            elif held is not None and held.ending:
                self._stop(push, f"its lease is over: {held.ending}")
                push.expired = held.ending == "expired"
            elif held is not None and held.is_granted:
                if not push.is_complete:
                    self._try_write(push, held.meta, None)
            elif now >= push.deadline:
                why = f"no request {message.request_id!r} has come to be sent"
                self._stop(push, self._over.get(message.request_id, why))
                self._past_readers.put(message.reader_number, None)
        push.void = [transfer for transfer in push.void if not transfer.is_quiet]
        for transfer in push.transfers:
            state = transfer.state
            if state.is_end and state is not TransferState.DONE and not push.error:
                self._ctx.stats.transfer_failed(transfer)
                self._stop(push, str(transfer.error))
        if not push.error and not push.is_complete:
            return max(push.deadline - now, 0.0)
        if not push.error and any(t.state is not TransferState.DONE for t in push.transfers):
            return self._ctx.config.transfer_timeout
        if push.void or any(not t.is_quiet for t in push.transfers):
            return self._ctx.config.transfer_timeout
        self._conclude(push, now)
        return 0.0

    def _is_for(self, push: _Push, meta: ReqMeta) -> bool:
        """Whether a push is of this prompt; otherwise stop it, and count it as no reader."""
        wanted = push.message.content
        if wanted is None or wanted == meta.content:
            return True
        self._past_readers.put(push.message.reader_number, None)
        self._stop(
            push,
            f"request {push.message.request_id!r} is of another prompt: its content is "
            f"{meta.content or 'not named'}; expected {wanted}",
        )
        return False

    def _try_write(self, push: _Push, meta: ReqMeta, layer: int | None) -> None:
        if push.void or not self._is_for(push, meta):
            return  # older writes must not overwrite newer ones
        try:
            self._write(push, meta, layer)
        except Exception as error:  # ends this push and no other
            self._stop(push, str(error))

    def _write(self, push: _Push, meta: ReqMeta, layer: int | None) -> None:
        """Write all that is computed and not yet written: of one layer, or, at the end, of all."""
        consumer, message = push.consumer, push.message
        theirs, their_starts = self._ctx.tables_by_group(
            consumer.geometry, message.blocks, message.starts, message.block_sizes
        )
        ours, our_starts = self._ctx.local_tables(meta)
        if layer is None and meta.num_tokens < message.num_tokens:
            raise PlanError(f"{meta.num_tokens} tokens are here, {message.num_tokens} are wanted")
        if layer is None:
            self._ctx.check_state(message.num_tokens, meta.num_tokens)
        num_tokens = min(meta.num_tokens, message.num_tokens)
        for index, part in enumerate(consumer.slices):
            if layer is not None and any(not g.block_size for _, g, _ in consumer.meetings[index]):
                continue  # state is complete only at the end
            by_position: dict[int, list[int]] = defaultdict(list)
            for wanted in part.layers if layer is None else {layer} & set(part.layers):
                by_position[push.pushed.get((index, wanted), 0)].append(wanted)
            for position, layers in by_position.items():
                met = [
                    (group.name, wanting.name)
                    for wanting, group, common in consumer.meetings[index]
                    if not common.isdisjoint(layers)
                ]
                moved = dict.fromkeys(name for name, _ in met)
                end = num_tokens
                is_opaque = any("N" in self._groups[name].opaque_axes for name in moved)
                if end < message.num_tokens or (layer is not None and is_opaque):
                    # More tokens follow, in a page that moves whole also those of the answer: a
                    # block that is not full waits for them.
                    end -= end % math.lcm(*(self._groups[name].block_tokens for name in moved))
                met = [(name, other) for name, other in met if their_starts[other] < end]
                if position >= end or not met:
                    continue
                tables, starts = {}, {}
                for name, other in met:
                    if our_starts[name] > their_starts[other]:
                        raise PlanError(
                            f"group {name!r}: positions from {our_starts[name]} on are here, from "
                            f"{their_starts[other]} on are wanted"
                        )
                    size = self._groups[name].block_tokens
                    skip = max(position - our_starts[name], 0) // size
                    tables[name] = np.asarray(ours[name])[skip:]
                    starts[name] = our_starts[name] + skip * size
                plan = self._plan(consumer, index, list(tables), tuple(layers))
                push.transfers.append(
                    self._ctx.agent.write(
                        consumer.peer,
                        plan,
                        tables,
                        {name: theirs[name] for _, name in plan.pairs},
                        timeout=self._ctx.config.transfer_timeout,
                        num_tokens=dict.fromkeys(tables, end),
                        local_start=starts,
                        remote_start={name: their_starts[name] for _, name in plan.pairs},
                    )
                )
                push.pushed.update({(index, wanted): end for wanted in layers})
        push.is_complete = layer is None

    def _plan(
        self, consumer: Consumer, index: int, groups: list[str], layers: tuple[int, ...]
    ) -> TransferPlan:
        key = index, layers, tuple(groups)
        plan = consumer.plans.get(key)
        if plan is None:
            plan = consumer.plans[key] = TransferPlan(
                self._ctx.cache,
                consumer.geometry,
                groups=groups,
                heads=consumer.slices[index].heads,
                layers=layers,
                max_bytes=self._ctx.config.max_bytes,
            )
        return plan

    def _stop(self, push: _Push, error: str) -> None:
        push.error = error
        for transfer in push.transfers:
            if not transfer.state.is_end:
                transfer.cancel()

    def _conclude(self, push: _Push, now: float) -> None:
        """Answer a push that is quiet."""
        message, key = push.message, (push.agent, push.message.push_id)
        del self._pushes[key]
        self._pushes_of[message.request_id].discard(key)
        if not self._pushes_of[message.request_id]:
            del self._pushes_of[message.request_id]
        done = messages.PushDone(message.push_id, push.expired, push.error)
        self._answers.put(key, done)
        self._answer(push.agent, done)
        if not push.error:
            for transfer in push.transfers:
                self._ctx.stats.transfer_done(transfer.result)
            if not message.is_verified:
                self._release(message.consumer, message.reader, now)

    # ---- ends

    def _end(self, held: HeldRequest, why: str) -> None:
        if not held.ending:
            held.ending = why

    def _free(self, held: HeldRequest, now: float) -> None:
        """End a lease whose blocks no operation of this worker uses."""
        self._table.revoke(held.lease)
        del self._held[held.id]
        self._num_readers -= len(held.readers)
        self._over.put(held.id, f"its lease is over: {held.ending}")
        if self._ctx.config.transfer_mode == "push":
            for number in held.readers:
                self._past_readers.put(number, None)
        # Of a turn, nothing has been lost: it may have no next one.
        is_unread = held.meta.keep_seconds is not None and held.ending != "released"
        self._ctx.stats.lease_ended("unread" if is_unread else held.ending)
        if self._ctx.tracer is not None:
            at = held.released_at
            self._ctx.tracer(
                HandOffSpan(
                    "producer",
                    held.id,
                    held.meta.traceparent,
                    held.ending,
                    now - held.since,
                    () if at is None else (("released", now - at, 0.0),),
                    attributes={"readers": len(held.readers), "tokens": held.meta.num_tokens},
                )
            )
        if held.ending != "released":
            _log.log(
                logging.INFO if is_unread else logging.WARNING,
                "the lease of request %s ended: %s", held.id, held.ending,
                extra={"request": held.id, "peer": ""},
            )  # fmt: skip

    def _answer(self, agent: str, message: messages.Message) -> None:
        consumer = self._consumers.get(agent)
        if consumer is None:
            self._ctx.stats.count("unanswered_notifications")
            return
        try:
            self._ctx.agent.notify(consumer.peer, messages.encode(message))
        except PynixlkvError as error:
            _log.info("consumer %s could not be told: %s", agent, str(error))
            self._forget(agent)
