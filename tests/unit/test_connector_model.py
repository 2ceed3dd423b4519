"""Random interleavings of everything that engines, peers, networks and clocks can do.

Freed blocks are poisoned at once and reused first. After every step: free blocks are still
poisoned, so they were not written; received requests are right in every element, and stay so; no
request ends twice. In the end, after all faults and some time, every request has ended and every
held block is free.

The agents move bytes on threads of their own, so that one sequence of rules has many courses. What
is drawn does not depend on them: rules that find nothing to do do nothing.
"""

from __future__ import annotations

import logging
import math

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from spoiled import SpoiledVerification
from toy_engine import POISON, Model, ToyEngine
from toy_pair import early_params
from toy_world import FakeEvent, World

from pynixlkv.connector import messages, receiver
from pynixlkv.connector.messages import ConsumerRank
from pynixlkv.connector.metadata import EndState, Lease, ParallelSizes
from pynixlkv.testing import FakeAgent

MODEL = Model(layers=2, kv_heads=2, dim=2)
NUM_BLOCKS = 12
LEASE_S, BEAT_S, TIMEOUT_S = 30.0, 5.0, 20.0
TURN_S, TURN_BLOCKS = 60.0, 7  # how long, and how many blocks of, finished turns are held
GAP_S = 2.0  # all longer ones are pauses of an engine's process
FAULTY = st.sampled_from(["P", "D"])
RANK = st.integers(0, 1)
PICK = st.integers(0, 1 << 16)
NUMBERS = st.sampled_from([(1, 0), (1, 1), (1, 2), (1, 4), (2, 1), (3, 0), (2, 3)])
"""Samples that a producer computes, and readers that a router announces."""


class PoisoningEngine(ToyEngine):
    """Overwrites blocks when they are freed, and hands the last freed ones out first."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.late = []  # what the device does before its event is done

    def allocate(self, num_tokens, num_there=0):
        count = max(-(-num_tokens // self.block_size) - num_there, 0)
        assert count <= len(self.free)
        return [self.free.pop() for _ in range(count)]

    def fits(self, num_tokens):
        return -(-num_tokens // self.block_size) <= len(self.free)

    def poison(self, blocks):
        for rank in self.ranks:
            rank.poison(blocks)

    def _drop(self, request_id):
        assert not any(request_id == late for late, _ in self.late), "freed while it is computed"
        self.poison(self.requests[request_id].blocks)
        super()._drop(request_id)

    def preempt(self, request_id):
        blocks = super().preempt(request_id)
        self.poison(blocks)
        return blocks

    def finish_late_work(self):
        for _, work in self.late:
            work()
        self.late = []
        if self.event is not None:
            self.event.is_done = True
        self.event = None


class PoisoningWorld(World):
    engine_class = PoisoningEngine


class KitMachine(RuleBasedStateMachine):
    """One producer, one consumer, and what can happen to them.

    The consumer hands finished turns over to the producer, which fetches them for the next ones.
    """

    def __init__(self):
        super().__init__()
        self.world = None

    @initialize(
        mode=st.sampled_from(["pull", "push"]),
        tp=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        block_sizes=st.sampled_from([(4, 4), (4, 8), (8, 4)]),
        longest_gap=st.sampled_from([math.inf, GAP_S]),
        checksums=st.sampled_from(["all", "all", "sampled", "off"]),
        num_spoiled=st.integers(0, 2),
    )
    def begin_world(self, mode, tp, block_sizes, longest_gap, checksums, num_spoiled):
        SpoiledVerification.count = num_spoiled
        self.mode, self.longest_gap = mode, longest_gap
        self.world = PoisoningWorld(
            mode,
            lease_duration=LEASE_S,
            heartbeat_interval=BEAT_S,
            transfer_timeout=TIMEOUT_S,
            max_leases=8,
            peer_ttl=300.0,
            checksums=checksums,
            conversation_blocks=TURN_BLOCKS,
            conversation_seconds=TURN_S,
            recompute_threshold=1,
        )
        self.options = {
            "P": {"tp": tp[0], "block_size": block_sizes[0], "axes": "KBHND"},
            "D": {"tp": tp[1], "block_size": block_sizes[1], "axes": "BKNHD"},
        }
        self.alias = {"P": "P", "D": "D"}  # the present engine id of each
        self.life = 0
        self.number = 0
        self.offers = []  # (prompt, num_tokens, params)
        self.samples = []  # of prompts, that are not computed yet
        self.turns = []  # (prompt, num_tokens, params), from the consumer
        self.queued = {"P": [], "D": []}
        self.open = {"P": set(), "D": set()}
        self.here = {"P": [], "D": []}
        self.chunked = []  # prompts of the producer that are not computed to their end
        self.pauses = set()
        for role in "PD":
            self.begin_engine(role)

    def begin_engine(self, role):
        self.world.engine(
            self.alias[role],
            MODEL,
            num_blocks=NUM_BLOCKS,
            longest_gap=self.longest_gap,
            **self.options[role],
        )

    @property
    def p(self):
        return self.world.engines[self.alias["P"]]

    @property
    def d(self):
        return self.world.engines[self.alias["D"]]

    def new_number(self):
        self.number += 1
        return self.number

    def agent_of(self, role, rank):
        ranks = self.world.engines[self.alias[role]].ranks
        return ranks[rank % len(ranks)].agent.name

    # ---- producer

    @rule(
        num_tokens=st.integers(1, 17),
        is_late=st.booleans(),
        num_readers=st.sampled_from([1, 1, 1, 0, 2, 3]),
        num_samples=st.integers(1, 3),
    )
    def prefill(self, num_tokens, is_late, num_readers, num_samples):
        if not self.p.fits(num_tokens) or self.p.scheduler.num_free_leases == 0:
            return
        number = self.new_number()
        told = {"sibling_group": f"g{number}", "num_readers": num_readers}
        params = self.p.prefill(f"p{number}", number, num_tokens, **told)
        assert params is not None
        self.offers.append((number, num_tokens, params))
        self.samples += [(number, num_tokens, told)] * (num_samples - 1)
        if is_late:
            request = self.p.requests[f"p{number}"]
            self.p.poison(request.blocks)
            self.p.event = self.p.event or FakeEvent()
            blocks, ranks = list(request.blocks), self.p.ranks

            def compute():
                for rank in ranks:
                    rank.write(number, blocks, range(num_tokens))

            self.p.late.append((f"p{number}", compute))

    @rule()
    def prefill_sample(self):
        """Another sample of a prompt, whose first one may still be held."""
        if self.samples and self.p.fits(self.samples[0][1]) and self.p.scheduler.num_free_leases:
            prompt, num_tokens, told = self.samples.pop(0)
            params = self.p.prefill(f"p{self.new_number()}", prompt, num_tokens, **told)
            self.offers.append((prompt, num_tokens, params))

    @rule()
    def finish_late_work(self):
        for engine in (self.p, self.d):
            engine.finish_late_work()

    @precondition(lambda self: self.mode == "push")
    @rule(num_tokens=st.integers(1, 17))
    def begin_in_chunks(self, num_tokens):
        number = self.new_number()
        self.p.begin(f"p{number}", number, num_tokens)
        self.chunked.append((number, num_tokens))
        self.offers.append((number, num_tokens, early_params(self.p, f"p{number}")))

    @rule(pick=PICK, what=st.sampled_from(["compute", "compute", "compute", "preempt", "give up"]))
    def go_on_in_chunks(self, pick, what):
        if not self.chunked:
            return
        number, num_tokens = self.chunked[pick % len(self.chunked)]
        request = self.p.requests[f"p{number}"]
        if self.p.event is not None:
            return  # a step that is pushed layer by layer is not late
        if what == "preempt":
            self.p.preempt(f"p{number}")
            return
        if what == "compute" and request.num_computed < num_tokens:
            until = min(request.num_computed + 5, num_tokens)
            needed = -(-until // self.p.block_size) - len(request.blocks)
            if needed <= len(self.p.free):
                self.p.compute(f"p{number}", until)
                self.look("P")
            return
        self.look("P")
        self.p.hand_over(f"p{number}", is_complete=what == "compute")
        self.chunked.remove((number, num_tokens))

    # ---- consumer

    @rule(pick=PICK, is_kept=st.booleans())
    def arrive(self, pick, is_kept):
        if not self.offers:
            return
        index = pick % len(self.offers)
        prompt, num_tokens, params = self.offers[index]
        if not is_kept:  # else another request comes with the same hand-off
            del self.offers[index]
        request_id = f"d{self.new_number()}"
        self.d.arrive(request_id, prompt, num_tokens, params)
        self.queued["D"].append(request_id)

    @rule(pick=PICK, num_new=st.integers(0, 5), is_kept=st.booleans(), is_other=st.booleans())
    def next_turn(self, pick, num_new, is_kept, is_other):
        if not self.turns:
            return
        index = pick % len(self.turns)
        prompt, num_tokens, params = self.turns[index]
        if not is_kept:
            del self.turns[index]
        number = self.new_number()
        if is_other and num_new == 0:
            prompt = number
        self.p.arrive(f"p{number}", prompt, num_tokens + num_new, params)
        self.queued["P"].append(f"p{number}")

    @rule(pick=PICK, role=FAULTY, prefix=st.integers(0, 5), is_busy=st.booleans())
    def schedule(self, pick, prefix, is_busy, role="D"):
        queued, engine = self.queued[role], self.world.engines[self.alias[role]]
        if not queued:
            return
        request_id = queued[pick % len(queued)]
        request = engine.requests[request_id]
        num_tokens = request.info.num_prompt_tokens
        if not engine.fits(num_tokens):
            return
        queued.remove(request_id)
        computed = min(prefix * engine.block_size, num_tokens) if prefix < 4 else 0
        if engine.schedule(request_id, computed) == 0:
            self.here[role].append(request_id)
            return
        self.open[role].add(request_id)
        if is_busy and computed == 0:
            # A step that is still running writes into the blocks.
            engine.event = engine.event or FakeEvent()
            blocks = list(request.blocks)
            engine.late.append((request_id, lambda: engine.poison(blocks)))

    @rule(pick=PICK, role=FAULTY)
    def reject(self, pick, role):
        if self.queued[role]:
            self.world.engines[self.alias[role]].finish(
                self.queued[role].pop(pick % len(self.queued[role]))
            )

    @rule(pick=PICK, role=FAULTY)
    def abort(self, pick, role):
        if not self.open[role]:
            return
        engine = self.world.engines[self.alias[role]]
        request_id = sorted(self.open[role])[pick % len(self.open[role])]
        if any(request_id == late for late, _ in engine.late):
            return  # an engine frees no blocks that a step of it still writes
        self.open[role].remove(request_id)
        engine.finish(request_id)

    @rule(pick=PICK, num_new=st.integers(0, 5), is_complete=st.booleans())
    def finish(self, pick, num_new, is_complete):
        """End an answer; one that is complete may have a next turn."""
        if not self.here["D"]:
            return
        request_id = self.here["D"].pop(pick % len(self.here["D"]))
        assert self.d.holds(request_id), "a received request has changed"
        request = self.d.requests[request_id]
        until = request.info.num_prompt_tokens + num_new
        needed = -(-until // self.d.block_size) - len(request.blocks)
        if not is_complete or needed > len(self.d.free) or not self.d.scheduler.num_free_leases:
            self.d.finish(request_id)
            return
        self.d.go_on(request_id, until)
        params = self.d.hand_over(request_id)
        if params is not None:
            self.turns.append((request.prompt, params["remote_num_tokens"], params))

    @rule(pick=PICK, is_complete=st.booleans())
    def hand_turn_over(self, pick, is_complete):
        """Compute the rest of a next turn's prompt."""
        if not self.here["P"]:
            return
        request_id = self.here["P"].pop(pick % len(self.here["P"]))
        assert self.p.holds(request_id), "a received turn has changed"
        request = self.p.requests[request_id]
        num_tokens = request.info.num_prompt_tokens
        if not is_complete or not self.p.scheduler.num_free_leases:
            self.p.finish(request_id)
            return
        self.p.go_on(request_id, num_tokens)
        self.offers.append((request.prompt, num_tokens, self.p.hand_over(request_id)))

    @rule(
        num_tokens=st.integers(1, 17),
        prefix=st.integers(0, 8),
        wait=st.sampled_from([0.0, 0.0, 0.0, 31.0]),
        rounds=st.lists(st.integers(0, 4), min_size=3, max_size=3),
        is_late=st.booleans(),
    )
    def go(self, num_tokens, prefix, wait, rounds, is_late):
        """The usual way of a request, fast or slowly."""
        self.prefill(num_tokens, is_late=is_late, num_readers=1, num_samples=1)
        self.settle(rounds[0])
        self.world.clock.now += wait
        self.look("P")
        self.arrive(-1 % max(len(self.offers), 1), is_kept=False)
        self.settle(rounds[1])
        self.schedule(-1 % max(len(self.queued), 1), prefix, is_busy=False)
        self.settle(rounds[2])
        self.finish_late_work()

    @rule(
        num_tokens=st.integers(4, 9),
        wait=st.sampled_from([0.0, 0.0, 31.0, 61.0]),
        rounds=st.lists(st.integers(2, 4), min_size=3, max_size=3),
        num_new=st.integers(1, 3),
        is_kept=st.booleans(),
    )
    def talk(self, num_tokens, wait, rounds, num_new, is_kept):
        """The usual way of a conversation."""
        self.go(num_tokens, 0, 0.0, rounds, is_late=False)
        self.finish(-1 % max(len(self.here["D"]), 1), num_new, is_complete=True)
        self.settle(rounds[0])
        self.world.clock.now += wait
        self.next_turn(-1 % max(len(self.turns), 1), num_new, is_kept, is_other=False)
        self.settle(rounds[1])
        self.schedule(-1 % max(len(self.queued["P"]), 1), 0, is_busy=False, role="P")
        self.settle(rounds[2])
        self.hand_turn_over(-1 % max(len(self.here["P"]), 1), is_complete=True)

    # ---- steps and time

    @rule(role=FAULTY)
    def step(self, role):
        self.look(role)

    def look(self, role):
        """Make a step, and check what it reports."""
        engine = self.world.engines[self.alias[role]]
        before = set(engine.requests)
        new = self.world.step(engine.id)
        assert new.sent <= before
        for request_id in new.received:
            assert request_id in self.open[role] or request_id not in self.here[role]
            if request_id in self.open[role]:
                assert engine.holds(request_id), "wrong bytes are reported as received"
                self.open[role].remove(request_id)
                self.here[role].append(request_id)
            else:  # it was aborted too late
                engine._drop(request_id)
        for request_id in new.failed:
            engine.late = [item for item in engine.late if item[0] != request_id]
            if request_id not in self.open[role]:
                engine._drop(request_id)
                continue
            self.open[role].remove(request_id)
            if role == "D":
                engine.finish(request_id)
            else:  # the turn is computed again
                engine.requests[request_id].until = 0
                self.here[role].append(request_id)

    @rule(rounds=st.integers(1, 6))
    def settle(self, rounds):
        for _ in range(rounds):
            for role in "DP":
                self.look(role)
            self.world._is_active(0.001)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 5.0, 11.0, 21.0, 31.0]))
    def pass_time(self, seconds):
        self.world.clock.now += seconds

    # ---- faults

    @rule(role=FAULTY, rank=RANK, count=st.integers(1, 3))
    def lose(self, role, rank, count):
        self.world.network.drop_notifications(self.agent_of(role, rank), count)

    @rule()
    def spoil(self):
        SpoiledVerification.count += 1

    @rule(role=FAULTY, rank=RANK)
    def pause(self, role, rank):
        name = self.agent_of(role, rank)
        self.pauses.add(name)
        self.world.network.pause(name)

    @rule(pick=PICK)
    def resume(self, pick):
        if not self.pauses:
            return
        name = sorted(self.pauses)[pick % len(self.pauses)]
        self.pauses.remove(name)
        self.world.network.resume(name)

    @rule(role=FAULTY, rank=RANK, seconds=st.sampled_from([0.0, 0.0005, 0.003]))
    def slow(self, role, rank, seconds):
        self.world.network.set_delay(self.agent_of(role, rank), seconds)

    @rule(role=FAULTY, rank=RANK)
    def fail(self, role, rank):
        self.world.network.fail_next(self.agent_of(role, rank))

    @rule(role=FAULTY, with_new_id=st.booleans())
    def kill(self, role, with_new_id):
        engine = self.world.engines[self.alias[role]]
        self.pauses -= {rank.agent.name for rank in engine.ranks}
        self.world.kill(engine.id)
        self.life += 1
        if with_new_id:
            self.alias[role] = f"{role}{self.life}"
        if role == "P":
            self.chunked.clear()
        for requests in (self.queued, self.open, self.here):
            requests[role].clear()
        self.begin_engine(role)

    @rule(pick=PICK, role=FAULTY, shift=st.sampled_from([0, 1, 2]))
    def meddle(self, pick, role, shift):
        """A stranger sends messages, some of them well-formed."""
        if not self.offers:
            return
        _, _, params = self.offers[pick % len(self.offers)]
        lease = Lease.parse(params["lease"]) if "lease" in params else Lease(0, 5)
        wrong = Lease(lease.slot, lease.token + shift + 1)
        reader = ConsumerRank("stranger", (0, 0), ParallelSizes(tp=1 + shift))
        request_id = params["remote_request_id"]
        with FakeAgent("stranger", self.world.network) as stranger:
            peer = stranger.connect(self.world.engines[self.alias[role]].hellos[0, 0])
            for message in (
                messages.Release(reader, [messages.Reader(request_id, wrong, shift)]),
                messages.Heartbeat([messages.Reader(request_id, each) for each in (wrong, lease)]),
                messages.HeartbeatAck([(request_id, lease, messages.LeaseStatus.ENDED)]),
                messages.PushDone(12345, False, ""),
                messages.CancelPush(12345),
                messages.Push(reader, 1, request_id, wrong, ((0,),), (0,), (), 1),
            ):
                stranger.notify(peer, messages.encode(message))

    # ---- invariants

    @invariant()
    def nothing_writes_into_free_blocks(self):
        for role in "PD" if self.world is not None else ():
            engine = self.world.engines[self.alias[role]]
            free, size = engine.free, engine.block_size
            for rank in engine.ranks:
                seen = rank.read(free, range(len(free) * size))
                assert (seen == POISON).all(), f"a free block of {engine.id} was written"

    def teardown(self):
        if self.world is None:
            return
        try:
            self.come_to_rest()
        finally:
            for engine_id in list(self.world.engines):
                self.world.close(engine_id)

    def come_to_rest(self):
        for role in "PD":
            for rank in self.world.engines[self.alias[role]].ranks:
                self.world.network.resume(rank.agent.name)
                self.world.network.set_delay(rank.agent.name, 0.0)
                self.world.network.drop_notifications(rank.agent.name, 0)
                self.world.network.fail_next(rank.agent.name, 0)
        self.finish_late_work()
        for number, _ in self.chunked:
            self.p.hand_over(f"p{number}", is_complete=False)
        for role, engine in (("P", self.p), ("D", self.d)):
            for request_id in self.queued[role]:  # they would be waited for
                engine.finish(request_id)
        step = min(BEAT_S, 0.75 * self.longest_gap)
        for _ in range(int((40 * BEAT_S + TURN_S) / step)):
            self.quiet()
            if not any(self.open.values()) and not self.held("P") and not self.held("D"):
                break
            self.world.clock.now += step
        self.quiet()
        self.nothing_writes_into_free_blocks()
        assert not any(self.open.values()), f"{self.open} have no end"
        for role, engine in (("P", self.p), ("D", self.d)):
            assert not self.held(role), f"{self.held(role)} are kept for ever"
            used = sum(len(engine.requests[request_id].blocks) for request_id in self.here[role])
            assert len(engine.free) == NUM_BLOCKS - used
            assert engine.scheduler.num_free_leases == 8
            assert engine.scheduler._num_turn_blocks == 0
            for request_id in self.here[role]:
                assert engine.holds(request_id), "a received request has changed"
            assert not engine._reports, "not all ranks have reported"
            for rank in engine.ranks:
                seen = rank.worker.stats.snapshot()
                assert seen.events.get("errors", 0) == 0
                assert (seen.receiving, seen.lease_checks, seen.pushes) == (0, 0, 0)
            assert not engine.scheduler._receiving

    def held(self, role):
        """Requests whose blocks an engine keeps after their end."""
        return self.world.engines[self.alias[role]].requests.keys() - {*self.here[role]}

    def quiet(self):
        idle = 0
        for _ in range(200):
            for role in "DP":
                self.look(role)
            idle = 0 if self.world._is_active(0.001) else idle + 1
            if idle == 3:
                break


class LeaseMachine(RuleBasedStateMachine):
    """A lease and its readers, in two engines, against what the documentation says of its end.

    Nothing is lost but engines, and time passes by heartbeats, so that the end is known exactly.
    """

    @initialize(
        mode=st.sampled_from(["pull", "push"]),
        tp=st.sampled_from([1, 2]),
        numbers=NUMBERS,
    )
    def begin_world(self, mode, tp, numbers):
        self.world = PoisoningWorld(
            mode, lease_duration=LEASE_S, heartbeat_interval=BEAT_S, transfer_timeout=1e6
        )
        self.number, self.is_alive, self.readers = 0, False, {}
        self.world.engine("P", MODEL, tp=2, num_blocks=NUM_BLOCKS, axes="KBHND")
        self.options = {"D": {"tp": tp, "axes": "BKNHD"}, "E": {"tp": 3 - tp, "block_size": 8}}
        for role in "DE":
            self.begin_engine(role)
        self.begin_lease(numbers)

    def begin_engine(self, role):
        engine = self.world.engine(role, MODEL, num_blocks=64, **self.options[role])
        engine.arrive(f"{role}{self.number + 1}", 7, 4, self.hand_over(1, 1))
        engine.schedule(f"{role}{self.number}")
        self.world.until(lambda: f"p{self.number}" in self.world.outcomes["P"].sent)
        self.world.quiet()
        self.finish(role, f"{role}{self.number}")
        self.is_alive = False

    def finish(self, role, request_id):
        self.world.engines[role].finish(request_id)
        self.world.quiet()

    @property
    def now(self):
        return self.world.clock.now

    def hand_over(self, num_samples, num_readers):
        """A prompt of some samples; the router says how many readers there will be."""
        self.number += 1
        name, told, params = f"p{self.number}", {"num_readers": num_readers}, None
        self.readers, self.is_alive, self.ends_at = {}, True, self.now + LEASE_S
        self.expected = num_readers if num_samples == 1 else max(num_samples, num_readers)
        for sample in range(num_samples):
            told["sibling_group"] = name
            sample_name = f"{name}.{sample}" if sample else name
            offer = self.world.engines["P"].prefill(sample_name, 7, 4, **told)
            params = params or offer  # the first one knows least
            self.world.quiet()
        self.name = name
        return params

    @precondition(lambda self: not self.is_alive)
    @rule(numbers=NUMBERS)
    def begin_lease(self, numbers):
        self.params = self.hand_over(*numbers)

    # ---- readers: their deadline while they are attached, None when they are done

    @precondition(lambda self: self.is_alive)
    @rule(roles=st.lists(st.sampled_from("DE"), min_size=1, max_size=3))
    def attach(self, roles):
        for role in roles:
            self.number += 1
            request_id = f"{role}{self.number}"
            self.world.engines[role].arrive(request_id, 7, 4, self.params)
            self.world.quiet()
            self.readers[request_id] = self.ends_at = self.now + LEASE_S

    def attached(self, pick):
        """Choose a reader of a living engine."""
        names = [
            name
            for name, deadline in self.readers.items()
            if deadline is not None and name in self.world.engines[name[0]].requests
        ]
        return names[pick % len(names)] if names else None

    @precondition(lambda self: self.is_alive and self.attached(0))
    @rule(pick=PICK, what=st.sampled_from(["receive", "receive", "abort"]))
    def end_reader(self, pick, what):
        name = self.attached(pick)
        engine = self.world.engines[name[0]]
        if what == "receive":
            engine.schedule(name)
            self.world.until(lambda: name in self.world.outcomes[name[0]].received)
            assert engine.holds(name)
        self.finish(name[0], name)
        self.readers[name] = None
        left = [deadline for deadline in self.readers.values() if deadline is not None]
        if len(self.readers) < self.expected:
            return
        if left:
            self.ends_at = max(left)
        elif self.expected:
            self.ends_at = self.now
        else:
            self.ends_at = self.now + BEAT_S

    @precondition(lambda self: self.is_alive and self.attached(0))
    @rule(pick=PICK)
    def lose(self, pick):
        role = self.attached(pick)[0]
        self.world.kill(role)
        alive = (self.name, self.readers, self.ends_at, self.expected)
        self.begin_engine(role)
        self.name, self.readers, self.ends_at, self.expected = alive
        self.is_alive = True

    @precondition(lambda self: self.is_alive)
    @rule(beats=st.sampled_from([1, 1, 2, 6]))
    def pass_time(self, beats):
        for _ in range(beats):
            self.world.pass_time(BEAT_S)
            self.is_alive &= self.now < self.ends_at
            for name, deadline in self.readers.items():
                is_there = name in self.world.engines[name[0]].requests
                if deadline is not None and is_there and self.is_alive:
                    self.readers[name] = self.ends_at = self.now + LEASE_S

    @precondition(lambda self: not self.is_alive)
    @rule(role=st.sampled_from("DE"))
    def read_late(self, role):
        """A reader of a lease that has ended gets nothing."""
        self.number += 1
        name = f"{role}{self.number}"
        self.world.engines[role].arrive(name, 7, 4, self.params)
        self.world.engines[role].schedule(name)
        self.world.until(lambda: name in self.world.outcomes[role].failed)
        assert {end.state for end in self.world.outcomes[role].failed[name]} <= {EndState.EXPIRED}
        self.finish(role, name)

    @invariant()
    def the_lease_ends_when_it_should(self):
        self.world.quiet()
        self.is_alive &= self.now < self.ends_at
        assert (self.name in self.world.outcomes["P"].sent) is not self.is_alive
        assert self.world.leases("P") == [int(self.is_alive)] * 2
        free = self.world.engines["P"].free
        assert len(free) == NUM_BLOCKS - self.is_alive

    def teardown(self):
        for engine_id in list(self.world.engines):
            self.world.close(engine_id)


@pytest.fixture(autouse=True)
def no_log(caplog, monkeypatch):
    monkeypatch.setattr(receiver, "Verification", SpoiledVerification)
    caplog.set_level(logging.CRITICAL + 1, logger="pynixlkv")


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(
    max_examples=25,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestKit = KitMachine.TestCase
TestKit.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
