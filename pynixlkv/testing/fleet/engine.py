"""A serving engine of a fleet: the connector's two halves, a pool of blocks, and a queue.

Blocks are small and real. What is in them follows from the trace: equal prefixes have equal KV, and
every element differs from every other. One token of the connector, a cell, stands for many of the
trace.
"""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv import KVCache
from pynixlkv.connector.leases import status
from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.metadata import KVTransferParams, Lease, ParallelSizes, RequestInfo
from pynixlkv.connector.scheduler import ConnectorScheduler, GroupSpec
from pynixlkv.connector.worker import ConnectorWorker
from pynixlkv.errors import PynixlkvError
from pynixlkv.testing.fleet.checks import Violation
from pynixlkv.testing.fleet.trace import BLOCK_TOKENS
from pynixlkv.testing.fleet.virtual import VirtualAgent, VirtualExecutor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pynixlkv.connector.receiver import RequestEnd
    from pynixlkv.testing.fleet.handshakes import Ask
    from pynixlkv.testing.fleet.simulation import Fleet, Slot
    from pynixlkv.testing.fleet.trace import TracedRequest
    from pynixlkv.types import Rank

BLOCK_CELLS = 4
CELL_TOKENS = BLOCK_TOKENS // BLOCK_CELLS
_DIM = 2
_CELL_BYTES = 2 * _DIM * 4
_LONGEST_PAUSE_S = 10.0
"""Of an idle worker; a real one looks each second, which costs more events than all else."""
_POISON = 0xDEADDEAD


@dataclass(eq=False)
class Job:
    """One attempt of a request, at the engine that has it now."""

    id: str
    request: TracedRequest
    number: int
    """Of the request, in the trace."""
    attempt: int
    info: RequestInfo | None = None
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    lease: Lease | None = None
    source: tuple[Engine, str] | None = None
    """The engine that holds its blocks, and under which id."""
    since: float = 0.0
    """When it was queued, or when its blocks began to be fetched."""
    is_given_up: bool = False
    is_ghost: bool = False
    """A hand-off of a dead engine that a router repeats."""

    @property
    def num_cells(self) -> int:
        """Tokens, as the connector counts."""
        return -(-self.request.num_prompt_tokens // CELL_TOKENS)

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt."""
        return len(self.request.blocks)

    def content(self, count: int) -> str:
        """Name what decides the KV of its first cells."""
        return f"{self.request.blocks[(count - 1) // BLOCK_CELLS]}.{count}"


class Pool:
    """An engine's blocks, shared by requests with a common prefix, and kept until reused."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._ids = [0] * num_blocks
        self._by_id: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return len(self._free)

    def match(self, ids: tuple[int, ...]) -> list[int]:
        """Return the blocks that hold the beginning of a prompt."""
        found = []
        for each in ids:
            block = self._by_id.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, matched: list[int], count: int) -> list[int] | None:
        """Use some blocks again, and others anew; return the new ones, None if too few are free."""
        if count > len(self._free) - sum(self.refs[block] == 0 for block in matched):
            return None
        for block in matched:
            self._free.pop(block, None)
            self.refs[block] += 1
        fresh = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._by_id.get(self._ids[block]) == block:
                del self._by_id[self._ids[block]]
            self._ids[block], self.refs[block] = 0, 1
            fresh.append(block)
        return fresh

    def keep(self, blocks: list[int], ids: tuple[int, ...]) -> None:
        """Let later requests find what is in blocks."""
        for block, each in zip(blocks, ids, strict=False):
            if each not in self._by_id:
                self._by_id[each], self._ids[block] = block, each

    def release(self, blocks: list[int]) -> None:
        """End one use of blocks."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None


class FleetRank:
    """One worker, its memory, and the loop that polls it in virtual time."""

    def __init__(self, engine: Engine, rank: int) -> None:
        fleet, options = engine.fleet, engine.fleet.options
        self.engine, self.events, self.rank = engine, fleet.events, rank
        tp = options.tp
        self.memory = np.full((options.num_blocks, 2, 1, BLOCK_CELLS, _DIM), _POISON, np.uint32)
        cache = KVCache.from_tensors(
            {"layer.0": self.memory}, axes="BKHND", kv_heads=tp, tp=(rank, tp), layers=[0]
        )
        self.agent = VirtualAgent(f"{engine.id}/{rank}", fleet.network, engine.slot.host)
        self.native = self.agent.native
        self.native.link.bytes_per_s = options.link * 1e9 / 8
        begin = self.memory.ctypes.data
        factor = options.token_bytes * CELL_TOKENS / _CELL_BYTES
        self.native.factors.append((begin, begin + self.memory.nbytes, factor))
        self.native.on_activity = self.wake
        slowness = engine.slot.host.slowness
        self._reaction = options.reaction * slowness
        self._next = math.inf
        self.asks: dict[object, Ask] = {}
        """By address and engine, the handshakes that are not over."""
        self.contacts: dict[object, tuple[float, int]] = {}
        """By address, when its last ten seconds began, and how often it was asked in them."""
        self.worker: ConnectorWorker = ConnectorWorker(
            self.agent,
            engine_id=engine.id,
            rank=(0, rank),
            parallel=engine.parallel,
            config=options.config,
            fetch=self._fetch,
            clock=engine.clock,
            longest_gap=math.inf,
            background=False,
            draw=fleet.draw,
            executors=lambda count, _: VirtualExecutor(fleet.events, count, self._reaction),
        )
        self.counted: tuple[int, int] = (0, 0)  # messages and transfers at the last audit
        self.hello = self.worker.register_kv_caches(cache).hello
        self.words = self.agent.registrations[1].spans[0].address

    def _fetch(
        self, address: tuple[str, int], *, engine_id: str, ranks: list[Rank], timeout: float
    ) -> Mapping[Rank, bytes]:
        return self.engine.fleet.fetch(self, address, engine_id, ranks, timeout)

    # ---- the loop

    def wake(self) -> None:
        """Poll soon."""
        self._poll_at(self.events.now + self._reaction)

    def _poll_at(self, when: float) -> None:
        if when < self._next:
            self._next = when
            self.events.at(when, self._poll, when)

    def _poll(self, when: float) -> None:
        if when != self._next or self.engine.is_over:
            return
        self._next = math.inf
        due = self.worker.poll()
        pause = min(max(due / self.engine.rate, self._reaction), _LONGEST_PAUSE_S)
        self._poll_at(self.events.now + pause)
        finished = self.worker.get_finished()
        if finished:
            self.engine.report(finished.sent, finished.received, finished.failed)

    # ---- memory

    def lease_word(self, slot: int) -> int:
        """Return what a reader would see."""
        return ctypes.c_uint64.from_address(self.words + 8 * slot).value

    def uses(self, blocks: list[int]) -> bool:
        """Whether an operation writes blocks, or pushes them to a reader."""
        moving = [t for t in self.native.active.values() if not t.is_quiet]
        rows = [here for t in moving for here, _, _ in t.rows]
        rows += [there for t in self.native.served.values() if t.op for _, there, _ in t.rows]
        if not rows:
            return False
        begin, size = self.memory.ctypes.data, self.memory.strides[0]
        wanted = set(blocks)
        return any((row - begin) // size in wanted for row in rows)


class Engine:
    """One life of an engine."""

    def __init__(self, fleet: Fleet, slot: Slot, engine_id: str) -> None:
        self.fleet, self.slot, self.id = fleet, slot, engine_id
        self.events, self.options = fleet.events, fleet.options
        self.rate = slot.clock_rate
        self.is_prefill = slot.is_prefill
        self.is_over = False
        """It was closed, or has died."""
        self.freed_at = 0.0
        """When something became free that its next request may need."""
        self.parallel = ParallelSizes(tp=self.options.tp)
        self.scheduler = ConnectorScheduler(
            engine_id,
            [GroupSpec(BLOCK_CELLS)],
            address=slot.address,
            parallel=self.parallel,
            config=self.options.config,
        )
        self.pool = Pool(self.options.num_blocks)
        self.ranks = [FleetRank(self, rank) for rank in range(self.options.tp)]
        self.queue: deque[Job] = deque()
        self.computing: Job | None = None
        self.held: dict[str, Job] = {}
        self.receiving: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self.reports: dict[str, list[object]] = {}
        self.reported: list[tuple[str, list[object]]] = []
        self.num_handed = 0
        self.num_counted, self.counted_at = 0, self.events.now  # at the last audit
        self._is_stepping = False

    def clock(self) -> float:
        """Return the time by this engine's clock."""
        return self.events.now * self.rate + 1000.0

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.queue) + len(self.receiving) + len(self.running) + bool(self.computing)

    @property
    def jobs(self) -> list[Job]:
        """The requests that it would answer."""
        computing = [self.computing] if self.computing else []
        return [*self.queue, *computing, *self.receiving.values(), *self.running.values()]

    # ---- requests

    def submit(self, job: Job, params: Mapping[str, Any] | None = None) -> None:
        """Take a request: a prompt, or with parameters, one whose blocks can be fetched."""
        made = KVTransferParams.from_dict(params or {"do_remote_decode": True})
        job.info = RequestInfo(job.id, job.num_cells, made, job.content)
        job.since = self.events.now
        try:
            self.scheduler.on_new_request(job.info)
        except PynixlkvError as error:
            self.fleet.failed(job, type(error).__name__)
            return
        self.queue.append(job)
        self.step_soon()

    def abort(self, job: Job) -> None:
        """Give a request up, whatever it is at."""
        job.is_given_up = True
        if job in self.queue:
            self.queue.remove(job)
        elif job.id not in self.receiving:
            return  # a prompt that is computed, an answer that is written: it ends by itself
        assert job.info is not None
        keeps, _ = self.scheduler.request_finished(
            job.info, (tuple(job.blocks),), 0, is_complete=False
        )
        if not keeps:
            self.receiving.pop(job.id, None)
            self._release(job)
        self.step_soon()

    def step_soon(self) -> None:
        """Make a step, at the next beat."""
        if not self._is_stepping:
            self._is_stepping = True
            beat = self.options.step * self.slot.host.slowness
            self.events.at((self.events.now // beat + 1) * beat, self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if self.is_over:
            return
        self._settle()
        if self.is_prefill:
            self._begin_prefill()
        else:
            self._begin_fetches()
        metadata = self.scheduler.build_connector_meta()
        if metadata:
            for rank in self.ranks:
                rank.worker.start_load_kv(metadata)

    def _allocate(self, job: Job) -> bool:
        ids = job.request.blocks
        matched = self.pool.match(ids[:-1])
        fresh = self.pool.take(matched, len(ids) - len(matched))
        if fresh is None:
            return False
        for rank in self.ranks:
            rank.memory[fresh] = _POISON
        job.blocks, job.num_cached = [*matched, *fresh], len(matched)
        return True

    def check_starved(self) -> None:
        """Raise if a request waits although everything that it needs is free."""
        now, fleet = self.events.now, self.fleet
        if self.queue and not self.computing and self._has_place:
            job = self.queue[0]
            waited = now - max(job.since, self.freed_at)
            if self.pool.num_free >= job.num_blocks and waited > self.options.longest_wait:
                raise Violation("starved", f"{job.id} at {self.id} waits {waited:.1f} s with room")
        for job in self.receiving.values():
            if job.source is None or job.is_given_up:
                continue
            producer, host = job.source[0], job.source[0].slot.host
            # What a partition has lost is repeated when it is over.
            idle = now - max(job.since, producer.slot.server.busy_at, fleet.network.changed_at)
            is_there = not producer.is_over and fleet.network.reaches(host, self.slot.host)
            if idle > fleet.idle_bound and is_there and not self._moves(job):
                raise Violation(
                    "starved",
                    f"{job.id} at {self.id} waits {idle:.1f} s for {producer.id}, which is there, "
                    "and nothing of it moves",
                )

    def _moves(self, job: Job) -> bool:
        return any(rank.uses(job.blocks) for rank in self.ranks)

    @property
    def _has_place(self) -> bool:
        return len(self.running) + len(self.receiving) < self.options.max_batch

    # ---- prefill

    def _begin_prefill(self) -> None:
        if self.computing or not self.queue or not self._allocate(self.queue[0]):
            return
        self.computing = job = self.queue.popleft()
        tokens = job.request.num_prompt_tokens - job.num_cached * BLOCK_TOKENS
        seconds = max(tokens, 1) / self.options.prefill_speed * self.slot.host.slowness
        self.events.after(seconds, self._computed, job)

    def _computed(self, job: Job) -> None:
        if self.is_over:
            return
        self.computing = None
        self.freed_at = self.events.now
        self.step_soon()
        for rank, expected in zip(self.ranks, self.fleet.contents(job), strict=True):
            rank.memory[job.blocks[job.num_cached :]] = expected[job.num_cached :]
        self.pool.keep(job.blocks, job.request.blocks[:-1])
        assert job.info is not None
        keeps, answer = self.scheduler.request_finished(
            job.info, (tuple(job.blocks),), job.num_cells, is_complete=not job.is_given_up
        )
        if keeps and answer is not None:
            job.lease = Lease.parse(answer["lease"])
            self.held[job.id] = job
            self.fleet.num_held += 1
            self.fleet.num_held_blocks += job.num_blocks
        else:
            self._release(job)
        if not job.is_given_up:
            self.fleet.prefilled(job, self, answer)

    def check_freed(self, job_id: str) -> None:
        """Raise if a lease is still held whose reader has ended long ago."""
        if not self.is_over and job_id in self.held:
            raise Violation(
                "held too long",
                f"{job_id} is held by {self.id} {self.fleet.held_bound:.0f} s after its reader",
            )

    # ---- decode

    def _begin_fetches(self) -> None:
        while self.queue and self._has_place:
            job = self.queue[0]
            assert job.info is not None
            if not self._allocate(job):
                return
            cached = job.num_cached * BLOCK_CELLS
            try:
                count, _ = self.scheduler.get_num_new_matched_tokens(job.info, cached)
                if count is None:  # the scheduler wants to be asked later
                    self._release(job)
                    return
                assert count
                self.scheduler.update_state_after_alloc(
                    job.info, (tuple(job.blocks),), cached, count
                )
            except PynixlkvError as error:
                self.queue.popleft()
                self._release(job)
                self.fleet.failed(job, type(error).__name__)
                continue
            self.queue.popleft()
            job.since = self.events.now
            self.receiving[job.id] = job
            self.events.after(self.fleet.fetch_bound, self._check_fetched, job)

    def _check_fetched(self, job: Job) -> None:
        if not self.is_over and self.receiving.get(job.id) is job:
            raise Violation(
                "no end", f"{job.id} at {self.id} is fetched for {self.fleet.fetch_bound:.0f} s"
            )

    def _received(self, job: Job) -> None:
        self.num_handed += 1
        for rank, expected in zip(self.ranks, self.fleet.contents(job), strict=True):
            found = rank.memory[job.blocks]
            valid = job.num_cells - (job.num_blocks - 1) * BLOCK_CELLS
            if not (
                np.array_equal(found[:-1], expected[:-1])
                and np.array_equal(found[-1, :, :, :valid], expected[-1, :, :, :valid])
            ):
                raise Violation(
                    "wrong bytes", f"{job.id} was received by rank {rank.rank} of {self.id}"
                )
        self.pool.keep(job.blocks, job.request.blocks[:-1])
        self.running[job.id] = job
        seconds = job.request.num_output_tokens * self.options.token_time
        self.events.after(seconds * self.slot.host.slowness, self._answered, job)
        self.fleet.received(job)

    def _answered(self, job: Job) -> None:
        if self.is_over:
            return
        del self.running[job.id]
        assert job.info is not None
        self.scheduler.request_finished(job.info, (tuple(job.blocks),), job.num_cells)
        self._release(job)
        self.step_soon()
        if not job.is_given_up:
            self.fleet.ended(job, "answered")

    # ---- reports of the workers

    def report(self, sent: set[str], received: set[str], failed: dict[str, RequestEnd]) -> None:
        """Count reports: a request is sent or received when every rank says so."""
        found: list[tuple[str, object]] = [*((each, "sent") for each in sent)]
        found += [*((each, "received") for each in received), *failed.items()]
        for job_id, what in found:
            seen = self.reports.setdefault(job_id, [])
            seen.append(what)
            if len(seen) == len(self.ranks):
                self.reported.append((job_id, self.reports.pop(job_id)))
                self.step_soon()

    def _settle(self) -> None:
        """Take what all ranks have reported."""
        reported, self.reported = self.reported, []
        for job_id, seen in reported:
            ends = [each for each in seen if not isinstance(each, str)]
            known = self.held if seen[0] == "sent" else self.receiving
            if job_id not in known:
                raise Violation("two ends", f"{job_id} at {self.id} ends again: {seen[0]}")
            if seen[0] == "sent":
                self.scheduler.update_finished(sent=[job_id])
                self._sent(known.pop(job_id))
                continue
            job = known.pop(job_id)
            assert job.info is not None
            if ends or job.is_given_up:
                self.scheduler.update_finished(failed=[job_id])
                if not job.is_given_up:
                    self.scheduler.request_finished(
                        job.info, (tuple(job.blocks),), 0, is_complete=False
                    )
                self._release(job)
                if not job.is_given_up:
                    self.fleet.failed(job, _cause(ends[0]))
            else:
                self.scheduler.update_finished(received=[job_id])
                self._received(job)

    def _sent(self, job: Job) -> None:
        lease = job.lease
        assert lease is not None
        for rank in self.ranks:
            if status(lease, rank.lease_word(lease.slot)) is LeaseStatus.HELD:
                raise Violation(
                    "freed under a lease", f"{job.id} by {self.id}: rank {rank.rank} holds {lease}"
                )
        self.fleet.num_held -= 1
        self.fleet.num_held_blocks -= job.num_blocks
        self._release(job)

    def _release(self, job: Job) -> None:
        """Free a request's blocks."""
        if not job.blocks:
            return
        last = [block for block in job.blocks if self.pool.refs[block] == 1]
        for rank in self.ranks:
            if rank.uses(last):
                raise Violation("freed in use", f"blocks of {job.id} at rank {rank.rank}")
        self.pool.release(job.blocks)
        job.blocks = []
        self.freed_at = self.events.now

    # ---- the end

    def close(self, *, is_silent: bool = False) -> list[Job]:
        """End this life; return the requests that nothing answers now."""
        self.is_over = True
        self.slot.host.is_silent = is_silent
        self.fleet.num_held -= len(self.held)
        self.fleet.num_held_blocks -= sum(job.num_blocks for job in self.held.values())
        for rank in self.ranks:
            rank.native.kill()
            rank.agent.close()
        return [job for job in self.jobs if not job.is_given_up]


def _cause(end: object) -> str:
    error = getattr(end, "error", None)
    state = getattr(getattr(end, "state", None), "value", "failed")
    return f"{state}: {type(error).__name__}" if error is not None else str(state)
