"""Faults at random, for a bounded time, beside agents that must outlive them: `make soak`.

Kills, stops, pulled cables, mutated messages and exhausted limits. Prints what was tried, how
operations ended and what broke; the exit status is 1 if anything did. ``SOAK_SECONDS`` sets the
time, ``SOAK_SEED`` repeats a choice of faults.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
import socket
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from interpreter import run_python
from mutations import mutate
from namespaces import TwoHosts
from peers import Peer
from toy_process import ENGINES

from pynixlkv.connector import messages
from pynixlkv.connector.metadata import KVTransferParams
from pynixlkv.errors import HandshakeError, PeerLostError, PynixlkvError, TransferError
from pynixlkv.handshake import Handshake, fetch
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.testing.remote import ProcessRemote
from tests.integration import test_agent_faults, test_connector_processes, test_two_hosts
from tests.unit import test_handshake

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
SEED = int(os.environ.get("SOAK_SEED", str(time.time_ns() % 2**32)))
HANG_S = 240.0
WAIT_S = 60.0
SIZE = test_agent_faults.SIZE
PIECES = [(i, SIZE // 64) for i in range(0, SIZE, SIZE // 64)]
FLAT_BYTES, FLAT_FILES = 64 << 20, 8


class Survivor:
    """An agent of this process, which reads and is read while others fail."""

    def __init__(self, name):
        self.name = name
        self.agent = ENGINES[name](f"survivor-{name}")
        self.buffer = test_agent_faults.Guarded(SIZE)
        self.source = random_bytes(SIZE, SEED)
        self.agent.register(self.buffer.all, self.source)
        self.hello = self.agent.hello()

    def read(self, peer, there, timeout):
        """Begin to read all bytes of a peer."""
        self.buffer.inside[:] = 0
        here = rows(self.buffer.address, *PIECES)
        return self.agent.read_descriptors(peer, here, rows(there, *PIECES), timeout=timeout)


class Soak:
    """What all trials share, and what has come of them."""

    def __init__(self, stack):
        self.rng = random.Random(SEED)
        self.tried, self.ended, self.broken = Counter(), Counter(), Counter()
        self.survivors = {name: Survivor(name) for name in ENGINES}
        self.engines = {
            name: test_connector_processes.Engines(name) for name in ("nixl", "ucx-tcp")
        }
        self.listener = Handshake("soak", {(0, 0): b"hello"}, compatibility={})
        stack.callback(self.listener.close)
        for survivor in self.survivors.values():
            stack.callback(survivor.agent.close)
        for engines in self.engines.values():
            stack.callback(engines.close)

    def require(self, is_right, what):
        """Count what broke."""
        if not is_right:
            self.broken[what] += 1

    def note_end(self, survivor, transfer, expected):
        """Count how a read ended, and compare what it brought; returns whether the peer is lost."""
        try:
            transfer.wait()
        except TransferError as error:
            self.ended[f"read: {type(error).__name__}"] += 1
            return isinstance(error, PeerLostError)
        self.require(np.array_equal(survivor.buffer.inside, expected), "wrong bytes")
        self.ended["read: done"] += 1
        return False

    def fail_an_owner(self):
        """Read from a process that is killed, stopped, or takes its memory away."""
        survivor = self.survivors[self.rng.choice([*ENGINES])]
        agent, seed = survivor.agent, self.rng.randrange(1 << 30)
        expected = random_bytes(SIZE, seed)
        remote = ProcessRemote(ENGINES[survivor.name], "owner")
        there = remote.register_more(SIZE, seed)
        peer = agent.connect(remote.hello())
        faults = {
            "kill": remote.kill,
            "stop": remote.pause,
            "deregister": remote.deregister_more,
            "disconnect": lambda: agent.disconnect(peer),
        }
        fault = self.rng.choice([*faults])
        self.tried[f"owners: {fault}"] += 1
        timeout = self.rng.choice([0.3, WAIT_S]) if fault == "stop" else WAIT_S
        happens = threading.Timer(self.rng.uniform(0.0, 0.1), faults[fault])
        happens.start()
        resumes = threading.Timer(self.rng.uniform(0.2, 0.6), remote.resume)
        if fault == "stop":
            resumes.start()
        is_last = False
        while not is_last:
            # A read notices a killed peer; the first read after any other fault shows its harm.
            is_last = happens.finished.is_set() and fault != "kill"
            try:
                transfer = survivor.read(peer, there, timeout)
            except PynixlkvError as error:
                self.ended[f"read refused: {type(error).__name__}"] += 1
                is_last |= isinstance(error, PeerLostError)
                continue
            is_last |= self.note_end(survivor, transfer, expected)
            if fault == "stop" and happens.finished.is_set():
                resumes.join()
            self.require(transfer.wait_quiet(WAIT_S), "not quiet")
        happens.join()
        self.require(survivor.buffer.guards_are_untouched(), "bytes beyond the buffer")
        agent.disconnect(peer)
        remote.close()

    def fail_a_reader(self):
        """Be read by a process that is killed, perhaps after it was stopped."""
        # With "nixl-tcp" UCX may end an owner, see docs/concepts/libraries.md.
        survivor = self.survivors[self.rng.choice(["nixl", "ucx", "ucx-tcp"])]
        there = int(survivor.source.ctypes.data)
        victim = Peer(test_agent_faults.pull, ENGINES[survivor.name], survivor.hello, there)
        victim.receive(WAIT_S)
        is_stopped = self.rng.random() < 0.5
        self.tried["readers: " + ("stop, kill" if is_stopped else "kill")] += 1
        time.sleep(self.rng.uniform(0.0, 0.1))
        if is_stopped:
            victim.stop()
            time.sleep(self.rng.uniform(0.0, 0.5))
        victim.kill()
        self.require(np.array_equal(survivor.source, random_bytes(SIZE, SEED)), "wrong bytes")

    def fail_an_engine(self):
        """Move KV between engines, one of which is killed or stopped, or gives requests up."""
        engines = self.engines[self.rng.choice([*self.engines])]
        lease = test_connector_processes.LEASE_S
        limits = {"lease_duration": lease, "handshake_timeout": 2.0, "transfer_timeout": 4 * lease}
        producer, consumer = engines.make(
            *self.rng.choice(test_connector_processes.CASES), **limits
        )
        fault = self.rng.choice(["none", "kill the producer", "kill the consumer", "stop", "abort"])
        self.tried[f"engines: {fault}"] += 1
        ids = range(4)
        for i in ids:
            consumer.fetch(f"d{i}", i, 13 + i, producer.prefill(f"p{i}", i, 13 + i))
        time.sleep(self.rng.uniform(0.0, 0.05))
        if fault == "stop":
            producer.stop()
            time.sleep(self.rng.uniform(0.0, 0.5))
            producer.resume()
        elif fault == "abort":
            for i in self.rng.sample(ids, 2):
                with contextlib.suppress(Exception):  # it has ended already
                    consumer.finish(f"d{i}")
        elif fault != "none":
            engines.kill(fault.split()[-1])
        sides = {"d": consumer, "p": producer}
        if fault.startswith("kill"):
            del sides["p" if fault.endswith("producer") else "d"]
        for side, remote in sides.items():
            names = [f"{side}{i}" for i in ids]
            # An abort of the consumer is no end that it reports.
            is_over = test_connector_processes.ended(*names)
            if side == "d" and fault == "abort":
                continue
            ends = remote.until(is_over, pass_time=0.0 if fault in ("none", "stop") else lease / 4)
            for name in names:
                self.ended[
                    f"request {ends[name] if isinstance(ends[name], str) else min(ends[name])}"
                ] += 1
                self.require(ends[name] != "wrong", "wrong bytes")

    def lie(self):
        """Send mutated hellos, handshakes, hand-offs and messages, and raw bytes."""
        rng = self.rng
        for survivor in self.survivors.values():
            for _ in range(50):
                with pytest.raises(HandshakeError):
                    survivor.agent.connect(mutate(survivor.hello, rng))
        context = zmq.Context()
        with context.socket(zmq.DEALER) as client:
            client.connect(f"tcp://{self.listener.address}")
            for _ in range(50):
                client.send_multipart([b"", mutate(test_handshake.envelope(), rng)])
        context.destroy(linger=0)
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((self.listener.host, self.listener.port)) as plain,
        ):
            plain.sendall(rng.randbytes(rng.randrange(1, 5000)))
        for _ in range(200):
            with contextlib.suppress(PynixlkvError):
                messages.decode(mutate(messages.encode(messages.Heartbeat([])), rng))
            with contextlib.suppress(PynixlkvError):
                KVTransferParams.from_dict({"tp_size": rng.choice([0, 1, -1, 2**40, "1", None])})
        answer = fetch(self.listener.address, engine_id="soak", compatibility={}, timeout=WAIT_S)
        self.require(answer.hellos == {(0, 0): b"hello"}, "a handshake that others disturb")
        self.tried["mutated messages"] += 450 + 50 * len(self.survivors)

    def exhaust(self):
        """Make agents and handshakes with few descriptors left."""
        if self.rng.random() < 0.8:
            spare, kind = self.rng.randrange(109), self.rng.choice(["nixl", "ucx"])
            self.tried["agents with few descriptors"] += 1
            answer = run_python(test_agent_faults.LIMITED, KIND=kind, SPARE=str(spare))
        else:
            self.tried["handshakes with 0 to 39 descriptors"] += 1
            order, kind = self.rng.choice(["first", "later"]), self.rng.choice(["fetch", "serve"])
            answer = run_python(test_handshake.LIMITED, ORDER=order, KIND=kind)
        self.ended[f"limits: {answer}"] += 1

    def pull_a_cable(self):
        """Read from another host, whose link goes and comes."""
        self.tried["links: down and up"] += 1
        engine = self.rng.choice(["ucx", "nixl"])
        with TwoHosts() as hosts, contextlib.ExitStack() as stack:
            own = test_two_hosts.own
            owner = Peer(own, engine, "owner", SIZE, prefix=hosts.enter(0))
            stack.callback(owner.kill)
            reader = Peer(read_on, engine, *owner.receive(), prefix=hosts.enter(1))
            stack.callback(reader.kill)
            reader.receive()
            for _ in range(3):
                time.sleep(self.rng.uniform(0.0, 0.2))
                hosts.plug(connected=False)
                time.sleep(self.rng.uniform(0.0, 1.0))
                hosts.plug(connected=True)
            reader.send("end")
            ends = reader.finish()
            self.ended.update({f"link: {end}": count for end, count in ends.items()})
            self.require(not ends["wrong bytes"], "wrong bytes")
            owner.send("end")
            owner.finish()


def read_on(peer, engine, hello, there):
    """Read again and again until told to end; returns how reads ended."""
    ends = Counter()
    pool, expected = np.zeros(SIZE, dtype=np.uint8), random_bytes(SIZE, 1)
    ours, theirs = (rows(base, *PIECES) for base in (pool.ctypes.data, there))
    with test_two_hosts.make_agent(engine, "reader") as agent:
        agent.register(pool)
        owner = agent.connect(hello)
        peer.send("begin")
        while not peer.connection.poll():
            pool[:] = 0
            try:
                transfer = agent.read_descriptors(owner, ours, theirs, timeout=0.5)
                transfer.wait()
                ends["done" if np.array_equal(pool, expected) else "wrong bytes"] += 1
            except TransferError as error:
                ends[type(error).__name__] += 1
                assert transfer.wait_quiet(WAIT_S)
                if isinstance(error, PeerLostError):
                    with contextlib.suppress(PynixlkvError):
                        owner = agent.connect(hello)
            except PynixlkvError as error:
                ends[type(error).__name__] += 1
    return ends


def figures():
    """Resident bytes and open files of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss, len(list(Path("/proc/self/fd").iterdir()))


def main():
    logging.disable(logging.WARNING)
    with contextlib.ExitStack() as stack:
        soak = Soak(stack)
        trials = {
            soak.fail_an_owner: 6, soak.fail_a_reader: 4, soak.fail_an_engine: 3, soak.lie: 1,
            soak.exhaust: 2, soak.pull_a_cable: 1,
        }  # fmt: skip
        begin, before = time.monotonic(), None
        while time.monotonic() - begin < SECONDS or before is None:
            order = soak.rng.sample([*trials], counts=[*trials.values()], k=sum(trials.values()))
            for trial in order:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                try:
                    trial()
                except pytest.skip.Exception as reason:
                    soak.ended[f"not tried: {reason}"] += 1
                except BaseException as error:
                    soak.broken[f"{trial.__name__}: {type(error).__name__}"] += 1
                    traceback.print_exc()
                    if isinstance(error, KeyboardInterrupt):
                        raise
            before = before or figures()  # pools and caches have filled up
        after = figures()
        for survivor in soak.survivors.values():
            soak.require(survivor.agent.quarantined == 0, "quarantined transfers")
    faulthandler.cancel_dump_traceback_later()
    soak.require(after[0] - before[0] < FLAT_BYTES, "memory grows")
    soak.require(after[1] - before[1] < FLAT_FILES, "open files grow")
    print(f"{time.monotonic() - begin:.0f} s, SOAK_SEED={SEED}")
    for title, counts in (("tried", soak.tried), ("ended", soak.ended), ("broken", soak.broken)):
        print(f"{title}: {sum(counts.values())}")
        for name, count in sorted(counts.items()):
            print(f"  {count:7} {name}")
    print(f"resident MiB {before[0] >> 20} -> {after[0] >> 20}, files {before[1]} -> {after[1]}")
    return 1 if soak.broken else 0
