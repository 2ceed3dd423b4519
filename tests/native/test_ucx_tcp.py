"""Host memory over tcp: its owner serves it through lanes. The ports that agents open."""

import numpy as np
import psutil
import pytest

from pynixlkv.errors import TransferError
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.types import TransferState
from pynixlkv.ucx import UcxAgent

WAIT_S = 60.0
SIZE = 1 << 20
TCP = {"TLS": "tcp"}


@pytest.fixture
def pair():
    """An owner, a connected reader, and the memory of both."""
    with UcxAgent("owner", config=TCP) as owner, UcxAgent("reader", config=TCP) as reader:
        theirs, here = random_bytes(SIZE, 1).copy(), np.zeros(SIZE, dtype=np.uint8)
        registration = owner.register(theirs)
        reader.register(here)
        peer = reader.connect(owner.hello())
        yield owner, reader, peer, theirs, here, registration


def both(theirs, here, *pieces):
    return rows(here.ctypes.data, *pieces), rows(theirs.ctypes.data, *pieces)


@pytest.mark.parametrize("nbytes", [1, 8, 16_383, 16_384, 16_385, 100_000, SIZE])
def test_rows_of_any_length_arrive_whole(pair, nbytes):
    _, reader, peer, theirs, here, _ = pair
    pieces = [(i, min(nbytes, SIZE - i)) for i in range(0, SIZE, max(nbytes, 4096))]
    inside = np.zeros(SIZE, dtype=bool)
    for start, length in pieces:
        inside[start : start + length] = True
    reader.read_descriptors(peer, *both(theirs, here, *pieces)).wait(WAIT_S)
    assert np.array_equal(here[inside], theirs[inside])
    assert not here[~inside].any()
    here[:] = random_bytes(SIZE, 2)
    before = theirs.copy()
    reader.write_descriptors(peer, *both(theirs, here, *pieces)).wait(WAIT_S)
    assert np.array_equal(theirs[inside], here[inside])
    assert np.array_equal(theirs[~inside], before[~inside])


@pytest.mark.parametrize("op", ["read", "write"])
def test_deregistered_memory_is_refused(pair, op):
    owner, reader, peer, theirs, here, registration = pair
    kept = random_bytes(SIZE, 3).copy()
    owner.register(kept)
    reader.connect(owner.hello())
    registration.close()
    before = theirs.copy()
    move = reader.read_descriptors if op == "read" else reader.write_descriptors
    transfer = move(peer, *both(theirs, here, (0, SIZE)))
    with pytest.raises(TransferError, match=r"which refuses: .* is not registered"):
        transfer.wait(WAIT_S)
    assert transfer.state is TransferState.FAILED
    assert transfer.wait_quiet(WAIT_S)
    assert np.array_equal(theirs, before)
    assert not here.any()
    # The connection stands, and registered memory is still reached.
    reader.read_descriptors(peer, *both(kept, here, (0, SIZE))).wait(WAIT_S)
    assert np.array_equal(here, kept)


def restricted(backend, name):
    """Make an agent that opens ports on the loopback interface alone."""
    if backend == "ucx":
        return UcxAgent(name, config={"NET_DEVICES": "lo"})
    settings = NixlAgent.default_backend_params("UCX")["engine_config"]
    return NixlAgent(name, backend_params={"engine_config": f"{settings},NET_DEVICES=lo"})


def listening():
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("backend", ["ucx", "nixl"])
def test_ports_are_opened_on_the_interface_of_net_devices_alone(backend):
    before = listening()
    here, there = np.zeros(4096, np.uint8), random_bytes(4096, 1)
    with restricted(backend, "a") as a, restricted(backend, "b") as b:
        opened = listening() - before
        assert {address.ip for address in opened} == {"127.0.0.1"}
        a.register(here)
        b.register(there)
        ends = rows(here.ctypes.data, (0, 4096)), rows(there.ctypes.data, (0, 4096))
        a.read_descriptors(a.connect(b.hello()), *ends).wait(60)
        assert np.array_equal(here, there)
