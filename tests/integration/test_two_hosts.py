"""Between two network namespaces over TCP: the demo, and a cable that is pulled."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from namespaces import TwoHosts

from pynixlkv.cli.demo import run_demo
from pynixlkv.cli.rank import DemoOptions
from pynixlkv.errors import PeerLostError, TransferTimeout, UcxError
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing import process
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.types import TransferState
from pynixlkv.ucx import UcxAgent

SIZE = 128 << 20
PIECE = 1 << 20
WAIT_S = 60.0
TCP = {"TLS": "tcp"}
SILENT = "02:00:00:00:00:01"  # nobody's address


def make_agent(engine, name):
    if engine == "ucx":
        return UcxAgent(name, config=TCP)
    params = NixlAgent.default_backend_params("UCX")
    return NixlAgent(name, backend_params={"engine_config": f"TLS=tcp,{params['engine_config']}"})


@pytest.fixture
def hosts():
    with TwoHosts() as hosts:
        yield hosts


@pytest.mark.parametrize("engine", ["ucx", "nixl"])
def test_the_demo_between_two_hosts(hosts, monkeypatch, engine):
    monkeypatch.setenv("UCX_TLS", "tcp")
    start = subprocess.Popen

    def start_on_its_host(command, *, stdout, **options):
        host = ("prefill", "decode").index(Path(stdout.name).name.partition("-")[0])
        return start([*hosts.enter(host), *command], stdout=stdout, **options)

    monkeypatch.setattr(process.subprocess, "Popen", start_on_its_host)
    options = DemoOptions(
        "Llama-3.1-8B",
        {},
        {"prefill": 1, "decode": 2},
        blocks=3,
        transfer_backend=engine,
        timeout_s=90.0,
    )
    report = run_demo(options, lambda *_: None)
    assert report.ok, report.differences
    assert report.verified_bytes == sum(o.bytes for o in report.operations) > 0
    used = {"ucx": "lane", "nixl": "tcp"}[engine]
    assert all(used in o.transport for o in report.operations)


def own(peer, engine="ucx", name="owner", size=SIZE):
    with make_agent(engine, name) as agent:
        pool = random_bytes(size, 1)
        agent.register(pool)
        peer.send((agent.hello(), pool.ctypes.data))
        peer.receive()


def read_twice(peer, hello, there):
    """Read all; then read again, tell when that is under way, and how it ends."""
    pool = np.zeros(SIZE, dtype=np.uint8)
    expected = random_bytes(SIZE, 1)
    ours, theirs = (
        rows(base, *[(i, PIECE) for i in range(0, SIZE, PIECE)])
        for base in (pool.ctypes.data, there)
    )
    with UcxAgent("reader", config=TCP) as agent:
        agent.register(pool)
        owner = agent.connect(hello)
        agent.read_descriptors(owner, ours, theirs).wait(WAIT_S)
        assert np.array_equal(pool, expected)
        pool[:] = 0
        transfer = agent.read_descriptors(owner, ours, theirs, timeout=2.0)
        while not pool[:4096].any():
            assert not transfer.done()
        peer.send("under way")
        with pytest.raises((TransferTimeout, PeerLostError)) as caught:
            transfer.wait(WAIT_S)
        peer.send((type(caught.value), np.array_equal(pool, expected)))
        peer.receive()  # the cable is plugged in again
        assert transfer.wait_quiet(WAIT_S)
        return transfer.state


def test_a_pulled_cable_fails_the_transfer_by_its_deadline(hosts, start_peer):
    owner = start_peer(own, prefix=hosts.enter(0))
    reader = start_peer(read_twice, *owner.receive(), prefix=hosts.enter(1))
    assert reader.receive() == "under way"
    reader.stop()  # so that it stays under way for as long as pulling takes
    hosts.plug(connected=False)
    reader.resume()
    kind, is_complete = reader.receive()
    assert not is_complete
    hosts.plug(connected=True)
    reader.send("plugged in")
    ends = {TransferTimeout: TransferState.TIMED_OUT, PeerLostError: TransferState.PEER_LOST}
    assert reader.finish() is ends[kind]
    owner.send("end")
    owner.finish()


def read_thrice(peer, hello, there):
    """Read and write back all; return the most connections that lead to one port."""
    pool = np.zeros(SIZE, dtype=np.uint8)
    expected = random_bytes(SIZE, 1)
    ends = rows(pool.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
    with UcxAgent("reader", config=TCP) as agent:
        agent.register(pool)
        owner = agent.connect(hello)
        for _ in range(3):
            pool[:] = 0
            agent.read_descriptors(owner, *ends).wait(WAIT_S)
            assert np.array_equal(pool, expected)
            agent.write_descriptors(owner, *ends).wait(WAIT_S)
        sockets = psutil.Process().net_connections("tcp")
        ports = Counter(s.raddr for s in sockets if s.status == psutil.CONN_ESTABLISHED)
        return max(ports.values())


def test_large_transfers_between_hosts_take_several_lanes(hosts, start_peer):
    owner = start_peer(own, prefix=hosts.enter(0))
    reader = start_peer(read_thrice, *owner.receive(), prefix=hosts.enter(1))
    assert reader.finish() == 4
    owner.send("end")
    owner.finish()


def inheritable_sockets():
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        with contextlib.suppress(OSError):  # that of the folder
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and os.get_inheritable(fd):
                found.add(fd)
    return found


def own_with_helpers(peer, engine):
    """Own bytes; a fork and a program that inherited this process's descriptors outlive it."""
    with make_agent(engine, "owner") as agent:
        peer.send(agent.hello())
        peer.receive()
        while inheritable_sockets() - {peer.connection.fileno()}:  # UCX has made new ones
            agent.wait_activity(0, 0.1)
        program = ["sleep", "600"]
        helpers = [os.posix_spawnp(program[0], program, os.environ), os.fork()]
        if helpers[1] == 0:
            signal.pause()
        peer.send(helpers)
        peer.receive()


def stay_idle(peer, engine, hello):
    """Connect, and do nothing until the peer is found to be lost."""
    with make_agent(engine, "reader") as agent:
        owner = agent.connect(hello)
        agent.notify(owner, b"hello")
        peer.send("connected")
        seen = 0
        while owner.is_connected:
            seen = agent.wait_activity(seen, 0.1)


@pytest.mark.parametrize("fault", ["killed", "unplugged"])
def test_an_idle_peer_that_is_gone_is_noticed_unasked(hosts, start_peer, fault):
    owner = start_peer(own_with_helpers, "ucx", prefix=hosts.enter(0))
    reader = start_peer(stay_idle, "ucx", owner.receive(), prefix=hosts.enter(1))
    assert reader.receive() == "connected"
    owner.send("have children")
    helpers = owner.receive()
    try:
        if fault == "killed":
            owner.kill()
            assert all(psutil.Process(helper).is_running() for helper in helpers)
        else:
            hosts.plug(connected=False)
        reader.finish()
    finally:
        for helper in helpers:
            psutil.Process(helper).kill()


def reach_out(peer, hello, there):
    """Connect to somebody who cannot be reached, and read."""
    pool = np.zeros(4096, dtype=np.uint8)
    ends = rows(pool.ctypes.data, (0, 4096)), rows(there, (0, 4096))
    with UcxAgent("reader", config=TCP) as agent:
        agent.register(pool)
        owner = agent.connect(hello)
        transfer = agent.read_descriptors(owner, *ends, timeout=1.0)
        with pytest.raises((TransferTimeout, PeerLostError)):
            transfer.wait(WAIT_S)
        assert not pool.any()
        peer.send("failed")
        peer.receive()  # it can be reached again
        assert transfer.wait_quiet(WAIT_S)


def test_a_host_that_cannot_be_reached_fails_the_transfer_by_its_deadline(hosts, start_peer):
    owner = start_peer(own, "ucx", "owner", PIECE, prefix=hosts.enter(0))
    given = owner.receive()
    address = (f"{hosts.ADDRESSES[0]}/24", "dev", "cable")
    hosts.run(0, "ip", "address", "delete", *address)
    reader = start_peer(reach_out, *given, prefix=hosts.enter(1))
    assert reader.receive() == "failed"
    hosts.run(0, "ip", "address", "add", *address)
    reader.send("reachable again")
    reader.finish()
    owner.send("end")
    owner.finish()


def connect_in_vain(peer, hello):
    """Connect again and again; return the errors, and how many descriptors they have cost."""
    with UcxAgent("reader", config=TCP) as agent:
        owner = agent.connect(hello)
        assert agent.is_alive(owner)
        agent.disconnect(owner)
        peer.send("connected")
        peer.receive()
        process, errors, before = psutil.Process(), set(), []
        for _ in range(20):
            with pytest.raises((UcxError, PeerLostError)) as caught:
                agent.connect(hello)
            errors.add(type(caught.value))
            before.append(process.num_fds())
        return errors, before[-1] - before[0]


def test_connecting_without_a_route_costs_no_descriptor(hosts, start_peer):
    owner = start_peer(own, prefix=hosts.enter(0))
    hello, _ = owner.receive()
    reader = start_peer(connect_in_vain, hello, prefix=hosts.enter(1))
    assert reader.receive() == "connected"
    hosts.plug(connected=False)
    reader.send("unplugged")
    assert reader.finish() == ({UcxError}, 0)
    owner.send("end")
    owner.finish()


def reach_one_of_two(peer, engine, silent, other):
    """Read from somebody who does not answer; meanwhile, from somebody who does."""
    pool = np.zeros((2, PIECE), dtype=np.uint8)
    with make_agent(engine, "reader") as agent:
        agent.register(pool)
        transfers = [
            agent.read_descriptors(
                agent.connect(hello),
                rows(here.ctypes.data, (0, PIECE)),
                rows(there, (0, PIECE)),
                timeout=WAIT_S,
            )
            for (hello, there), here in zip((silent, other), pool, strict=True)
        ]
        transfers[1].wait()
        assert np.array_equal(pool[1], random_bytes(PIECE, 1))
        assert not transfers[0].done()
        peer.send("one has arrived")
        peer.receive()  # the other answers again
        transfers[0].wait()
        assert np.array_equal(pool[0], pool[1])


@pytest.mark.parametrize("engine", ["ucx", "nixl"])
def test_a_host_that_does_not_answer_does_not_hold_up_another_peer(hosts, start_peer, engine):
    silent, other = (
        start_peer(own, engine, f"owner {host}", PIECE, prefix=hosts.enter(host)) for host in (0, 1)
    )
    given = silent.receive(), other.receive()
    # Packets to it go where nobody takes them: nothing ends connecting for minutes.
    neighbour = (hosts.ADDRESSES[0], "dev", "cable")
    hosts.run(1, "ip", "neighbour", "replace", *neighbour, "lladdr", SILENT, "nud", "permanent")
    reader = start_peer(reach_one_of_two, engine, *given, prefix=hosts.enter(1))
    assert reader.receive() == "one has arrived"
    hosts.run(1, "ip", "neighbour", "delete", *neighbour)
    reader.send("reachable again")
    reader.finish()
    for owner in (silent, other):
        owner.send("end")
        owner.finish()
