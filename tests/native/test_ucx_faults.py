"""`UcxAgent` and peers that cannot be reached, do not fit, or deregister memory."""

import functools
import sys

import msgspec
import numpy as np
import pytest

from pynixlkv.errors import (
    HandshakeError,
    NotRegisteredError,
    PeerLostError,
    ProtocolVersionError,
    UcxError,
)
from pynixlkv.hello import Hello
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.remote import ProcessRemote
from pynixlkv.types import TransferState
from pynixlkv.ucx import UcxAgent

WAIT_S = 60.0
SIZE = 64 << 20


@pytest.fixture
def start_remote(closing):
    def start(name="remote", **options):
        return closing(ProcessRemote(functools.partial(UcxAgent, **options), name))

    return start


@pytest.mark.parametrize("sides", ["self self", "self tcp", "tcp self"])
def test_transports_that_do_not_meet_are_an_error_that_names_the_variable(start_remote, sides):
    here, there = sides.split()
    remote = start_remote(config={"TLS": there})
    with UcxAgent("a", config={"TLS": here}) as agent, pytest.raises(UcxError, match="UCX_TLS"):
        agent.connect(remote.hello())


def test_transports_of_the_environment_are_named_too(start_remote, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "self")
    remote = start_remote()
    with UcxAgent("a") as agent:
        assert agent.transport == "UCX, UCX_TLS=self"
        with pytest.raises(UcxError, match="UCX_TLS"):
            agent.connect(remote.hello())


def test_the_address_of_a_dead_process_is_a_lost_peer(start_remote):
    remote = start_remote(config={"TLS": "tcp"})
    hello, there = remote.hello(), remote.address()
    remote.kill()
    array = np.zeros(4096, dtype=np.uint8)
    here = array.ctypes.data
    with UcxAgent("a", config={"TLS": "tcp"}) as agent:
        agent.register(array)
        peer = agent.connect(hello)
        with pytest.raises(PeerLostError):
            agent.read_descriptors(peer, rows(here, (0, 4096)), rows(there, (0, 4096))).wait(WAIT_S)
    assert not array.any()


def _changed(hello, **fields):
    return msgspec.structs.replace(Hello.unseal(hello), **fields).seal()


def test_an_incompatible_peer_is_refused_before_ucx_sees_its_metadata():
    with UcxAgent("a") as a, UcxAgent("b") as b, UcxAgent("c", error_handling=False) as c:
        hello = b.hello()
        other = {"little": "big", "big": "little"}[sys.byteorder]
        with pytest.raises(HandshakeError, match=f"'b' runs on a {other}-endian machine"):
            a.connect(_changed(hello, byte_order=other))
        with pytest.raises(ProtocolVersionError, match=r"'b' runs ucx 1\.2\.3"):
            a.connect(_changed(hello, backend_version="1.2.3"))
        with pytest.raises(HandshakeError, match="error handling off"):
            a.connect(c.hello())
        with pytest.raises(HandshakeError, match="error handling on"):
            c.connect(hello)
        metadata = Hello.unseal(hello).metadata
        for bad in (metadata[:-1], metadata + b"x", metadata[:8], b"", metadata[::-1]):
            with pytest.raises(HandshakeError):
                a.connect(_changed(hello, metadata=bad))
        assert a.connect(_changed(hello)).name == "b"


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_memory_that_its_owner_deregisters_during_a_read(start_remote, tls):
    """Success and failure are both allowed; the next hello no longer lists the memory."""
    remote = start_remote(config={"TLS": tls})
    there = remote.register_more(SIZE, 3)
    array = np.zeros(SIZE, dtype=np.uint8)
    here = array.ctypes.data
    pieces = [(i, SIZE // 64) for i in range(0, SIZE, SIZE // 64)]
    with UcxAgent("a", config={"TLS": tls}) as agent:
        agent.register(array)
        peer = agent.connect(remote.hello())
        running = agent.read_descriptors(peer, rows(here, *pieces), rows(there, *pieces))
        remote.deregister_more()
        assert running.wait_quiet(WAIT_S)
        assert running.state in (TransferState.DONE, TransferState.FAILED, TransferState.PEER_LOST)
        assert agent.is_alive(peer)
        peer = agent.connect(remote.hello())
        with pytest.raises(NotRegisteredError):
            agent.read_descriptors(peer, rows(here, (0, 8)), rows(there, (0, 8)))
