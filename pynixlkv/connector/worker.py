"""The worker half of a connector: one for each rank, next to its KV cache.

The engine's thread only hands over commands and collects results. A thread of the connector does
the work, so that a step of the engine never waits for a peer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import random
from typing import TYPE_CHECKING, TypeVar

from pynixlkv._clock import ObservedClock
from pynixlkv.connector import messages, verification
from pynixlkv.connector.context import Peers, WorkerContext
from pynixlkv.connector.leases import LeaseTable, make_words
from pynixlkv.connector.metadata import (
    AgentMetadata,
    ConnectorConfig,
    ConnectorMetadata,
    EndState,
    ParallelSizes,
)
from pynixlkv.connector.receiver import Receiver, RequestEnd
from pynixlkv.connector.remote_engines import RemoteEngines
from pynixlkv.connector.sender import Sender
from pynixlkv.connector.stats import ConnectorStats
from pynixlkv.errors import ClosedError, ConfigError, PynixlkvError, StateError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from pynixlkv.agent import Agent
    from pynixlkv.connector.metadata import ReqMeta
    from pynixlkv.connector.remote_engines import Fetch
    from pynixlkv.connector.spans import Tracer
    from pynixlkv.connector.staging import DeviceEvent, HostStaging
    from pynixlkv.geometry import KVCache
    from pynixlkv.types import Rank

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LEASE_BUFFER_WORDS = 1024
"""Lease words that can be read at once; further checks wait for a round."""

_LONGEST_PAUSE_S = 1.0
_NUM_HANDSHAKES = 64
"""Handshakes that run at once."""
_SHORT_BYTES = 256 << 10
"""Digests of so many bytes of host memory are computed on the connector's thread."""
_NUM_DIGESTS = 2
"""Requests whose digests are computed at once."""


@dataclass
class Finished:
    """Requests that have ended since the last call; each appears once in a worker's life."""

    sent: set[str] = field(default_factory=set)
    """Their blocks may be reused: all readers are done, or the lease is over."""
    received: set[str] = field(default_factory=set)
    """Their blocks have all arrived."""
    failed: dict[str, RequestEnd] = field(default_factory=dict)
    """They were not received: why, and which blocks are invalid. No transfer writes into these
    blocks any more."""

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed)


def _side_channel(config: ConnectorConfig, secret: bytes | str | None) -> Fetch:
    def fetch(
        address: tuple[str, int], *, engine_id: str, ranks: list[Rank], timeout: float
    ) -> Mapping[Rank, bytes]:
        from pynixlkv import handshake

        return handshake.fetch(
            address,
            engine_id=engine_id,
            compatibility=config.compatibility,
            ranks=ranks,
            timeout=timeout,
            secret=secret,
            allow_insecure=config.allow_insecure,
        ).hellos

    return fetch


class ConnectorWorker:
    """Receives and sends the KV blocks of one rank.

    Parameters
    ----------
    agent : Agent
        Its own: the worker takes all of its notifications. The caller closes it after `shutdown`.
    engine_id : str
        This engine.
    rank : tuple of (int, int)
        Pipeline and tensor-parallel rank of this worker.
    parallel : ParallelSizes
        Sizes of the engine's parallel groups.
    config : ConnectorConfig
        Options.
    fetch : Fetch, optional
        Gets hello bytes from another engine; by default from its `pynixlkv.handshake.Handshake`.
    secret : bytes or str, optional
        As for `pynixlkv.handshake.fetch`, for the default `fetch`.
    clock : callable
        Monotonic seconds.
    longest_gap : float
        Longest time between two `poll` calls while the process runs. More means that it was stopped
        or starved; no deadline of a peer counts that time, in which nothing could be observed.
    background : bool
        Whether a thread does the work; otherwise the caller calls `poll`.
    executors : callable
        Makes the executor of blocking work from its number of threads and a name for them.
    draw : callable
        Numbers from 0 to 1, which spread the times at which workers ask an engine again.
    tracer : callable, optional
        Takes a `pynixlkv.connector.spans.HandOffSpan` of each request that was received or held.

    Notes
    -----
    All methods are thread-safe, and none waits for a peer.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        engine_id: str,
        rank: Rank = (0, 0),
        parallel: ParallelSizes | None = None,
        config: ConnectorConfig | None = None,
        fetch: Fetch | None = None,
        secret: bytes | str | None = None,
        clock: Callable[[], float] = time.monotonic,
        longest_gap: float = 2 * _LONGEST_PAUSE_S,
        background: bool = True,
        executors: Callable[[int, str], Executor] = ThreadPoolExecutor,
        draw: Callable[[], float] = random,
        tracer: Tracer | None = None,
    ) -> None:
        parallel = parallel or ParallelSizes()
        if not (0 <= rank[0] < parallel.pp and 0 <= rank[1] < parallel.tp):
            raise ConfigError(
                f"rank {rank} is not in an engine of {parallel.pp} x {parallel.tp} ranks"
            )
        self._agent = agent
        self._identity = messages.ConsumerRank(engine_id, rank, parallel)
        self._config = config or ConnectorConfig()
        self._fetch = fetch or _side_channel(self._config, secret)
        self._clock = ObservedClock(clock, longest_gap)
        self._background = background
        self._tracer = tracer
        self.stats = ConnectorStats()
        self._commands: deque[Callable[[float], None]] = deque()
        self._lock = threading.Lock()  # guards _finished
        self._finished = Finished()
        self._has_finished = threading.Event()
        self._sent: set[str] = set()
        self._ends: dict[str, RequestEnd] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._make_executor, self._draw = executors, draw
        self._executors: list[Executor] = []
        self._has_cache = False

    # ---- once

    def register_kv_caches(
        self,
        cache: KVCache,
        *,
        staging: HostStaging | None = None,
        scratch: KVCache | None = None,
    ) -> AgentMetadata:
        """Register the KV cache and start to work.

        Parameters
        ----------
        cache : KVCache
            Everything this rank holds. Not registered if there is a `staging`. The names of its
            tables are the numbers of the engine's block tables; if they are not numbers, the first
            table is the first of the engine, and so on.
        staging : HostStaging, optional
            Host memory to stage the cache in, where device memory cannot be registered.
        scratch : KVCache, optional
            For the self-test: `pynixlkv.connector.verification.NUM_SCRATCH_BLOCKS` blocks, made as
            `cache` was, which the engine has filled with the pattern by its own means. By default
            they are made here, and filled by what `cache` says of its layout.

        Returns
        -------
        AgentMetadata
            For the engine's handshake.
        """
        if self._has_cache:
            raise StateError("register_kv_caches was called before; a worker has one cache")
        moved = cache if staging is None else staging.host_cache
        tables = dict.fromkeys(group.table for group in moved.geometry.groups)
        if not all(map(str.isdecimal, tables)):
            moved = moved.with_tables({name: str(i) for i, name in enumerate(tables)})
        table = LeaseTable(self._config.max_leases)
        words, lease_buffer = make_words(_LEASE_BUFFER_WORDS)
        self._agent.register(moved)
        self._agent.register(table.cache)
        self._agent.register(lease_buffer)
        if not self._config.self_test:
            scratch = None
        elif scratch is None:
            scratch = verification.make_scratch(moved)
        described = [moved, table.cache]
        if scratch is not None:
            self._agent.register(scratch)
            described.append(scratch)
        handshakes = self._make_executor(_NUM_HANDSHAKES, "pynixlkv-handshake")
        digests = self._make_executor(_NUM_DIGESTS, "pynixlkv-digest")
        self._executors = [handshakes, digests]
        connect = partial(self._submit, handshakes)
        ctx = WorkerContext(
            agent=self._agent,
            identity=self._identity,
            kv=moved,
            lease_buffer=lease_buffer,
            hello=self._agent.hello(*described),
            staging=staging,
            config=self._config,
            stats=self.stats,
            peers=Peers(self._agent),
            scratch=scratch,
            compute=partial(self._compute, digests),
            tracer=self._tracer,
        )
        self._engines = RemoteEngines(ctx, self._fetch, connect, self._draw)
        self._receiver = Receiver(ctx, words, self._engines)
        self._sender = Sender(ctx, table, connect)
        self._has_cache = True
        if self._background:
            self._thread = threading.Thread(
                target=self._run, name="pynixlkv-connector", daemon=True
            )
            self._thread.start()
        return AgentMetadata(self._identity.engine_id, self._identity.rank, ctx.hello)

    # ---- each step

    def start_load_kv(self, metadata: ConnectorMetadata, event: DeviceEvent | None = None) -> None:
        """Take the scheduler's message for a step.

        `event` completes after all work launched on the device so far. Blocks named by the message
        may still be in use by other requests: nothing is read or written before it completes.
        """
        if not metadata:
            return
        self._do(partial(self._take, metadata, event))

    def _take(self, metadata: ConnectorMetadata, event: DeviceEvent | None, now: float) -> None:
        receiver, sender = self._receiver, self._sender
        # Guarded one by one: a bad request must not harm the others.
        todo: list[Callable[[], None]] = [
            *(partial(receiver.wait_for, *item, now) for item in metadata.reqs_waiting.items()),
            *(partial(self._receive, *item, event, now) for item in metadata.reqs_to_recv.items()),
            *(partial(receiver.release, *item, now) for item in metadata.reqs_to_release.items()),
            *(partial(receiver.abort, request_id) for request_id in metadata.reqs_to_abort),
            *(partial(sender.restart, request_id) for request_id in metadata.reqs_preempted),
            *(partial(sender.not_held, *item) for item in metadata.reqs_not_held.items()),
            *(partial(sender.begin, request_id) for request_id in metadata.reqs_to_come),
            partial(sender.save, metadata.reqs_to_save),
            *(partial(sender.hold, *item, event, now) for item in metadata.reqs_to_send.items()),
            *(partial(sender.end, *item) for item in metadata.reqs_to_end.items()),
            *([partial(sender.await_readers, now)] if metadata.consumer_comes else []),
        ]
        for command in todo:
            self._guard(command)

    def _receive(
        self, request_id: str, meta: ReqMeta, event: DeviceEvent | None, now: float
    ) -> None:
        try:
            self._receiver.receive(request_id, meta, event, now)
        except Exception as error:
            if not self._receiver.has(request_id):  # it still needs an end
                self._ends[request_id] = RequestEnd(EndState.FAILED, error, meta.blocks)
                self.stats.ended(EndState.FAILED.value, error)
            raise

    def save_kv_layer(self, layer: int, event: DeviceEvent | None = None) -> None:
        """Note that a layer, by global index, has been launched and can be pushed after `event`."""
        self._do(lambda _: self._sender.layer_done(layer, event))

    def get_finished(self, timeout: float = 0.0) -> Finished:
        """Return the requests that have ended since the last call; wait for the first of them.

        At most for `timeout` seconds: of use for a caller that has nothing to do and would ask
        again at once, taking the processor from the connector's thread.
        """
        if timeout:
            self._has_finished.wait(timeout)
        with self._lock:
            finished, self._finished = self._finished, Finished()
            self._has_finished.clear()
        return finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks, without groups, of failed requests not yet taken by `get_finished`."""
        with self._lock:
            ends = list(self._finished.failed.values())
        return {block for end in ends for table in end.blocks for block in table}

    # ---- the thread

    def _do(self, command: Callable[[float], None]) -> None:
        if not self._has_cache or self._stopping.is_set():
            raise ClosedError("the worker has no cache yet, or was shut down")
        self._commands.append(command)
        self._agent.wake()

    def _submit(self, executor: Executor, function: Callable[[], _T]) -> Future[_T]:
        future = executor.submit(function)
        future.add_done_callback(self._on_submitted)
        return future

    def _compute(
        self, executor: Executor, function: Callable[[], _T], num_bytes: int
    ) -> Future[_T]:
        if num_bytes > _SHORT_BYTES:
            return self._submit(executor, function)
        future: Future[_T] = Future()  # the way to another thread and back takes longer
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def _on_submitted(self, _: Future[_T]) -> None:
        if not self._stopping.is_set():
            self._agent.wake()

    def poll(self) -> float:
        """Do all pending work; return the seconds until the next call, if the agent stays idle.

        Called by the connector's thread, or by the caller if there is none.
        """
        now = self._clock()
        if self._clock.was_paused:
            self.stats.count("pauses")
            self._engines.renew_leases()
        while self._commands:
            self._guard(partial(self._commands.popleft(), now))
        for note in self._agent.notifications():
            self._guard(partial(self._on_notification, note.peer, note.message, now))
        due = min(self._receiver.poll(now, self._ends), self._sender.poll(now, self._sent))
        if self._ends or self._sent:
            with self._lock:
                self._collect()
        self._engines.send_releases()  # which takes longer than the engine should wait for an end
        self.stats.set_gauges(**self._receiver.gauges(), **self._sender.gauges())
        return due

    def _collect(self) -> None:
        for request_id, end in self._ends.items():
            if end.state is EndState.RECEIVED:
                self._finished.received.add(request_id)
            else:
                self._finished.failed[request_id] = end
        self._finished.sent |= self._sent
        self._ends, self._sent = {}, set()
        self._has_finished.set()

    def _guard(self, command: Callable[[], None]) -> None:
        """Run a command; its failure must not end the thread."""
        try:
            command()
        except Exception:
            _log.exception("a connector command failed")
            self.stats.count("errors")

    def _on_notification(self, agent: str, data: bytes, now: float) -> None:
        try:
            message = messages.decode(data)
        except WireError as error:
            self.stats.count("foreign_notifications")
            _log.warning("a notification of %s was ignored: %s", agent, str(error))
            return
        self._sender.on_any(agent, now)
        if isinstance(message, messages.ConsumerHello):
            self._sender.on_consumer_hello(agent, message)
        elif isinstance(message, messages.Heartbeat):
            self._sender.on_heartbeat(agent, message, now)
        elif isinstance(message, messages.Release):
            self._sender.on_release(message, now)
        elif isinstance(message, messages.Push):
            self._sender.on_push(agent, message, now)
        elif isinstance(message, messages.CancelPush):
            self._sender.on_cancel_push(agent, message)
        elif isinstance(message, messages.DigestRequest):
            self._sender.on_digest_request(agent, message, now)
        elif isinstance(message, messages.HeartbeatAck):
            self._receiver.on_heartbeat_ack(agent, message)
        elif isinstance(message, messages.Digests):
            self._receiver.on_digests(agent, message)
        else:
            self._receiver.on_push_done(agent, message)

    def _run(self) -> None:
        seen = 0
        while not self._stopping.is_set():
            try:
                due = self.poll()
            except ClosedError:
                return
            except Exception:
                # A defect. Go on for the other requests.
                _log.exception("the connector's thread cannot go on for a moment")
                self.stats.count("errors")
                due = _LONGEST_PAUSE_S
            if self._stopping.is_set():
                return
            try:
                seen = self._agent.wait_activity(seen, min(due, _LONGEST_PAUSE_S))
            except ClosedError:
                return
            except PynixlkvError:
                time.sleep(min(due, _LONGEST_PAUSE_S))

    # ---- the end

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop all threads; idempotent. Waits at most `timeout` seconds for them.

        Requests that are being received end unreported, and leases end with the agent. Close it
        next: that waits until it is quiet, and held blocks must not be reused before.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._has_cache:
            self._agent.wake()
        threads = [self._thread] if self._thread is not None else []
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
            # Its threads keep the agent alive, and waiting for them has no timeout of its own.
            waiting = threading.Thread(target=executor.shutdown, daemon=True)
            with contextlib.suppress(RuntimeError):  # at interpreter exit, when they are gone
                waiting.start()
                threads.append(waiting)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
