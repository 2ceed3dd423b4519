"""A fleet in virtual time: a router, engines that fail, and what is counted of them."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.connector.metadata import ConnectorConfig
from pynixlkv.errors import ConfigError, HandshakeError
from pynixlkv.testing.fleet.checks import Violation, audit, note_contact
from pynixlkv.testing.fleet.engine import BLOCK_CELLS, Engine, Job
from pynixlkv.testing.fleet.handshakes import Ask, HandshakeServer
from pynixlkv.testing.fleet.trace import BLOCK_TOKENS, TracedRequest, synthetic
from pynixlkv.testing.fleet.virtual import Events, Host, Link, Network, Suspended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from pynixlkv.connector.metadata import TransferMode
    from pynixlkv.testing.fleet.engine import FleetRank
    from pynixlkv.types import Rank

SCENARIOS = ("rolling", "stale", "rack", "herd", "clocks", "slow", "partition")
_HTTP_S = 0.002
_SILENCE_S = 5.0
"""How long a router waits for an engine that does not answer."""
_DIM_OF_KV = 2


@dataclass(frozen=True)
class FleetOptions:
    """A fleet, its load, and what goes wrong; times in seconds, speeds of links in Gb/s."""

    prefill: int = 8
    decode: int = 8
    tp: int = 4
    duration: float = 60.0
    rate: float = 2.0
    """Requests in a second."""
    seed: int = 0
    prompt: int = 8192
    """Median tokens of a prompt."""
    output: int = 200
    shared: float = 0.5
    """Part of the requests that share a prefix with others."""
    scenarios: tuple[str, ...] = ()
    failures: float = 0.0
    """Part of the engines that fail in an hour."""
    aborts: float = 0.01
    """Part of the requests that their clients give up."""
    retries: int = 2
    restart: float = 30.0
    """From the end of an engine to its successor."""
    mode: TransferMode = "pull"
    checksums: str = "sampled"
    lease_duration: float = 30.0
    peer_ttl: float = 300.0
    rack: int = 16
    """Engines of a rack."""
    link: float = 100.0
    """Of each rank."""
    uplink: float = 3200.0
    """Of each rack."""
    latency: float = 5e-6
    """Of a host; a packet passes two."""
    token_bytes: int = 81920
    """KV of a token at a rank; the default is that of Llama-3.1-70B at TP 4."""
    num_blocks: int = 320
    """Blocks of 512 tokens of an engine."""
    prefill_speed: float = 20000.0
    """Tokens in a second."""
    token_time: float = 0.02
    """Of an answer."""
    max_batch: int = 64
    step: float = 0.01
    """Time between two steps of an engine."""
    reaction: float = 1e-4
    """From an event to the round of the connector that sees it."""
    handshake: float = 0.001
    """Time of an engine's handshake server for one question."""
    jitter: float = 1.0
    """Part of the connector's jitter of retries; 0 shows what it is for."""
    longest_wait: float = 2.0
    """Of the oldest request of an engine that has room for it."""

    def __post_init__(self) -> None:
        unknown = set(self.scenarios) - set(SCENARIOS)
        if unknown:
            raise ConfigError(
                f"there are no scenarios {sorted(unknown)}; choose from {', '.join(SCENARIOS)}"
            )
        for name in ("prefill", "decode", "tp", "duration", "rate", "num_blocks", "rack"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number above 0")

    @cached_property
    def config(self) -> ConnectorConfig:
        """Options of all connectors."""
        return ConnectorConfig(
            transfer_mode=self.mode,
            checksums=self.checksums,  # type: ignore[arg-type]
            lease_duration=self.lease_duration,
            peer_ttl=self.peer_ttl,
            max_leases=256,
            self_test=False,  # it waits inside one event
        )


@dataclass(eq=False)
class Slot:
    """A place in the fleet, and the engine that has it now."""

    number: int
    is_prefill: bool
    address: tuple[str, int]
    host: Host
    clock_rate: float = 1.0
    engine: Engine | None = None
    num_lives: int = 0
    server: HandshakeServer = field(init=False)
    handed: deque[tuple[TracedRequest, dict[str, Any]]] = field(
        default_factory=lambda: deque(maxlen=16)
    )
    """The last hand-offs, for a router that repeats them."""


@dataclass
class Sample:
    """The fleet at one moment."""

    at: float
    requests: int
    leases: int
    blocks: int
    peers: int


@dataclass
class Counts:
    """What has happened."""

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why attempts have failed."""
    ghosts: Counter[str] = field(default_factory=Counter)
    """What has become of hand-offs of dead engines that a router repeats."""
    events: Counter[str] = field(default_factory=Counter)
    """Failures of engines, and what the router saw of them."""
    hand_offs: list[float] = field(default_factory=list)
    """Seconds of each."""
    contacts: list[float] = field(default_factory=list)
    """Seconds of each answered handshake."""
    samples: list[Sample] = field(default_factory=list)
    connections_asked: int = 0
    """Connections to handshake servers, the repeated ones included."""
    dropped: int = 0
    """Those that a server has dropped because there were too many."""
    most_asked: int = 0
    """At one server within a tenth of a second."""
    audits: int = 0


class Fleet:
    """Runs a trace through a fleet, and checks all along that nothing is wrong.

    Parameters
    ----------
    options : FleetOptions
        The fleet.
    trace : iterable of TracedRequest, optional
        In order of time; by default a synthetic one of the options' seed.
    progress : callable, optional
        Called once per simulated second.
    """

    def __init__(
        self,
        options: FleetOptions,
        trace: Iterable[TracedRequest] | None = None,
        progress: Callable[[Fleet], None] | None = None,
    ) -> None:
        self.options, self.events = options, Events()
        self.network = Network(self.events)
        self.counts = Counts()
        self.num_held = self.num_held_blocks = 0
        self.began_at = time.perf_counter()
        config = options.config
        slowest = 0.95 if "clocks" in options.scenarios else 1.0
        self.held_bound = (2 * config.lease_duration + 1.0) / slowest
        self.fetch_bound = (
            config.transfer_timeout + config.handshake_timeout + 2 * self.network.detection
        ) / slowest
        self.idle_bound = (2 * config.heartbeat_period(config.lease_duration)) / slowest
        self._drawn = random.Random(f"fleet {options.seed}")
        retries = random.Random(f"retries {options.seed}")
        self.draw = lambda: 0.5 + options.jitter * (retries.random() - 0.5)
        self._trace: Iterator[TracedRequest] = iter(
            trace
            if trace is not None
            else synthetic(
                options.seed,
                options.rate,
                prompt=options.prompt,
                output=options.output,
                shared=options.shared,
            )
        )
        self._progress = progress
        self._num_requests = 0
        self._open: dict[int, tuple[Job, Engine | None]] = {}
        shape = (2, options.tp, BLOCK_CELLS, _DIM_OF_KV)
        elements = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        self._elements = elements * np.uint32(0x9E3779B1)
        num_engines = options.prefill + options.decode
        self._uplinks = [Link(options.uplink) for _ in range(-(-num_engines // options.rack))]
        self.slots = [
            Slot(i, i < options.prefill, (f"10.{i >> 8}.{i & 255}.1", 5600), self._host(i))
            for i in range(num_engines)
        ]
        for slot in self.slots:
            slot.server = HandshakeServer(self, slot)
        self._by_address = {slot.address: slot for slot in self.slots}
        self._up: dict[bool, list[Slot]] = {True: [], False: []}
        if "clocks" in options.scenarios:
            for slot in self.slots:
                slot.clock_rate = self._drawn.uniform(0.95, 1.05)
        for slot in self.slots:
            self._start(slot)
        self._audited = 0

    def _host(self, number: int) -> Host:
        options = self.options
        is_slow = "slow" in options.scenarios and number % 10 == 1
        # Engines of both kinds share racks.
        rack = number % len(self._uplinks)
        return Host(rack, self._uplinks[rack], options.latency, 20.0 if is_slow else 1.0)

    # ---- engines

    def _start(self, slot: Slot) -> None:
        slot.num_lives += 1
        if slot.num_lives > 1:
            slot.host = self._host(slot.number)
        # Some deployments name a successor as its predecessor.
        life = "" if slot.number % 2 else f".{slot.num_lives}"
        slot.engine = Engine(self, slot, f"{'pd'[not slot.is_prefill]}{slot.number}{life}")
        self._up[slot.is_prefill].append(slot)

    def _stop(self, slot: Slot, is_silent: bool) -> None:
        """Let an engine die: its process, or with `is_silent` its host."""
        engine = slot.engine
        if engine is None:
            return
        self.counts.events["hosts lost" if is_silent else "engines killed"] += 1
        slot.engine = None
        left = engine.close(is_silent=is_silent)
        slot.server.drop_all()
        self.network.changed()
        notice = _SILENCE_S if is_silent else _HTTP_S
        self.events.after(notice, self._notice, slot, left, "its engine died")
        self.events.after(self.options.restart, self._start, slot)
        if "stale" in self.options.scenarios and slot.is_prefill:
            for number, (request, params) in enumerate(slot.handed):
                for again in range(20):
                    self.events.after(
                        1.0 + 0.06 * number + again, self._haunt, request, params, number
                    )

    def _notice(self, slot: Slot, left: list[Job], why: str) -> None:
        if slot in self._up[slot.is_prefill] and slot.engine is None:
            self._up[slot.is_prefill].remove(slot)
        for job in left:
            self.failed(job, why)

    def _leave(self, slot: Slot) -> None:
        """Stop an engine as it should be stopped: it ends its requests first."""
        if slot.engine is None or slot not in self._up[slot.is_prefill]:
            return
        self._up[slot.is_prefill].remove(slot)
        self._drain(slot, slot.engine, self.events.now + self.options.lease_duration)

    def _drain(self, slot: Slot, engine: Engine, until: float) -> None:
        if slot.engine is not engine:
            return
        if (engine.jobs or engine.held) and self.events.now < until:
            self.events.after(0.5, self._drain, slot, engine, until)
            return
        self.counts.events["engines restarted"] += 1
        slot.engine = None
        self._notice(slot, engine.close(), "its engine was restarted")
        slot.server.drop_all()
        for rank in engine.ranks:
            rank.worker.shutdown()
        self.events.after(self.options.restart, self._start, slot)

    def fetch(
        self,
        rank: FleetRank,
        address: tuple[str, int],
        engine_id: str,
        ranks: list[Rank],
        timeout: float,
    ) -> Mapping[Rank, bytes]:
        """Answer as the handshake server of an engine does, when it does."""
        key = address, engine_id
        ask = rank.asks.get(key)
        if ask is None:
            note_contact(rank, address)
            ask = rank.asks[key] = Ask(self, rank, self._by_address[address], engine_id)
            raise Suspended(partial(ask.begin, timeout))
        answer = rank.asks.pop(key).answer
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        if answer.is_over:
            raise HandshakeError(f"{address} has closed the connection", peer=engine_id)
        return {each: answer.ranks[each[1]].hello for each in ranks}

    # ---- requests

    def contents(self, job: Job) -> list[npt.NDArray[np.uint32]]:
        """Return the KV of a prompt, for each rank, as its blocks hold it."""
        ids = np.array(job.request.blocks, np.uint32) * np.uint32(2654435761)
        values = ids[:, None, None, None, None] ^ self._elements
        return [values[:, :, head : head + 1] for head in range(self.options.tp)]

    def _arrive(self) -> None:
        """Take the next request of the trace."""
        request = next(self._trace, None)
        if request is not None and request.at < self.options.duration:
            self.events.at(request.at, self._take, request)

    def _take(self, request: TracedRequest) -> None:
        self._arrive()
        self._begin(request)

    def _begin(self, request: TracedRequest) -> None:
        self._num_requests += 1
        number = self._num_requests
        job = Job(f"r{number}.0", request, number, 0)
        self._open[number] = job, None
        if job.num_blocks > self.options.num_blocks // 2:
            self.ended(job, "too long for the pool")
            return
        if self._drawn.random() < self.options.aborts:
            self.events.after(self._drawn.expovariate(1.0), self._abort, number)
        self._send(job, None)

    def _choose(self, *, is_prefill: bool) -> Slot | None:
        """Return the less busy of two engines."""
        up = self._up[is_prefill]
        if not up:
            return None
        pair = [up[int(self._drawn.random() * len(up))] for _ in range(2)]
        return min(pair, key=lambda slot: 0 if slot.engine is None else slot.engine.load)

    def _send(self, job: Job, params: dict[str, Any] | None) -> None:
        """Give a job to an engine; the router does not know at once which are dead."""
        if job.is_given_up:
            return
        slot = self._choose(is_prefill=params is None)
        if slot is None:
            self.failed(job, "no engine is up")
        elif slot.engine is None:
            self.counts.events["asked a dead engine"] += 1
            wait = _SILENCE_S if slot.host.is_silent else _HTTP_S
            self.events.after(wait, self._send, job, params)
        else:
            self._open[job.number] = job, slot.engine
            slot.engine.submit(job, params)

    def prefilled(self, job: Job, engine: Engine, answer: dict[str, Any] | None) -> None:
        """Pass the answer of prefill on."""
        if answer is None:
            self.failed(job, "prefill cannot hold its blocks")
            return
        if "stale" in self.options.scenarios:
            engine.slot.handed.append((job.request, answer))
        fetched = replace(job, id=f"d{job.id[1:]}", blocks=[], source=(engine, job.id))
        self._open[job.number] = fetched, None
        self.events.after(_HTTP_S, self._send, fetched, answer)

    def received(self, job: Job) -> None:
        """Note that blocks have arrived."""
        if job.is_ghost:
            raise Violation("wrong bytes", f"{job.id} was received from an engine that is dead")
        self.counts.hand_offs.append(self.events.now - job.since)
        self._check_freed(job)

    def _check_freed(self, job: Job) -> None:
        if job.source is not None:
            engine, held_id = job.source
            self.events.after(self.held_bound, engine.check_freed, held_id)

    def failed(self, job: Job, why: str) -> None:
        """Try again, unless that was done often enough."""
        if job.is_given_up:
            return
        if job.is_ghost:
            self.counts.ghosts[why] += 1
            return
        self.counts.reasons[why] += 1
        self._check_freed(job)
        attempt = job.attempt + 1
        if attempt > self.options.retries:
            self.ended(job, "failed")
            return
        again = Job(f"r{job.number}.{attempt}", job.request, job.number, attempt)
        self._open[job.number] = again, None
        pause = 0.5 * 2**attempt * self._drawn.uniform(0.5, 1.0)
        self.events.after(pause, self._send, again, None)

    def ended(self, job: Job, how: str) -> None:
        """Note the end of a request."""
        if job.is_ghost:
            return
        if self._open.pop(job.number, None) is None:
            raise Violation("two ends", f"request {job.number} has ended before: {how}")
        self.counts.ends[how] += 1

    def _abort(self, number: int) -> None:
        job, engine = self._open.get(number, (None, None))
        if job is None:
            return
        job.is_given_up = True
        self._check_freed(job)
        if engine is not None and not engine.is_over:
            engine.abort(job)
        self.ended(job, "given up by its client")

    def _haunt(self, request: TracedRequest, params: dict[str, Any], number: int) -> None:
        """Hand a dead engine's request to a decode engine."""
        up = [slot.engine for slot in self._up[False][:4] if slot.engine is not None]
        if up:
            self._num_requests += 1
            job = Job(f"g{self._num_requests}", request, 0, 0, is_ghost=True)
            up[number % len(up)].submit(job, params)

    # ---- what goes wrong

    def _plan_failures(self) -> None:
        options, at = self.options, self.events.at
        total = len(self.slots) * options.failures * options.duration / 3600
        count = int(total) + (self._drawn.random() < total % 1)
        for _ in range(count):
            at(self._drawn.uniform(0, options.duration), self._fail_one)
        middle = options.duration / 2
        if "rolling" in options.scenarios:
            pause = 0.6 * options.duration / len(self.slots)
            # Prefill and decode take turns, so that neither is gone as a whole.
            turns = sorted(self.slots, key=lambda s: s.number % options.prefill)
            for place, slot in enumerate(turns):
                at(0.1 * options.duration + place * pause, self._leave, slot)
        if "rack" in options.scenarios:
            for slot in self.slots:
                if slot.host.rack == 0:
                    at(middle, self._stop, slot, True)
        if "herd" in options.scenarios:
            for slot in self.slots[: options.prefill]:
                at(middle, self._stop, slot, False)
            at(middle + options.restart + 1.0, self._flood)
        if "stale" in options.scenarios:
            for slot in self.slots[: max(options.prefill // 8, 1)]:
                at(middle, self._stop, slot, False)
        if "partition" in options.scenarios:
            racks = range(0, len(self._uplinks), 2)
            at(middle, self._split, frozenset(racks))
            at(middle + self.network.detection / 2, self._split, frozenset())

    def _fail_one(self) -> None:
        """Let an engine fail that has requests, so that they meet it; either kind as often."""
        is_prefill = self._drawn.random() < 0.5
        live = [s for s in self.slots if s.is_prefill is is_prefill and s.engine is not None]
        busy = [s for s in live if s.engine is not None and (s.engine.jobs or s.engine.held)]
        if live:
            self._stop(self._drawn.choice(busy or live), self._drawn.random() < 1 / 3)

    def _flood(self) -> None:
        """Let short prompts that have waited for prefill come at once, one for each of decode.

        Prefill warms up for a moment: its handshake servers accept connections and do not answer.
        """
        for slot in self.slots[: self.options.prefill]:
            slot.server.stall(2.0)
        for number in range(self.options.decode):
            block = 2**31 + number  # of no trace
            self._begin(TracedRequest(self.events.now, BLOCK_TOKENS // 8, 1, (block,)))

    def _split(self, racks: frozenset[int]) -> None:
        self.counts.events["partitions" if racks else "partitions healed"] += 1
        self.network.split = racks
        self.network.changed()

    # ---- the run

    def _look(self) -> None:
        """Once a second: note the fleet's state, and audit some engines."""
        now = self.events.now
        self.counts.samples.append(
            Sample(
                now, len(self._open), self.num_held, self.num_held_blocks, self.network.num_peers
            )
        )
        for slot in self.slots:
            if slot.engine is not None:
                slot.engine.check_starved()
        count = max(len(self.slots) // 64, 1)
        for _ in range(count):
            engine = self.slots[self._audited % len(self.slots)].engine
            self._audited += 1
            if engine is not None:
                self.counts.audits += 1
                audit(engine)
        if self._progress is not None:
            self._progress(self)
        self.events.after(1.0, self._look)

    def run(self) -> Counts:
        """Run the trace to its end, and until every lease is over.

        Raises
        ------
        Violation
            If an invariant does not hold.
        """
        options = self.options
        gc.collect()
        gc.freeze()  # there are millions of objects that live as long as the fleet
        logging.disable(logging.ERROR)  # failures are what this is about
        try:
            self._arrive()
            self._plan_failures()
            self._look()
            self.events.run(options.duration)
            until = options.duration
            while self._open and until < options.duration + 600:
                until += 5.0
                self.events.run(until)
            if self._open:
                raise Violation("no end", f"requests {sorted(self._open)[:8]} have no end")
            self.events.run(until + self.held_bound + 5.0)
            self._check_end()
        finally:
            logging.disable(logging.NOTSET)
            gc.unfreeze()
        return self.counts

    def _check_end(self) -> None:
        """Raise unless all blocks are free and all leases over."""
        for slot in self.slots:
            engine = slot.engine
            if engine is None:
                continue
            audit(engine)
            if engine.held or engine.jobs or engine.pool.num_free < engine.pool.num_blocks:
                raise Violation(
                    "held for ever",
                    f"{engine.id} has {len(engine.held)} requests held, {len(engine.jobs)} others "
                    f"and {engine.pool.num_blocks - engine.pool.num_free} blocks in use",
                )

    def close(self) -> None:
        """End all engines."""
        for slot in self.slots:
            if slot.engine is not None:
                slot.engine.close()
