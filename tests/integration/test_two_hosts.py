"""Between two network namespaces over TCP: the demo, and a cable that is pulled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from namespaces import TwoHosts

from pynixlkv.cli import group
from pynixlkv.cli.demo import DemoOptions, run_demo
from pynixlkv.errors import PeerLostError, TransferTimeout
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.remote import random_bytes
from pynixlkv.types import TransferState
from pynixlkv.ucx import UcxAgent

SIZE = 128 << 20
PIECE = 1 << 20
WAIT_S = 30.0
TCP = {"TLS": "tcp"}


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

    monkeypatch.setattr(group.subprocess, "Popen", start_on_its_host)
    options = DemoOptions(
        "Llama-3.1-8B", {}, {"prefill": 1, "decode": 2}, blocks=3, engine=engine, timeout_s=90.0
    )
    report = run_demo(options, lambda *_: None)
    assert report.ok, report.differences
    assert report.verified_bytes == sum(o.bytes for o in report.operations) > 0
    assert all("tcp" in o.transport for o in report.operations)


def address(array):
    return int(array.__array_interface__["data"][0])


def own(peer):
    with UcxAgent("owner", config=TCP) as agent:
        pool = random_bytes(SIZE, 1)
        agent.register(pool)
        peer.send((agent.hello(), address(pool)))
        peer.receive()


def read_twice(peer, hello, there):
    """Read all; then read again, tell when that is under way, and how it ends."""
    pool = np.zeros(SIZE, dtype=np.uint8)
    expected = random_bytes(SIZE, 1)
    ours, theirs = (
        rows(base, *[(i, PIECE) for i in range(0, SIZE, PIECE)]) for base in (address(pool), there)
    )
    with UcxAgent("reader", config=TCP) as agent:
        agent.register(pool)
        owner = agent.connect(hello)
        agent.read_descriptors(owner, ours, theirs).wait(WAIT_S)
        assert np.array_equal(pool, expected)
        pool[:] = 0
        transfer = agent.read_descriptors(owner, ours, theirs, timeout=5.0)
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


def reach_out(peer, hello, there):
    """Connect to somebody who cannot be reached, and read."""
    pool = np.zeros(4096, dtype=np.uint8)
    ends = rows(address(pool), (0, 4096)), rows(there, (0, 4096))
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
    owner = start_peer(own, prefix=hosts.enter(0))
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
