"""Memory that its owner serves by messages, over tcp; see csrc/ucx/served.hpp."""

import random
import struct

import numpy as np
import pytest

from pynixlkv.errors import TransferError, WireError
from pynixlkv.hello import Hello
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.types import TransferState
from pynixlkv.ucx import Context, Endpoint, UcxAgent, Worker, am_send_nbx, binding

WAIT_S = 60.0
SIZE = 1 << 20
TCP = {"TLS": "tcp"}
MESSAGE_ID = 77  # kMessageId of csrc/ucx/connection.hpp
HEADER = struct.Struct("=B3xIQQQQ")  # ServedHeader of csrc/ucx/served.hpp
OPEN, CLOSE, READ, WRITE, DATA, END = range(6)


def address(array):
    return int(array.__array_interface__["data"][0])


@pytest.fixture
def pair():
    """An owner, a reader that is connected to it, and the memory of both."""
    with UcxAgent("owner", config=TCP) as owner, UcxAgent("reader", config=TCP) as reader:
        theirs, here = random_bytes(SIZE, 1).copy(), np.zeros(SIZE, dtype=np.uint8)
        registration = owner.register(theirs)
        reader.register(here)
        peer = reader.connect(owner.hello())
        yield owner, reader, peer, theirs, here, registration


def wait_for_notification(agent):
    while not (arrived := agent.notifications(0.2)):
        pass
    return arrived


def both(theirs, here, *pieces):
    return rows(address(here), *pieces), rows(address(theirs), *pieces)


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
def test_what_the_owner_has_deregistered_is_refused(pair, op):
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
    # The connection stands, and what is registered is served.
    reader.read_descriptors(peer, *both(kept, here, (0, SIZE))).wait(WAIT_S)
    assert np.array_equal(here, kept)


def test_messages_that_nobody_would_send_harm_nobody(pair):
    owner, reader, peer, theirs, here, _ = pair
    rng = random.Random(4)
    inside, outside = address(theirs), address(theirs) + SIZE

    def forged():
        kind = rng.choice([OPEN, CLOSE, READ, WRITE, DATA, END])
        places = (0, inside, outside - 8, outside, rng.getrandbits(64), (1 << 64) - 1)
        lengths = (0, 1, 8, 16, rng.getrandbits(64), (1 << 64) - 1)
        place = rng.choice(places)
        header = HEADER.pack(
            kind, rng.choice((0, 1, rng.getrandbits(32))), rng.choice((1, rng.getrandbits(64))),
            rng.choice((0, 1, 2, rng.getrandbits(64))), place, rng.choice(lengths),
        )  # fmt: skip
        if kind == OPEN:
            return header, b""  # an address is the one thing that must be believed
        if kind == WRITE:  # what is inside may be written by whoever has the hello
            return header, bytes(SIZE + 1 if place == inside else 16 << 10)
        pairs = rng.choice((0, 1, 100))
        words = [rng.choice((*places, *lengths)) for _ in range(2 * pairs)]
        return header, struct.pack(f"={len(words)}Q", *words) + bytes(rng.choice((0, 0, 3)))

    before = theirs.copy()
    metadata = Hello.unseal(owner.hello()).metadata
    length = struct.unpack_from("<I", metadata, 9)[0]
    to = metadata[13 : 13 + length]
    worker = Worker(Context(config=TCP))
    endpoint = Endpoint(worker, binding._seal(binding._ADDRESS_MAGIC, to))
    for _ in range(2_000):
        header, data = forged()
        header = header[: rng.choice((len(header), len(header), rng.randrange(len(header))))]
        am_send_nbx(endpoint, MESSAGE_ID, header, data).wait(WAIT_S)
    endpoint.close()
    with pytest.raises(WireError):
        wait_for_notification(owner)
    assert np.array_equal(theirs, before)
    reader.read_descriptors(peer, *both(theirs, here, (0, SIZE))).wait(WAIT_S)
    assert np.array_equal(here, theirs)
