"""The connector between real processes, on both engines: every byte, and what faults leave behind.

A producer engine and a consumer engine have a process each; the ranks of an engine share it.
"""

from __future__ import annotations

import pytest
from toy_process import RemoteEngine

LAYERS, HEADS, DIM = 2, 4, 16
DENSE = {"layers": LAYERS, "kv_heads": HEADS, "dim": DIM}
LATENT = {"layers": LAYERS, "kv_heads": None, "dim": DIM}
PROMPTS = [1, 4, 13, 29]
# On a busy machine nothing is lost and nothing expires before the test says so.
PATIENT = {"missed_heartbeats": 10**6, "transfer_timeout": 1e6, "handshake_timeout": 60.0}
LEASE_S = 30.0

# Mode, model, tensor-parallel sizes, axes, block sizes; of the producer first. Each value of each
# column meets most of those of the others.
CASES = [
    ("pull", DENSE, (1, 1), ("KBHND", "KBHND"), (4, 4)),
    ("push", DENSE, (1, 1), ("KBNHD", "BKHND"), (8, 4)),
    ("pull", DENSE, (2, 1), ("BKNHD", "KBHND"), (4, 8)),
    ("push", DENSE, (2, 1), ("KBHND", "KBNHD"), (4, 4)),
    ("pull", DENSE, (1, 2), ("KBHND", "KBNHD"), (8, 4)),
    ("push", DENSE, (1, 2), ("BKNHD", "BKNHD"), (4, 8)),
    ("pull", DENSE, (2, 4), ("KBNHD", "KBNHD"), (4, 4)),
    ("push", DENSE, (2, 4), ("KBHND", "BKNHD"), (4, 8)),
    ("pull", DENSE, (4, 2), ("KBHND", "KBHND"), (8, 4)),
    ("push", DENSE, (4, 2), ("KBNHD", "KBHND"), (4, 4)),
    ("pull", LATENT, (2, 1), ("BND", "BND"), (4, 8)),
    ("push", LATENT, (1, 2), ("BND", "BND"), (4, 4)),
    ("push", LATENT, (4, 2), ("BND", "BND"), (8, 4)),
    ("pull", LATENT, (2, 4), ("BND", "BND"), (4, 4)),
]


class Engines:
    """A pair of processes that engines are made in."""

    def __init__(self, transport):
        self.transport = transport
        self.count = 0
        self.producer = self.consumer = None

    def make(
        self, mode, model, tp=(1, 1), axes=("KBHND", "KBHND"), sizes=(4, 4), blocks=64, **config
    ):
        self.count += 1
        config = {"transfer_mode": mode, **config}
        for i, side in enumerate(("producer", "consumer")):
            if getattr(self, side) is None:
                setattr(self, side, RemoteEngine())
            getattr(self, side).post(
                "make", self.transport, f"{side}-{self.count}", model, config,
                tp=tp[i], axes=axes[i], block_size=sizes[i], num_blocks=blocks,
            )  # fmt: skip
        for remote in (self.producer, self.consumer):
            remote.receive()
        return self.producer, self.consumer

    def kill(self, side):
        getattr(self, side).kill()
        setattr(self, side, None)

    def close(self):
        for remote in (self.producer, self.consumer):
            if remote is not None:
                assert remote.end() == 0


def pairs(*transports):
    """A fixture of engines over each transport; the processes are used by several tests."""

    @pytest.fixture(scope="module", params=transports)
    def made(request):
        engines = Engines(request.param)
        yield engines
        engines.close()

    return made


engines = pairs("nixl", "ucx")
# What stands still in the middle of a transfer shows best over sockets.
engines_on_tcp = pairs("nixl-tcp", "ucx-tcp")


def has(request_ids, word):
    return lambda ends: all(ends.get(request_id) == word for request_id in request_ids)


def ended(*request_ids):
    return lambda ends: ends.keys() >= set(request_ids)


def name_of(case):
    mode, model, tp, axes, sizes = case
    kind = "dense" if model is DENSE else "mla"
    return f"{mode}-{kind}-{tp[0]}to{tp[1]}-{axes[0]}to{axes[1]}-{sizes[0]}to{sizes[1]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_byte_arrives(engines, case):
    producer, consumer = engines.make(*case)
    for i, num_tokens in enumerate(PROMPTS):
        params = producer.prefill(f"p{i}", i, num_tokens)
        assert consumer.fetch(f"d{i}", i, num_tokens, params) == num_tokens
    # One whose beginning is there already, and one of which all is.
    block = case[-1][1]
    params = producer.prefill("p-prefix", 90, 29)
    assert consumer.fetch("d-prefix", 90, 29, params, 2 * block) == 29 - 2 * block
    params = producer.prefill("p-whole", 91, 2 * block)
    assert consumer.fetch("d-whole", 91, 2 * block, params, 2 * block) == 0
    names = [*map(str, range(len(PROMPTS))), "-prefix"]
    ends = consumer.until(ended(*(f"d{name}" for name in names)))
    assert has([f"d{name}" for name in names], "received")(ends), ends
    producer.until(has([f"p{name}" for name in [*names, "-whole"]], "sent"))
    assert all(consumer.holds(f"d{name}") for name in [*names, "-whole"])
    assert producer.errors() == consumer.errors() == 0


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_bit_that_goes_wrong_is_found(engines, mode):
    producer, consumer = engines.make(
        mode, DENSE, (2, 1), ("KBHND", "BKNHD"), (4, 8), checksums="all"
    )
    consumer.spoil()
    for i in range(2):
        params = producer.prefill(f"p{i}", i, 29)
        consumer.fetch(f"d{i}", i, 29, params)
        ends = consumer.until(ended(f"d{i}"))
    assert ends == {"d0": {"corrupt"}, "d1": "received"}
    producer.until(has(["p0", "p1"], "sent"))
    assert producer.errors() == consumer.errors() == 0


def early(address, engine_id, request_id, tp=1):
    return {
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": tp,
        "transfer_mode": "push",
    }


def test_layers_are_pushed_as_they_finish(engines):
    producer, consumer = engines.make(
        "push", DENSE, (2, 1), ("KBHND", "KBNHD"), (4, 8), heartbeat_interval=0.2, **PATIENT
    )
    address = producer.make(
        engines.transport, "layers", DENSE, {"transfer_mode": "push"},
        tp=2, axes="KBHND", block_size=4, num_blocks=64,
    )  # fmt: skip
    params = early(address, "layers", "p0", tp=2)
    assert consumer.fetch("d0", 5, 29, params) == 29
    producer.begin("p0", 5, 29)
    for until in (9, 17, 29):
        producer.compute("p0", until)
        producer.ends()  # a step lies between two answers
    producer.ends()
    assert producer.hand_over("p0")
    ends = consumer.until(ended("d0"))
    assert ends["d0"] == "received"
    assert consumer.holds("d0")
    producer.until(has(["p0"], "sent"))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_blocks_that_are_reused_after_the_lease_are_never_a_success(engines, mode):
    producer, consumer = engines.make(mode, DENSE, lease_duration=LEASE_S, **PATIENT)
    for i in range(5):
        params = producer.prefill(f"p{i}", i, 29)
        producer.ends()  # a step lies between two answers
        producer.until(has([f"p{i}"], "sent"), pass_time=LEASE_S)  # nobody came for it in time
        producer.overwrite(params["remote_block_ids"][0], 99)
        consumer.fetch(f"d{i}", i, 29, params)
    ends = consumer.until(ended(*(f"d{i}" for i in range(5))))
    assert [ends[f"d{i}"] for i in range(5)] == [{"expired"}] * 5


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_blocks_that_are_reused_while_readers_come_are_right_or_expired(engines, mode):
    producer, consumer = engines.make(mode, DENSE, lease_duration=LEASE_S, **PATIENT)
    names = []
    for i in range(30):
        params = producer.prefill(f"p{i}", i, 29)
        consumer.fetch(f"d{i}", i, 29, params)
        names.append(f"d{i}")
        producer.pass_time(0.4 * LEASE_S)
        if i % 6 == 5:
            ends = consumer.until(ended(*names))
            producer.until(ended(*(f"p{n}" for n in range(i + 1))), pass_time=LEASE_S)
            for name in names[-6:]:
                consumer.finish(name)
    seen = {str(ends[name]) for name in names}
    assert seen <= {"received", "{'expired'}"}


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_abort_leaves_nothing_behind(engines, mode):
    producer, consumer = engines.make(mode, DENSE, **PATIENT)
    for i in range(10):
        params = producer.prefill(f"p{i}", i, 29)
        consumer.fetch(f"d{i}", i, 29, params)
        consumer.finish(f"d{i}")
        producer.until(has([f"p{i}"], "sent"))
    params = producer.prefill("p-last", 50, 29)
    consumer.fetch("d-last", 50, 29, params)
    assert consumer.until(ended("d-last"))["d-last"] == "received"
    assert producer.errors() == consumer.errors() == 0


def test_a_producer_is_killed_while_it_is_read(engines_on_tcp):
    engines = engines_on_tcp
    # Heartbeats go missing before the test moves the clock, but by far not enough of them.
    beats = {"lease_duration": 600.0, "heartbeat_interval": 100.0, "transfer_timeout": 1e6}
    producer, consumer = engines.make("pull", DENSE, **beats)
    consumer.fetch("d0", 0, 29, producer.prefill("p0", 0, 29))
    assert consumer.until(ended("d0"))["d0"] == "received"
    params = [producer.prefill(f"p{i}", i, 29) for i in (1, 2)]
    producer.stop()
    for i in (1, 2):
        consumer.fetch(f"d{i}", i, 29, params[i - 1])
    while not consumer.num_running():
        pass
    engines.kill("producer")
    ends = consumer.until(ended("d1", "d2"), pass_time=100.0)
    assert ends["d1"] == ends["d2"] == {"PeerLostError"}
    for i in (1, 2):
        consumer.poison(f"d{i}")
    producer, again = engines.make("pull", DENSE)
    assert again is consumer
    again.fetch("d3", 3, 29, producer.prefill("p3", 3, 29))
    assert again.until(ended("d3"))["d3"] == "received"


def test_a_consumer_is_killed_while_it_is_written_to(engines_on_tcp):
    engines = engines_on_tcp
    producer, consumer = engines.make("push", DENSE, lease_duration=LEASE_S, **PATIENT)
    consumer.fetch("d0", 0, 29, producer.prefill("p0", 0, 29))
    assert consumer.until(ended("d0"))["d0"] == "received"
    address = producer.make(
        engines.transport, "pusher", DENSE, {"transfer_mode": "push", "lease_duration": LEASE_S},
        tp=1, axes="KBHND", block_size=4, num_blocks=64,
    )  # fmt: skip
    consumer.fetch("d1", 1, 29, early(address, "pusher", "p1"))
    while not producer.num_pushes():
        pass
    consumer.stop()
    producer.begin("p1", 1, 29)
    producer.compute("p1", 29)
    producer.ends()
    producer.ends()
    assert producer.hand_over("p1")
    producer.prefill("p2", 2, 29)
    engines.kill("consumer")
    assert producer.until(ended("p1", "p2"), pass_time=LEASE_S)  # their leases run out
    assert producer.num_pushes() == producer.num_running() == producer.errors() == 0
    producer, consumer = engines.make("push", DENSE)
    consumer.fetch("d3", 3, 29, producer.prefill("p3", 3, 29))
    assert consumer.until(ended("d3"))["d3"] == "received"


def test_a_producer_that_dies_before_the_first_contact(engines):
    _, consumer = engines.make("pull", DENSE, handshake_timeout=0.5, transfer_timeout=1e6)
    producer = engines.producer
    params = producer.prefill("p0", 0, 29)
    engines.kill("producer")
    consumer.fetch("d0", 0, 29, params)
    assert consumer.until(ended("d0"))["d0"] in ({"HandshakeTimeout"}, {"HandshakeError"})


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_twenty_conversations_of_three_turns(engines, mode):
    """Held turns are fetched, those that made room for others are computed again."""
    prefill, decode = engines.make(
        mode, DENSE, (2, 1), ("KBHND", "KBNHD"), (4, 8), blocks=256, **PATIENT,
        conversation_blocks=60, conversation_seconds=1e6, recompute_threshold=1,
    )  # fmt: skip
    lengths = {chat: 9 + chat % 5 for chat in range(20)}
    handed = {chat: {"do_remote_decode": True} for chat in lengths}
    fetched = recomputed = 0
    for turn in range(3):
        for chat in sorted(lengths, reverse=turn % 2 == 1):
            asked, answer, num_tokens = f"p{chat}.{turn}", f"d{chat}.{turn}", lengths[chat]
            count = prefill.fetch(asked, chat, num_tokens, handed[chat])
            assert count == handed[chat].get("remote_num_tokens", 0)
            if count and prefill.until(ended(asked))[asked] != "received":
                assert prefill.ends()[asked] == {"expired"}
                recomputed += count
                count = 0
            fetched += count
            prefill.go_on(asked, num_tokens, count)
            decode.fetch(answer, chat, num_tokens, prefill.hand_over(asked))
            assert decode.until(ended(answer))[answer] == "received"
            lengths[chat] += 10
            decode.go_on(answer, lengths[chat] - 1)
            handed[chat] = decode.hand_over(answer)
            assert handed[chat]["remote_num_tokens"] == (lengths[chat] - 1) // 8 * 8
    prefill.until(has([f"p{chat}.{turn}" for chat in lengths for turn in range(3)], "sent"))
    assert fetched > recomputed > 0
    assert fetched + recomputed == sum(
        (9 + chat % 5 + 10 * turn - 1) // 8 * 8 for chat in range(20) for turn in (1, 2)
    )
    assert prefill.errors() == decode.errors() == 0
