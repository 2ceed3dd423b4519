"""Digests in the connector: wrong bytes end as corrupt, by name, and right ones never do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from toy_engine import Model
from toy_world import World

from pynixlkv.connector import messages, verification
from pynixlkv.connector import worker as worker_module
from pynixlkv.connector.metadata import ConnectorConfig, EndState, Lease
from pynixlkv.connector.stats import StatsSnapshot
from pynixlkv.errors import KVCorruptError, LeaseExpired, PlanError, TransferTimeout
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.testing import FakeAgent

MODES = pytest.mark.parametrize("mode", ["pull", "push"])
# Ranks (pipeline, tensor-parallel), axes, tokens per block; of the producer first.
PAIRS = [
    ((1, 1), (1, 1), "KBHND", "KBHND", 4, 4),
    ((1, 2), (1, 1), "KBNHD", "BKHND", 4, 8),
    ((1, 1), (1, 2), "BKHND", "KBNHD", 8, 4),
    ((2, 1), (1, 4), "KBHND", "KBHND", 4, 12),
    ((1, 4), (2, 2), "BKNHD", "KBNHD", 12, 8),
    ((1, 2), (1, 1), "BND", "BND", 4, 8),  # a latent that all ranks hold
]
NUM_TOKENS = 27
EXPIRED = [EndState.EXPIRED]


@pytest.fixture(autouse=True)
def all_on_other_threads(monkeypatch):
    """Compute short digests where long ones are, as other tests do not."""
    monkeypatch.setattr(worker_module, "_SHORT_BYTES", -1)


def make(world, pair):
    (pp, tp), (their_pp, their_tp), axes, their_axes, size, their_size = pair
    model = Model(kv_heads=None) if axes == "BND" else Model()
    producer = world.engine("P", model, pp=pp, tp=tp, axes=axes, block_size=size)
    return producer, world.engine(
        "D", model, pp=their_pp, tp=their_tp, axes=their_axes, block_size=their_size
    )


def fetch(world, producer, consumer, number=1, num_tokens=NUM_TOKENS, num_computed=0):
    params = producer.prefill(f"p{number}", number, num_tokens)
    consumer.arrive(f"d{number}", number, num_tokens, params)
    consumer.schedule(f"d{number}", num_computed)


def ended(world, *numbers):
    outcome = world.outcomes["D"]
    return lambda: all(f"d{n}" in outcome.received or f"d{n}" in outcome.failed for n in numbers)


def freed(world, *numbers):
    return lambda: all(f"p{n}" in world.outcomes["P"].sent for n in numbers)


def errors(world, number=1):
    return [end.error for end in world.outcomes["D"].failed[f"d{number}"] if end.error is not None]


def spoil(monkeypatch, action):
    """Call a function with each verification when the bytes have arrived."""
    begin = verification.Verification.begin

    def spoiled(self):
        action(self)
        begin(self)

    monkeypatch.setattr(verification.Verification, "begin", spoiled)


def flip(engine, *, token=0, layer=None, kind=0, head=None, rank=0):
    """Return a function that flips one bit of d1 when it has arrived at one rank."""
    here = engine.ranks[rank]

    def act(verification):
        if verification._ctx.stats is not here.worker.stats or verification._request_id != "d1":
            return
        view = here._by_block(here.tensors[f"layer.{here.layers[0] if layer is None else layer}"])
        block = engine.requests["d1"].blocks[token // here.block_size]
        at = 0 if head is None else head - here.heads[0]
        view[block, kind, at, token % here.block_size, 3] ^= 1

    return act


def total(engine):
    return sum((rank.worker.stats.snapshot() for rank in engine.ranks), StatsSnapshot())


@MODES
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}to{pair[1]}-{pair[4:]}")
@pytest.mark.parametrize("amount", ["off", "sampled", "all"])
def test_right_bytes_are_received_between_unlike_caches(mode, pair, amount):
    with World(mode, checksums=amount) as world:
        producer, consumer = make(world, pair)
        for number, num_tokens in enumerate([NUM_TOKENS, 1, 8]):
            fetch(world, producer, consumer, number, num_tokens)
        world.until(ended(world, 0, 1, 2))
        assert world.outcomes["D"].received == {"d0", "d1", "d2"}
        assert all(consumer.holds(f"d{number}") for number in range(3))
        world.until(freed(world, 0, 1, 2))
        for engine in (producer, consumer):
            seen = total(engine)
            assert (seen.digest.count > 0) == (amount != "off")
            assert seen.events.get("errors", 0) == 0
        assert total(consumer).ends == {"received": 3 * len(consumer.ranks)}


@MODES
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}to{pair[1]}-{pair[4:]}")
def test_one_wrong_bit_ends_as_corrupt_and_harms_no_other_request(mode, pair, monkeypatch):
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, pair)
        last = len(consumer.ranks) - 1
        rank = consumer.ranks[last]
        layer, head = rank.layers[-1], rank.heads[-1]
        kind = "" if pair[2] == "BND" else "V"
        spoil(
            monkeypatch,
            flip(consumer, token=NUM_TOKENS - 1, layer=layer, kind=-1, head=head, rank=last),
        )
        for number in (1, 2):
            fetch(world, producer, consumer, number)
        world.until(ended(world, 1, 2))
        assert world.outcomes["D"].received == {"d2"}
        assert consumer.holds("d2")
        (end,) = [end for end in world.outcomes["D"].failed["d1"] if end != "received"]
        assert end.state is EndState.CORRUPT
        assert end.blocks == (tuple(consumer.requests["d1"].blocks),)
        (wrong,) = end.error.mismatches
        assert isinstance(end.error, KVCorruptError)
        assert (wrong.layer, wrong.kv, wrong.head) == (layer, kind, head)
        assert NUM_TOKENS - 1 in wrong.tokens
        assert len(wrong.tokens) <= max(pair[4:])
        assert wrong.here != wrong.there
        assert end.error.peer in {r.agent.name for r in producer.ranks}
        for fact in ("request 'd1'", end.error.peer, f"{wrong.here:x}", f"{wrong.there:x}"):
            assert fact in str(end.error)
        assert total(consumer).ends["corrupt"] == 1
        world.until(freed(world, 1, 2))
        world.quiet()
        assert producer.scheduler.num_free_leases == world.config.max_leases


@MODES
@pytest.mark.parametrize("axis", ["block", "kv", "head", "token", "layer"])
def test_right_bytes_in_wrong_places_are_corrupt(mode, axis, monkeypatch):
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        fetch(world, producer, consumer)

        def move(_):
            tensors = list(consumer.ranks[0].tensors.values())
            if axis == "layer":
                tensors[0][...], tensors[1][...] = tensors[1].copy(), tensors[0].copy()
            for tensor in tensors:
                view = consumer.ranks[0]._by_block(tensor)
                if axis in ("block", "kv", "head", "token"):
                    view[...] = np.roll(view, 1, ["block", "kv", "head", "token"].index(axis))

        spoil(monkeypatch, move)
        world.until(ended(world, 1))
        assert world.end_of("D", "d1") == [EndState.CORRUPT]


@MODES
def test_bytes_of_other_blocks_are_corrupt(mode):
    """What moves the bytes takes them from, or puts them into, the wrong order of blocks."""
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        engine, verb = (consumer, "read") if mode == "pull" else (producer, "write")
        agent = engine.ranks[0].agent
        move = getattr(agent, verb)

        def misdirected(peer, plan, local, remote, **options):
            if isinstance(local, dict):  # not lease words
                local = {name: table[::-1] for name, table in local.items()}
            return move(peer, plan, local, remote, **options)

        setattr(agent, verb, misdirected)
        fetch(world, producer, consumer, num_tokens=12)
        world.until(ended(world, 1))
        assert world.end_of("D", "d1") == [EndState.CORRUPT]


@MODES
def test_blocks_that_change_under_the_lease_are_corrupt(mode, monkeypatch):
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        fetch(world, producer, consumer)
        answer = verification.answer

        def late(ctx, meta, scopes):
            while not consumer.holds("d1"):  # the bytes are to arrive first
                threading.Event().wait(0.001)
            producer.ranks[0].write(99, meta.blocks[0], range(4))
            return answer(ctx, meta, scopes)

        monkeypatch.setattr(verification, "answer", late)
        world.until(ended(world, 1))
        assert world.end_of("D", "d1") == [EndState.CORRUPT]


class Held:
    """Keeps the producer's thread for digests from its work until it is told to go on."""

    def __init__(self, monkeypatch):
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self.answer = verification.answer
        monkeypatch.setattr(verification, "answer", self)

    def __call__(self, *args):
        self.has_begun.set()
        assert self.go_on.wait(60.0)
        return self.answer(*args)


@MODES
def test_a_lease_that_ends_waits_for_digests_of_its_blocks(mode, monkeypatch):
    """So they are not those of other requests: the end is expired or received, never corrupt."""
    with World(mode, checksums="all", transfer_timeout=1e6, missed_heartbeats=10**6) as world:
        producer, consumer = make(world, PAIRS[0])
        held = Held(monkeypatch)
        fetch(world, producer, consumer)
        world.until(held.has_begun.is_set)
        world.clock.now += world.config.lease_duration
        for _ in range(10):
            world.step("P")
        assert not world.outcomes["P"].sent
        held.go_on.set()
        world.until(ended(world, 1))
        failed = world.outcomes["D"].failed
        assert consumer.holds("d1") if not failed else world.end_of("D", "d1") == EXPIRED
        world.until(freed(world, 1))


@MODES
def test_blocks_reused_before_their_digests_are_wanted_are_expired_not_corrupt(mode):
    with World(mode, checksums="all", transfer_timeout=1e6, missed_heartbeats=10**6) as world:
        producer, consumer = make(world, PAIRS[0])
        worker = producer.ranks[0].worker
        wanted = []
        worker._sender.on_digest_request = lambda *args: wanted.append(args)
        fetch(world, producer, consumer)
        world.until(lambda: wanted and not world._is_active(0.005))
        world.clock.now += world.config.lease_duration
        while not world.outcomes["P"].sent:
            world.step("P")
        producer.ranks[0].poison(range(16))
        del worker._sender.on_digest_request
        worker._sender.on_digest_request(*wanted[0][:2], world.clock.now)
        world.until(ended(world, 1))
        assert world.end_of("D", "d1") == EXPIRED
        assert isinstance(errors(world)[0], LeaseExpired)


@MODES
def test_a_producer_without_an_answer_is_waited_for_until_the_deadline(mode):
    with World(mode, checksums="sampled", missed_heartbeats=10**6) as world:
        producer, consumer = make(world, PAIRS[0])
        producer.ranks[0].worker._sender.on_digest_request = lambda *_: None
        inbox = world.listen("P")
        fetch(world, producer, consumer)
        world.until(lambda: inbox.of(messages.DigestRequest))
        world.pass_time(world.config.transfer_timeout, 6)
        world.until(ended(world, 1))
        (error,) = errors(world)
        assert isinstance(error, TransferTimeout)
        assert "verifying" in str(error)
        assert len(inbox.of(messages.DigestRequest)) > 1  # it was asked again
        world.until(freed(world, 1))


@MODES
def test_a_lost_answer_is_asked_for_again(mode):
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        fetch(world, producer, consumer, 2)
        world.until(ended(world, 2))
        worker = consumer.ranks[0].worker
        lost = []
        worker._receiver.on_digests = lambda *answer: lost.append(answer)
        fetch(world, producer, consumer, 1)
        world.until(lambda: lost)
        del worker._receiver.on_digests
        world.pass_time(world.config.heartbeat_period(world.config.lease_duration), 2)
        world.until(ended(world, 1))
        assert "d1" in world.outcomes["D"].received


def test_each_request_draws_its_own_sample():
    seen = []
    with World(checksums="sampled", checksum_fraction=0.5) as world:
        producer, consumer = make(world, PAIRS[0])
        inbox = world.listen("P")
        for number in range(20):
            fetch(world, producer, consumer, number, 32)
            world.until(ended(world, number))
            consumer.finish(f"d{number}")
            world.until(freed(world, number))
        for message in inbox.of(messages.DigestRequest):
            (scope,) = message.scopes
            assert len(scope.units) == 4
            seen.append(scope.units)
    assert len(set(seen)) > 5, "the choice can be guessed"


@MODES
def test_many_digests_become_fewer_of_larger_units(mode, monkeypatch):
    monkeypatch.setattr(messages, "MAX_DIGESTS", 64)
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        inbox = world.listen("P")
        spoil(monkeypatch, flip(consumer, token=17))
        for number in (1, 2):
            fetch(world, producer, consumer, number)
        world.until(ended(world, 1, 2))
        assert world.outcomes["D"].received == {"d2"}
        assert world.end_of("D", "d1") == [EndState.CORRUPT]
        (wrong,) = errors(world)[0].mismatches
        assert 17 in wrong.tokens
        for message in inbox.of(messages.DigestRequest):
            assert sum(int(np.prod(scope.shape)) for scope in message.scopes) <= 64


def test_digests_that_are_asked_for_twice_are_computed_once():
    with World(checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        inbox, answers = world.listen("P"), world.listen("D")
        fetch(world, producer, consumer)
        world.until(ended(world, 1))
        lease = Lease.parse(producer.prefill("p2", 1, NUM_TOKENS)["lease"])
        world.quiet()
        again = msgspec.structs.replace(
            inbox.of(messages.DigestRequest)[0],
            digest_id=5,
            reader=messages.Reader("p2", lease, 9),
        )
        for _ in range(2):
            assert world.count("P", "duplicate_notifications") == 0
            world.deliver("P", consumer.ranks[0].agent.name, again)
        assert world.count("P", "duplicate_notifications") == 1
        world.quiet()
        assert [m.digest_id for m in answers.of(messages.Digests)].count(5) == 1


def test_a_short_request_is_compared_in_the_blocks_of_each_group():
    blocks = {"small": 4, "large": 32}
    cache = KVCache.combine(
        *(
            KVCache.from_tensors(
                {name: np.zeros((16, 2, 2, tokens, 8), np.uint16)},
                axes="BKHND", kv_heads=2, group=name, kind=name, table=str(index), layers=[index],
            )
            for index, (name, tokens) in enumerate(blocks.items())
        )
    )  # fmt: skip
    plan = TransferPlan(cache.geometry, cache.geometry)
    tables = {name: np.arange(64 // tokens) for name, tokens in blocks.items()}
    context = SimpleNamespace(
        config=ConnectorConfig(checksums="all"),
        cache=cache.geometry,
        local_tables=lambda _: (tables, dict.fromkeys(tables, 0)),
    )
    source = Mock(plans=(plan,), geometry=cache.geometry)
    check = verification.Verification(context, "d1", SimpleNamespace(num_tokens=64), [source])
    assert {scope.group: scope.unit for scope in check.scopes[source]} == blocks


def test_forged_messages_about_digests_do_no_harm():
    with World(checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        inbox, answers = world.listen("P"), world.listen("D")
        fetch(world, producer, consumer)
        world.until(ended(world, 1))
        name = consumer.ranks[0].agent.name
        params = producer.prefill("p2", 2, 8)
        world.quiet()
        message = inbox.of(messages.DigestRequest)[0]
        scope = message.scopes[0]
        held = {"digest_id": 5, "reader": messages.Reader("p2", Lease.parse(params["lease"]), 9)}
        huge = msgspec.structs.replace(
            scope, tokens=(0, 2**40), unit=1, units=tuple(range(messages.MAX_DIGESTS // 8))
        )
        for scopes in (
            (scope,),  # more tokens than p2 has
            (huge,) * 2,
            (msgspec.structs.replace(scope, layers=(0, 77)),),
            (msgspec.structs.replace(scope, group="none"),),
        ):
            world.deliver("P", name, msgspec.structs.replace(message, scopes=scopes, **held))
            world.until(lambda: not producer.ranks[0].worker._sender._digesting)
        world.quiet()
        assert len([a for a in answers.of(messages.Digests) if a.error]) == 4
        with FakeAgent("stranger", world.network):
            for engine_id in "PD":
                world.deliver(engine_id, "stranger", message)
                world.deliver(engine_id, "stranger", messages.Digests(5, [b""]))
        assert world.count("D", "errors") == world.count("P", "errors") == 0
        consumer.arrive("d2", 2, 8, params)
        consumer.schedule("d2")
        world.until(ended(world, 2))
        assert "d2" in world.outcomes["D"].received


def test_an_answer_that_does_not_fit_the_question_fails_the_request(monkeypatch):
    monkeypatch.setattr(verification, "answer", lambda *_: [b"12345678"])
    with World(checksums="all") as world:
        producer, consumer = make(world, PAIRS[0])
        fetch(world, producer, consumer)
        world.until(ended(world, 1))
        assert world.end_of("D", "d1") == [EndState.FAILED]
        assert isinstance(errors(world)[0], PlanError)


@MODES
def test_a_prefix_that_is_here_already_is_not_compared(mode):
    with World(mode, checksums="all") as world:
        producer, consumer = make(world, PAIRS[1])
        fetch(world, producer, consumer, num_computed=8)
        world.until(ended(world, 1))
        assert "d1" in world.outcomes["D"].received
