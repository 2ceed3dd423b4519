"""The simulator of fleets: its runs, what it refuses, and that it finds what is wrong."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from pynixlkv import KVCache, TransferPlan
from pynixlkv.connector import receiver, remote_engines, sender, worker
from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.scheduler import ConnectorScheduler
from pynixlkv.errors import ConfigError, DuplicatePeerError, PeerLostError
from pynixlkv.testing.fleet import (
    Fleet,
    FleetOptions,
    Violation,
    __main__,
    handshakes,
    read_mooncake,
    synthetic,
)
from pynixlkv.testing.fleet.report import make_report
from pynixlkv.testing.fleet.virtual import Events, Host, Link, Network, VirtualAgent
from pynixlkv.types import TransferState

SMALL = {"prefill": 4, "decode": 4, "tp": 1, "rack": 2, "rate": 3.0, "restart": 4.0}


def run(trace=None, **options):
    fleet = Fleet(FleetOptions(**{**SMALL, **options}), trace)
    try:
        fleet.run()
        return make_report(fleet, 0.0)
    finally:
        fleet.close()


# ---- runs


@pytest.mark.parametrize(
    "scenarios",
    [("rolling", "slow"), ("herd",), ("rack", "clocks"), ("partition",)],
    ids="-".join,
)
def test_all_invariants_hold(scenarios):
    report = run(scenarios=scenarios, duration=40.0, rate=2.0, tp=2)
    assert report.requests == sum(report.ends.values()) > 50
    assert report.ends["answered"] > 30
    assert report.hand_offs >= report.ends["answered"]
    assert sum(report.engines.values()) > 0


def test_pushed_hand_offs_keep_the_invariants_while_engines_fail():
    report = run(mode="push", duration=30.0, failures=60.0, checksums="all")
    assert report.failures["its engine died"] > 0
    assert report.ends["answered"] > 50


def test_a_run_depends_on_its_seed_alone():
    options = {"scenarios": ("herd",), "duration": 15.0}
    one, same, other = (run(seed=seed, **options).as_dict() for seed in (1, 1, 2))
    for report in (one, same, other):
        for name in ("wall_s", "cpu_s", "max_rss_mib", "options"):
            del report[name]
    assert one == same != other


def test_jitter_spares_handshake_servers_a_herd(monkeypatch):
    monkeypatch.setattr(handshakes, "MAX_STRANGERS", 16)
    herd = {"scenarios": ("herd",), "prefill": 1, "decode": 16, "tp": 4, "duration": 8.0}
    late = "failed: HandshakeTimeout"
    spread, together = (run(**herd, seed=2, jitter=jitter) for jitter in (1.0, 0.0))
    assert 0 < spread.handshake_load["dropped"] < 0.6 * together.handshake_load["dropped"]
    assert late not in spread.failures
    assert together.failures[late] > 10  # those who were dropped together come back together


def test_repeated_hand_offs_of_a_dead_engine_all_fail_and_cost_few_handshakes():
    report = run(scenarios=("stale",), duration=40.0, restart=60.0)
    assert sum(report.ghosts.values()) > 40
    assert {end.split(":")[0] for end in report.ghosts} <= {"failed", "expired"}


def test_peers_that_were_forgotten_cost_no_waiting():
    report = run(peer_ttl=12.0, rate=0.3, duration=200.0, aborts=0.0)
    assert report.connections > 4 * SMALL["prefill"] * SMALL["decode"]  # forgotten and made anew
    assert report.hand_off_s["longest"] < 2.0


# ---- planted faults


def broken(**options):
    with pytest.raises(Violation) as caught:
        run(**{"duration": 30.0, "rate": 2.0, **options})
    return caught.value.invariant


def test_a_lease_that_is_freed_early_is_found(monkeypatch):
    def free(self, held, now):
        del self._held[held.id]  # its word still says that it is held
        self._num_readers -= len(held.readers)

    monkeypatch.setattr(sender.Sender, "_free", free)
    assert broken() == "freed under a lease"


def test_blocks_that_are_used_though_the_lease_is_over_are_found(monkeypatch):
    monkeypatch.setattr(receiver, "status", lambda lease, word: LeaseStatus.HELD)
    hold = sender.Sender.hold

    def hold_briefly(self, request_id, meta, event, now):
        hold(self, request_id, meta, event, now)
        self._held[request_id].ending = "too early"

    monkeypatch.setattr(sender.Sender, "hold", hold_briefly)
    # Prompts that fill the pool, so that blocks have a new use at once.
    found = broken(checksums="off", prompt=32768, num_blocks=256, shared=0.0, link=5.0)
    assert found == "wrong bytes"


def hold_for_ever(monkeypatch):
    hold = sender.Sender.hold

    def keep(self, request_id, meta, event, now):
        hold(self, request_id, meta, event, now)
        self._held[request_id].deadline = float("inf")

    monkeypatch.setattr(sender.Sender, "hold", keep)
    monkeypatch.setattr(sender.Sender, "_release", lambda self, *_: None)


def test_blocks_that_are_never_freed_are_found(monkeypatch):
    hold_for_ever(monkeypatch)
    assert broken() == "held too long"


def test_blocks_that_are_freed_while_they_are_written_are_found(monkeypatch):
    monkeypatch.setattr(receiver.Receiver, "_is_quiet", lambda self, request: True)
    assert broken(aborts=0.7, link=0.5) == "freed in use"


def test_blocks_that_are_freed_while_they_are_pushed_are_found(monkeypatch):
    monkeypatch.setattr(sender.Sender, "_of", lambda self, request_id, lease=None: [])
    assert broken(mode="push", aborts=0.7, link=0.5) == "freed in use"


def test_a_request_that_is_never_scheduled_though_there_is_room_is_found(monkeypatch):
    ask = ConnectorScheduler.get_num_new_matched_tokens

    def put_off(self, request, num_computed):
        count, is_async = ask(self, request, num_computed)
        return (None if request.request_id == "d9.0" else count), is_async

    monkeypatch.setattr(ConnectorScheduler, "get_num_new_matched_tokens", put_off)
    assert broken() == "starved"


def test_a_request_that_waits_for_a_lease_word_for_ever_is_found(monkeypatch):
    take_words = receiver.Receiver._take_words

    def lose_words(self, check, now):
        is_over = take_words(self, check, now)
        if is_over:
            del self._free_words[-len(check.slots) :]
        return is_over

    monkeypatch.setattr(worker, "_LEASE_BUFFER_WORDS", 8)
    monkeypatch.setattr(receiver.Receiver, "_take_words", lose_words)
    assert broken() == "starved"


def test_a_peer_state_that_is_never_dropped_is_found(monkeypatch):
    monkeypatch.setattr(remote_engines.RemoteEngines, "_bury", lambda self, engine: False)
    assert broken(peer_ttl=0.5, rate=4.0, duration=60.0) in ("state", "peer state")


def test_a_retry_without_limit_is_found(monkeypatch):
    monkeypatch.setattr(remote_engines, "_REFUSAL_S", 0.0)
    assert broken(scenarios=("stale",), restart=2.0) == "retry without limit"


def test_messages_without_limit_are_found(monkeypatch):
    def beat_always(self, now):
        for engine in self.all():
            engine.next_heartbeat = 0.0
        return min(send_heartbeats(self, now), 0.001)

    send_heartbeats = remote_engines.RemoteEngines.send_heartbeats
    monkeypatch.setattr(remote_engines.RemoteEngines, "send_heartbeats", beat_always)
    assert broken(link=1.0) == "messages"


# ---- the virtual network


def two_agents(*racks, gb_per_s=8.0):
    events = Events()
    network = Network(events, detection=10.0)
    agents, caches = [], []
    for number, rack in enumerate(racks):
        agent = VirtualAgent(f"a{number}", network, Host(rack, Link(gb_per_s), 0.001))
        memory = np.full((8, 1 << 10), number + 1, np.uint8)
        cache = KVCache.from_tensors({"l": memory}, axes="BD", kv_heads=None)
        agent.register(cache)
        begin = memory.ctypes.data
        agent.native.factors.append((begin, begin + memory.nbytes, 1e6))
        agent.native.link.bytes_per_s = 1e9
        agents.append(agent)
        caches.append((memory, cache))
    peer = agents[0].connect(agents[1].hello(caches[1][1]))
    plan = TransferPlan(caches[0][1].geometry, peer.geometry)
    return events, network, agents, [memory for memory, _ in caches], peer, plan


def test_a_transfer_takes_the_time_of_its_bytes_and_moves_them():
    events, _, agents, memory, peer, plan = two_agents(0, 0)
    transfer = agents[0].read(peer, plan, [1], [2])
    events.run(1.0)  # 1,024 bytes stand for 1.024 GB, of a link that carries 1 GB a second
    assert transfer.state is TransferState.RUNNING
    events.run(1.1)
    assert transfer.done()
    assert transfer.is_quiet
    assert memory[0][1].tolist() == [2] * 1024
    assert not (memory[0][[0, 2]] == 2).any()
    for agent in agents:
        agent.close()


def test_transfers_share_an_uplink():
    events, _, agents, _, peer, plan = two_agents(0, 1, gb_per_s=4.0)
    transfers = [agents[0].read(peer, plan, [i], [i]) for i in range(2)]
    events.run(2.1)  # at 0.5 GB a second
    assert [t.state for t in transfers] == [TransferState.DONE, TransferState.RUNNING]
    for agent in agents:
        agent.close()


def test_a_partition_holds_transfers_up_until_it_heals_or_is_noticed():
    events, network, agents, memory, peer, plan = two_agents(0, 1)
    network.split = frozenset([1])
    network.changed()
    transfer = agents[0].read(peer, plan, [1], [2])
    events.run(9.0)
    assert transfer.state is TransferState.RUNNING
    network.split = frozenset()
    network.changed()
    events.run(9.5)
    assert transfer.done()
    network.split = frozenset([1])
    network.changed()
    late = agents[0].read(peer, plan, [3], [2], timeout=5.0)
    events.run(16.0)
    assert late.state is TransferState.TIMED_OUT
    assert not late.is_quiet
    events.run(20.0)
    assert late.is_quiet
    assert not peer.is_connected
    assert (memory[0][3] == 1).all()
    with pytest.raises(PeerLostError):
        agents[0].read(peer, plan, [3], [2])
    for agent in agents:
        agent.close()


def test_a_cancelled_transfer_is_quiet_when_its_bytes_have_moved():
    events, _, agents, _, peer, plan = two_agents(0, 0)
    transfer = agents[0].read(peer, plan, [1], [2])
    events.run(0.5)
    transfer.cancel()
    assert transfer.state is TransferState.CANCELLED
    assert not transfer.is_quiet
    events.run(2.0)
    assert transfer.is_quiet
    for agent in agents:
        agent.close()


def test_a_successor_becomes_a_new_generation_when_the_first_is_gone():
    events, network, agents, _, peer, _ = two_agents(0, 0)
    with pytest.raises(DuplicatePeerError):
        VirtualAgent("a1", network, agents[1].native.host)
    agents[1].close()
    events.run(1.0)
    assert not peer.is_connected
    successor = VirtualAgent("a1", network, agents[1].native.host)
    again = agents[0].connect(successor.hello())
    assert (again.generation, again.is_connected) == (2, True)
    for agent in (agents[0], successor):
        agent.close()


# ---- traces and the command


def test_synthetic_traces_share_prefixes_and_repeat_by_seed():
    one, same = (list(itertools.islice(synthetic(3, 10.0), 300)) for _ in range(2))
    assert one == same
    firsts = [request.blocks[0] for request in one]
    assert len(set(firsts)) < 0.8 * len(firsts)
    assert all(len(r.blocks) == -(-r.num_prompt_tokens // 512) for r in one)
    assert len(set(itertools.chain(*(r.blocks for r in one)))) > 300


def test_a_trace_in_mooncakes_format_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [1, 3]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    first, second = read_mooncake(path, speed=2.0)
    assert (first.at, second.at, second.blocks) == (0.0, 1.5, (1, 3))
    report = run(read_mooncake(path), duration=5.0, aborts=0.0)
    assert report.ends == {"answered": 2}
    for bad in ('{"timestamp": 0}', "[]", "x", json.dumps({**lines[0], "hash_ids": [1]})):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="line 1"):
            list(read_mooncake(path))


def test_the_command_prints_a_report(capsys, monkeypatch, tmp_path):
    arguments = ["--prefill=2", "--decode=2", "--tp=1", "--duration=5", "--quiet"]
    assert __main__.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hand_offs"] > 0
    assert report["options"]["tp"] == 1
    assert __main__.main(arguments) == 0
    assert "all held" in capsys.readouterr().out
    assert __main__.main([*arguments, "--rate=0"]) == 2
    assert "rate" in capsys.readouterr().err
    hold_for_ever(monkeypatch)
    assert __main__.main(arguments) == 1
    assert "held too long" in capsys.readouterr().err
