"""The producer's half of a worker: requests whose blocks are kept for consumers.

Each kept request has a lease, which ends when all its readers have said that they are done, or when
nobody has asked for it for the length of the lease. Its end moves the lease's word first; only then
may the engine reuse the blocks. What is being written out of the blocks is quiet before that.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pynixlkv.connector import messages, tp_mapping
from pynixlkv.connector.fences import has_completed
from pynixlkv.connector.log import RequestLog
from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.remote_engines import split
from pynixlkv.connector.tables import by_group
from pynixlkv.errors import HandshakeError, PlanError, PynixlkvError
from pynixlkv.plan import TransferPlan
from pynixlkv.types import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from pynixlkv.agent import Peer, Transfer
    from pynixlkv.connector.config import ConnectorConfig
    from pynixlkv.connector.fences import DeviceEvent
    from pynixlkv.connector.leases import LeaseTable
    from pynixlkv.connector.metadata import Lease, ParallelSizes, Rank, ReqMeta
    from pynixlkv.connector.peers import Peers
    from pynixlkv.connector.remote_engines import WorkerContext
    from pynixlkv.connector.stats import ConnectorStats
    from pynixlkv.geometry import Geometry

__all__ = ["Consumer", "Sender"]

_log = logging.getLogger(__name__)

_SOON_S = 0.001
_ATTACHED = messages.HeartbeatAck(0, [])
"""Lets a reader know that it can be answered."""
_MAX_REMEMBERED = 4096
"""How much of each kind a stranger can make us remember."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class _Recent(OrderedDict[_K, _V]):
    """The last entries that were put in."""

    def put(self, key: _K, value: _V) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > _MAX_REMEMBERED:
            self.popitem(last=False)


@dataclass(eq=False)
class Consumer:
    """A reader that has attached: how to answer it, and what to write where."""

    attach: messages.ConsumerHello
    peer: Peer
    geometry: Geometry
    parts: list[tp_mapping.TransferSlice]
    plans: dict[tuple[int, tuple[int, ...], tuple[str, ...]], TransferPlan] = field(
        default_factory=dict
    )
    """By index of the part, layers, and groups."""
    last_heard: float = 0.0


@dataclass(eq=False)
class _Push:
    """Writing one request into the blocks of one reader."""

    agent: str
    consumer: Consumer
    message: messages.Push
    deadline: float
    pushed: dict[tuple[int, int], int] = field(default_factory=dict)
    """By part and layer: tokens up to this position are written, or on the way."""
    transfers: list[Transfer] = field(default_factory=list)
    void: list[Transfer] = field(default_factory=list)
    """Writes of what was in the blocks before the request was preempted."""
    is_complete: bool = False
    """All that there is has been handed to the agent."""
    error: str = ""
    expired: bool = False


@dataclass(eq=False)
class _Held:
    """A request of this producer that consumers may want."""

    id: str
    meta: ReqMeta
    lease: Lease
    deadline: float
    event: DeviceEvent | None
    """What must be done before readers may see the blocks, and before they may be reused."""
    is_staged: bool = False
    granted: bool = False
    released_by: dict[str, set[Rank]] = field(default_factory=lambda: defaultdict(set))
    """Ranks that are done, by consumer engine."""
    ending: str = ""
    """Why the lease ends; the blocks are let go when all that uses them is quiet."""


@dataclass(eq=False)
class _Layer:
    """A layer of all that ran in a step, which the device may not have finished."""

    number: int
    requests: dict[str, ReqMeta]
    event: DeviceEvent | None


class Sender:
    """Keeps requests for consumers. Lives on the connector's thread.

    Parameters
    ----------
    ctx : WorkerContext
        This worker.
    table : LeaseTable
        The words that readers check.
    submit : callable
        Runs a function on another thread and returns its future.
    peers : Peers
        Connects to readers.
    config : ConnectorConfig
        Times and mode.
    stats : ConnectorStats
        Counts what happens.
    stage_out : callable, optional
        Begins to copy a request's device blocks to the host.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        table: LeaseTable,
        submit: Callable[[Callable[[], Consumer]], Future[Consumer]],
        peers: Peers,
        config: ConnectorConfig,
        stats: ConnectorStats,
        stage_out: Callable[[ReqMeta], DeviceEvent] | None = None,
    ) -> None:
        self._ctx = ctx
        self._groups = {group.name: group for group in ctx.cache.groups}
        self._table = table
        self._submit = submit
        self._peers = peers
        self._config = config
        self._stats = stats
        self._stage_out = stage_out
        self._saving: dict[str, ReqMeta] = {}
        self._layers: deque[_Layer] = deque()
        self._held_requests: dict[str, _Held] = {}
        self._siblings: dict[str, set[str]] = defaultdict(set)
        self._consumers: OrderedDict[str, Consumer] = OrderedDict()  # the last heard is the last
        self._attaching: dict[str, Future[Consumer]] = {}
        self._pushes: dict[tuple[str, int], _Push] = {}  # by agent and push_id
        self._pushes_of: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._early_releases: _Recent[str, list[tuple[messages.ConsumerRank, Lease | None]]] = (
            _Recent()
        )
        self._answers: _Recent[tuple[str, int], messages.PushDone] = _Recent()
        self._over: _Recent[str, str] = _Recent()  # why these are not, or no longer, to be had
        self._num_readers: _Recent[ParallelSizes, int] = _Recent()

    # ---- what the engine asks for

    def save(self, requests: dict[str, ReqMeta]) -> None:
        """Take the requests of this step, whose layers can be pushed as they finish."""
        self._saving = dict(requests)

    def restart(self, request_id: str) -> None:
        """Write a request anew, whose blocks have been taken away: it is computed again."""
        self._forget_layers(request_id)
        for push in self._of(request_id):
            for transfer in push.transfers:
                if not transfer.state.is_end:
                    transfer.cancel()
            push.void += push.transfers
            push.transfers = []
            push.pushed.clear()

    def layer_done(self, layer: int, event: DeviceEvent | None) -> None:
        """Push a layer of all that runs in this step, once `event` says that it is in the cache."""
        if self._saving:
            self._layers.append(_Layer(layer, self._saving, event))

    def _push_layers(self) -> float:
        """Push what the device has finished; the layers finish in their order."""
        while self._layers:
            layer = self._layers[0]
            try:
                if layer.event is not None and not layer.event.query():
                    return _SOON_S
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

    def keep(self, request_id: str, meta: ReqMeta, event: DeviceEvent | None, now: float) -> None:
        """Keep a request under its lease, which readers see once `event` says so."""
        if meta.lease is None or request_id in self._held_requests:
            raise PlanError(f"request {request_id!r} cannot be kept (again), or has no lease")
        self._forget_layers(request_id)  # what is missing of it is written in one piece
        self._held_requests[request_id] = _Held(
            request_id, meta, meta.lease, now + self._config.lease_duration, event
        )
        if meta.sibling_group is not None:
            self._siblings[meta.sibling_group].add(request_id)
        for reader, lease in self._early_releases.pop(request_id, ()):
            self._release(reader, request_id, lease)

    def refuse(self, request_id: str, why: str) -> None:
        """Tell those who wait for a request that it will never be sent."""
        self._forget_layers(request_id)
        self._early_releases.pop(request_id, None)
        self._over.put(request_id, why)
        for push in self._of(request_id):
            self._stop(push, why)

    @property
    def num_held(self) -> int:
        """Requests that are kept now."""
        return len(self._held_requests)

    # ---- what consumers say

    def on_consumer_hello(self, agent: str, message: messages.ConsumerHello) -> None:
        """Connect to a reader that says how it is reached."""
        known = self._consumers.get(agent)
        if known is not None and known.attach == message and known.peer.is_connected:
            self._answer(agent, _ATTACHED)
        elif agent not in self._attaching:
            self._attaching[agent] = self._submit(lambda: self._attach(agent, message))

    def _attach(self, agent: str, message: messages.ConsumerHello) -> Consumer:
        """Connect to a reader; runs on another thread, and blocks."""
        peer = self._peers.connect(message.hello)
        try:
            if peer.name != agent:
                raise HandshakeError(f"agent {agent!r} attached with the hello of {peer.name!r}")
            theirs, _ = split(peer)
            me, reader = self._ctx.identity, message.consumer
            parts = tp_mapping.transfer_slices(
                theirs, reader.rank, reader.parallel, self._ctx.cache, me.rank, me.parallel
            )
        except BaseException:
            self._peers.release(peer)
            raise
        return Consumer(message, peer, theirs, parts)

    def _forget(self, agent: str) -> None:
        """Let go of a consumer; if it lives, it attaches again."""
        self._peers.release(self._consumers.pop(agent).peer)

    def on_any(self, agent: str, now: float) -> None:
        """Note that something has come from an agent."""
        consumer = self._consumers.get(agent)
        if consumer is not None:
            consumer.last_heard = now
            self._consumers.move_to_end(agent)

    def on_heartbeat(self, agent: str, message: messages.Heartbeat, now: float) -> None:
        """Extend the leases of what a reader still wants, and answer it."""
        not_held = []
        for request_id, lease in message.requests:
            kept = self._held_requests.get(request_id)
            if kept is not None and kept.lease == lease and not kept.ending:
                kept.deadline = now + self._config.lease_duration
            else:
                state = self._table.status(lease)
                if state is LeaseStatus.HELD:  # on its way to the end
                    state = LeaseStatus.ENDED
                not_held.append((request_id, lease, state))
        self._answer(agent, messages.HeartbeatAck(message.number, not_held))

    def on_release(self, message: messages.Release) -> None:
        """Take a reader's word that it is done with requests."""
        reader = message.consumer
        is_valid = (
            0 <= reader.rank[0] < reader.parallel.pp and 0 <= reader.rank[1] < reader.parallel.tp
        )
        # Only who did not wait for the prefill's end does not know the lease.
        if not is_valid or (self._config.transfer_mode == "pull" and _lacks_lease(message)):
            self._stats.count("foreign_notifications")
            return
        self._readers_of(
            reader.parallel
        )  # raises if no engine of such a parallel can read from this one
        for request_id, lease in message.requests:
            self._release(reader, request_id, lease)

    def _release(self, reader: messages.ConsumerRank, request_id: str, lease: Lease | None) -> None:
        kept = self._held_requests.get(request_id)
        if kept is None or (lease is not None and kept.lease != lease):
            if request_id in self._over or (
                lease is not None and self._table.status(lease) is LeaseStatus.ENDED
            ):
                self._stats.count("late_notifications")
                return
            early = self._early_releases.get(request_id, [])
            if (reader, lease) in early:
                self._stats.count("duplicate_notifications")
            elif len(early) < _MAX_REMEMBERED:
                self._stats.count("early_notifications")
                self._early_releases.put(request_id, [*early, (reader, lease)])
            return
        ranks = kept.released_by[reader.engine_id]
        if reader.rank in ranks:
            self._stats.count("duplicate_notifications")
            return
        ranks.add(reader.rank)
        if len(ranks) >= self._readers_of(reader.parallel):
            members = self._siblings.get(kept.meta.sibling_group or "", {request_id})
            for member in members:
                self._end(self._held_requests[member], "released")

    def _readers_of(self, parallel: ParallelSizes) -> int:
        if parallel not in self._num_readers:
            me = self._ctx.identity
            count = tp_mapping.num_readers(self._groups.values(), me.rank, me.parallel, parallel)
            self._num_readers.put(parallel, count)
        return self._num_readers[parallel]

    def on_push(self, agent: str, message: messages.Push, now: float) -> None:
        """Take a reader's wish to have a request written into its blocks."""
        key = agent, message.push_id
        answer = self._answers.get(key)
        known = self._pushes.get(key)
        if answer is not None:
            self._stats.count("duplicate_notifications")
            self._answer(agent, answer)
            return
        if known is not None:
            known.deadline = now + self._config.lease_duration
            kept = self._held_requests.get(message.request_id)
            if kept is not None:
                kept.deadline = now + self._config.lease_duration
            self._stats.count("duplicate_notifications")
            return
        consumer = self._consumers.get(agent)
        if consumer is None or consumer.attach.consumer != message.consumer:
            # It attaches, and asks, again.
            self._stats.count("unanswered_notifications")
            return
        push = _Push(agent, consumer, message, now + self._config.lease_duration)
        self._pushes[key] = push
        self._pushes_of[message.request_id].add(key)
        lease, request_id = message.lease, message.request_id
        kept = self._held_requests.get(request_id)
        releases = self._early_releases.get(request_id, ())
        if len(self._pushes) > _MAX_REMEMBERED:
            push.error = f"there are {_MAX_REMEMBERED} pushes under way already"
        elif (
            kept is not None
            and (message.consumer.rank in kept.released_by[message.consumer.engine_id])
        ) or any(reader == message.consumer for reader, _ in releases):
            push.error = "the reader has released the request"
        elif kept is not None and (kept.ending or lease not in (None, kept.lease)):
            push.error, push.expired = "its lease is over", True
        elif kept is None and request_id in self._over:
            push.error, push.expired = self._over[request_id], lease is not None
        elif kept is None and lease and self._table.status(lease) is LeaseStatus.ENDED:
            push.error, push.expired = "its lease is over", True

    def on_cancel_push(self, agent: str, message: messages.CancelPush) -> None:
        """Take a reader's wish to hear that nothing of a push moves any more."""
        key = agent, message.push_id
        push = self._pushes.get(key)
        if push is not None:
            if not push.error:
                self._stop(push, "the reader gave the request up")
            return
        if key not in self._answers:  # its push was lost, or comes yet
            self._answers.put(key, messages.PushDone(message.push_id, False, "it was never asked"))
        self._answer(agent, self._answers[key])

    def _of(self, request_id: str) -> list[_Push]:
        return [self._pushes[key] for key in self._pushes_of.get(request_id, ())]

    # ---- the thread's round

    def poll(self, now: float, sent: set[str]) -> float:
        """Carry everything on; add requests whose blocks may be reused to `sent`.

        Returns
        -------
        float
            Seconds until it must be called again, whatever happens.
        """
        self._settle_attaching(now)
        due = self._push_layers()
        for push in list(self._pushes.values()):
            due = min(due, self._advance(push, now))
        for kept in list(self._held_requests.values()):
            if not kept.granted and not kept.ending:
                due = min(due, self._grant(kept))
            if now >= kept.deadline:
                self._end(kept, "expired")
            if not kept.ending:
                due = min(due, kept.deadline - now)
            elif kept.event is not None and not has_completed(kept.event):
                due = min(due, _SOON_S)
            elif not self._of(kept.id):
                self._let_go(kept)
                sent.add(kept.id)
        while self._consumers:
            agent, consumer = next(iter(self._consumers.items()))
            if now - consumer.last_heard <= self._config.peer_ttl or self._writes_to(agent):
                break
            self._forget(agent)
        return max(due, 0.0)

    def _writes_to(self, agent: str) -> bool:
        return any(push.agent == agent for push in self._pushes.values())

    def _settle_attaching(self, now: float) -> None:
        for agent, future in list(self._attaching.items()):
            if not future.done():
                continue
            del self._attaching[agent]
            error = future.exception()
            if error is None:
                if agent in self._consumers:
                    self._forget(agent)
                self._consumers[agent] = future.result()
                self.on_any(agent, now)
                self._answer(agent, _ATTACHED)
            else:
                _log.warning("consumer %s cannot be reached: %s", agent, str(error))
                self._stats.count("attach_failures")

    def _grant(self, kept: _Held) -> float:
        """Let readers see the lease, once the bytes are where they read them."""
        try:
            if kept.event is not None and not kept.event.query():
                return _SOON_S
            host = kept.meta.host_blocks
            if self._stage_out is not None and host is not None and not kept.is_staged:
                kept.is_staged = True
                kept.event = self._stage_out(kept.meta)
                if not kept.event.query():
                    return _SOON_S
            self._table.grant(kept.lease)
        except Exception as error:
            _log.warning("request %s cannot be sent: %s", kept.id, str(error))
            self._end(kept, str(error) or type(error).__name__)
            return 0.0
        kept.granted = True
        kept.event = None
        return 0.0  # its pushes can go on

    def _advance(self, push: _Push, now: float) -> float:
        message = push.message
        kept = self._held_requests.get(message.request_id)
        if not push.error:
            if self._consumers.get(push.agent) is not push.consumer:
                self._stop(push, "the reader is gone, or has a new life")
            elif kept is not None and kept.ending:
                self._stop(push, f"its lease is over: {kept.ending}")
                push.expired = kept.ending == "expired"
            elif kept is not None and kept.granted:
                if not push.is_complete:
                    self._try_write(push, kept.meta, None)
            elif now >= push.deadline:
                self._stop(push, f"no request {message.request_id!r} has come to be sent")
        push.void = [transfer for transfer in push.void if not transfer.is_quiet]
        for transfer in push.transfers:
            state = transfer.state
            if state.is_end and state is not TransferState.DONE and not push.error:
                self._stats.transfer_failed(transfer)
                self._stop(push, str(transfer.error))
        if not push.error and not push.is_complete:
            return max(push.deadline - now, 0.0)
        if not push.error and any(t.state is not TransferState.DONE for t in push.transfers):
            return self._config.transfer_timeout
        if push.void or any(not t.is_quiet for t in push.transfers):
            return self._config.transfer_timeout
        self._conclude(push)
        return 0.0

    def _try_write(self, push: _Push, meta: ReqMeta, layer: int | None) -> None:
        if push.void:
            return  # what is written now must not be overwritten by older writes
        try:
            self._write(push, meta, layer)
        except Exception as error:  # it ends this push and no other
            self._stop(push, str(error))

    def _write(self, push: _Push, meta: ReqMeta, layer: int | None) -> None:
        """Write what is there and not yet written: of one layer, or, at the end, of all."""
        consumer, message = push.consumer, push.message
        block_table_index = self._ctx.block_table_index
        theirs, their_starts = by_group(
            consumer.geometry.groups,
            block_table_index,
            message.blocks,
            message.starts,
            message.block_sizes,
        )
        ours, our_starts = by_group(
            self._groups.values(),
            block_table_index,
            meta.host_blocks or meta.blocks,
            meta.starts,
            meta.block_sizes,
        )
        if layer is None and meta.num_tokens < message.num_tokens:
            raise PlanError(f"{meta.num_tokens} tokens are here, {message.num_tokens} are wanted")
        num_tokens = min(meta.num_tokens, message.num_tokens)
        for index, part in enumerate(consumer.parts):
            if layer is not None and not all(self._groups[g].block_size for g in part.groups):
                continue  # state is whole only at the end
            by_position: dict[int, list[int]] = defaultdict(list)
            for wanted in part.layers if layer is None else {layer} & set(part.layers):
                by_position[push.pushed.get((index, wanted), 0)].append(wanted)
            for position, layers in by_position.items():
                moved = self._with_layers(part.groups, layers)
                end = num_tokens
                if end < message.num_tokens:
                    # The rest of a block comes later: what is not whole waits for it.
                    end -= end % math.lcm(*(self._groups[name].block_tokens for name in moved))
                moved = [name for name in moved if their_starts[name] < end]
                if position >= end or not moved:
                    continue
                tables, starts = {}, {}
                for name in moved:
                    if our_starts[name] > their_starts[name]:
                        raise PlanError(
                            f"group {name!r}: positions from {our_starts[name]} on are here, from "
                            f"{their_starts[name]} on are wanted"
                        )
                    size = self._groups[name].block_tokens
                    skip = max(position - our_starts[name], 0) // size
                    tables[name] = np.asarray(ours[name])[skip:]
                    starts[name] = our_starts[name] + skip * size
                push.transfers.append(
                    self._ctx.agent.write(
                        consumer.peer,
                        self._plan(consumer, index, part, moved, tuple(layers)),
                        tables,
                        {name: theirs[name] for name in moved},
                        timeout=self._config.transfer_timeout,
                        num_tokens=dict.fromkeys(moved, end),
                        local_start=starts,
                        remote_start={name: their_starts[name] for name in moved},
                    )
                )
                push.pushed.update({(index, wanted): end for wanted in layers})
        push.is_complete = layer is None

    def _plan(
        self,
        consumer: Consumer,
        index: int,
        part: tp_mapping.TransferSlice,
        groups: list[str],
        layers: tuple[int, ...],
    ) -> TransferPlan:
        key = index, layers, tuple(groups)
        plan = consumer.plans.get(key)
        if plan is None:
            plan = consumer.plans[key] = TransferPlan(
                self._ctx.cache,
                consumer.geometry,
                groups=groups,
                heads=part.heads,
                layers=layers,
                max_bytes=self._ctx.max_bytes,
            )
        return plan

    def _with_layers(self, names: Iterable[str], layers: Iterable[int]) -> list[str]:
        return [name for name in names if set(self._groups[name].layers) & set(layers)]

    def _stop(self, push: _Push, error: str) -> None:
        push.error = error
        for transfer in push.transfers:
            if not transfer.state.is_end:
                transfer.cancel()

    def _conclude(self, push: _Push) -> None:
        """Tell the reader how a push went, of which nothing moves any more."""
        message, key = push.message, (push.agent, push.message.push_id)
        del self._pushes[key]
        self._pushes_of[message.request_id].discard(key)
        if not self._pushes_of[message.request_id]:
            del self._pushes_of[message.request_id]
        end = messages.PushDone(message.push_id, push.expired, push.error)
        self._answers.put(key, end)
        self._answer(push.agent, end)
        if not push.error:
            for transfer in push.transfers:
                self._stats.transfer_done(transfer.result)
            self._release(message.consumer, message.request_id, message.lease)

    # ---- ends

    def _end(self, kept: _Held, why: str) -> None:
        if not kept.ending:
            kept.ending = why

    def _let_go(self, kept: _Held) -> None:
        """End a lease whose blocks nothing of ours reads any more."""
        self._table.revoke(kept.lease)
        del self._held_requests[kept.id]
        self._over.put(kept.id, f"its lease is over: {kept.ending}")
        group = kept.meta.sibling_group
        if group is not None:
            self._siblings[group].discard(kept.id)
            if not self._siblings[group]:
                del self._siblings[group]
        self._stats.lease_ended(kept.ending)
        if kept.ending != "released":
            RequestLog(_log, request=kept.id).warning(
                "the lease of request %s ended: %s", kept.id, kept.ending
            )

    def _answer(self, agent: str, message: messages.HeartbeatAck | messages.PushDone) -> None:
        consumer = self._consumers.get(agent)
        if consumer is None:
            self._stats.count("unanswered_notifications")
            return
        try:
            self._ctx.agent.notify(consumer.peer, messages.encode(message))
        except PynixlkvError as error:
            _log.info("consumer %s could not be told: %s", agent, str(error))
            self._forget(agent)


def _lacks_lease(message: messages.Release) -> bool:
    return any(lease is None for _, lease in message.requests)
