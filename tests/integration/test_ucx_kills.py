"""Processes that are killed at random moments: no hang, no wrong byte called done, nothing leaked.

``PYNIXLKV_KILLS`` sets how many owners are killed, and how many users.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pynixlkv.errors import PeerLostError, UcxError
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.types import TransferState
from pynixlkv.ucx import UcxAgent

log = logging.getLogger(__name__)
SEED = 20
WAIT_S = 60.0
SIZE = 8 << 20
PIECE = 64 << 10
GUARD = 4096
# A process is killed up to this long after it may be connected to: before, during or after the
# handshake, between transfers, and within them.
LONGEST_S = 0.15
TRANSPORTS = [
    {"config": {"TLS": "tcp"}, "allocate": False},
    {"config": {}, "allocate": False},
    {"config": {}, "allocate": True},
]
IDS = ["tcp", "same-host copies", "memory of UCX"]
KILLS = math.ceil(int(os.environ.get("PYNIXLKV_KILLS", "6")) / len(TRANSPORTS))

pytestmark = pytest.mark.timeout(60 + 10 * KILLS)


def make_pool(agent, nbytes, allocate):
    return agent.allocate(nbytes) if allocate else np.zeros(nbytes, dtype=np.uint8)


def scattered(base, order):
    return rows(base, *[(int(i) * PIECE, PIECE) for i in order])


def open_files():
    """Count open files by what they are; of sockets and pipes only the kind."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that is listed through
            targets.append(str(link.readlink()).partition("[")[0])
    return Counter(targets)


@pytest.fixture(autouse=True)
def no_open_files(request):
    """Every file that a test opens is closed after it, but for what UCX opens once."""
    with UcxAgent("first"):
        pass
    before = open_files()
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed == failed_before:
        gc.collect()
        assert not open_files() - before


@pytest.fixture
def victims(start_peer):
    """Processes that run a function, started one ahead: starting takes longer than a turn."""

    def start(function, *args):
        def each():
            following = start_peer(function, *args)
            for turn in range(KILLS):
                current = following
                if turn + 1 < KILLS:
                    following = start_peer(function, *args)
                yield current

        return each()

    return start


def kill_soon(victim, rng):
    killer = threading.Timer(rng.uniform(0.0, LONGEST_S), victim.process.kill)
    killer.start()
    return killer


def own(peer, config, allocate):
    """Own bytes until killed."""
    agent = UcxAgent("owner", config=config)
    pool = make_pool(agent, SIZE, allocate)
    pool[:] = random_bytes(SIZE, SEED)
    agent.register(pool)
    peer.send((agent.hello(), pool.ctypes.data))
    peer.receive()


@pytest.mark.parametrize("transport", TRANSPORTS, ids=IDS)
def test_owners_are_killed_at_random_moments(victims, transport):
    rng = random.Random(SEED)
    expected = random_bytes(SIZE, SEED).reshape(-1, PIECE)
    counts = dict.fromkeys(("done", "lost", "refused"), 0)
    with UcxAgent("reader", config=transport["config"]) as agent:
        whole = np.full(SIZE + 2 * GUARD, 0xA5, dtype=np.uint8)
        inside = whole[GUARD:-GUARD]
        agent.register(whole)
        for victim in victims(own, *transport.values()):
            hello, there = victim.receive()
            killer = kill_soon(victim, rng)
            transfer = None
            try:
                peer = agent.connect(hello)
                while True:
                    inside[:] = 0
                    order = np.array(rng.sample(range(SIZE // PIECE), SIZE // PIECE))
                    transfer = agent.read_descriptors(
                        peer,
                        scattered(inside.ctypes.data, range(SIZE // PIECE)),
                        scattered(there, order),
                        timeout=WAIT_S,
                    )
                    transfer.wait()  # a hang ends as timed out, which fails the test
                    assert np.array_equal(inside.reshape(-1, PIECE), expected[order])
                    counts["done"] += 1
            except PeerLostError:
                counts["lost"] += 1
                assert transfer is None or transfer.wait_quiet(WAIT_S)
                assert not agent.is_alive(peer)
            except UcxError:  # it was dead before the connection was made
                counts["refused"] += 1
            killer.join()
            victim.kill()
            assert agent.quarantined == 0
            assert (whole[:GUARD] == 0xA5).all()
            assert (whole[-GUARD:] == 0xA5).all()
    log.info("%d owners killed: %s", KILLS, counts)
    assert counts["lost"] + counts["refused"] == KILLS


def use(peer, config, allocate, hello, there, scratch):
    """Read and write memory of the owner until killed; say so if bytes are wrong."""
    agent = UcxAgent("user", config=config)
    pool = make_pool(agent, SIZE, allocate)
    agent.register(pool)
    peer.send(agent.hello())
    owner = agent.connect(hello)
    expected = random_bytes(SIZE, SEED).reshape(-1, PIECE)
    rng = np.random.default_rng(os.getpid())
    while True:
        order = rng.permutation(SIZE // PIECE)
        here = scattered(pool.ctypes.data, range(SIZE // PIECE))
        pool[:] = 0
        agent.read_descriptors(owner, here, scattered(there, order), timeout=WAIT_S).wait()
        if not np.array_equal(pool.reshape(-1, PIECE), expected[order]):
            peer.send("wrong bytes")
        agent.write_descriptors(
            owner, here, scattered(scratch, order), notify=b"written", timeout=WAIT_S
        ).wait()


@pytest.mark.parametrize("transport", TRANSPORTS, ids=IDS)
def test_users_are_killed_at_random_moments(victims, transport):
    rng = random.Random(SEED)
    with UcxAgent("owner", config=transport["config"]) as agent:
        pool = make_pool(agent, SIZE, transport["allocate"])
        pool[:] = random_bytes(SIZE, SEED)
        written = make_pool(agent, SIZE + 2 * GUARD, transport["allocate"])
        written[:] = 0xA5
        agent.register(pool, written)
        given = agent.hello(), pool.ctypes.data, written.ctypes.data + GUARD
        notes = 0
        for victim in victims(use, *transport.values(), *given):
            hello = victim.receive()
            killer = kill_soon(victim, rng)
            try:
                peer = agent.connect(hello)
                while not killer.finished.is_set():
                    agent.notify(peer, b"from the owner")
                    notes += len(agent.notifications(0.002))
            except (PeerLostError, UcxError):
                pass  # it is gone already
            else:
                deadline = time.monotonic() + WAIT_S
                while agent.is_alive(peer):
                    assert time.monotonic() < deadline
                with pytest.raises(PeerLostError):
                    agent.notify(peer, b"to nobody")
            killer.join()
            said = victim.last_words()
            assert said == [], said
            assert np.array_equal(pool, random_bytes(SIZE, SEED))
            assert (written[:GUARD] == 0xA5).all()
            assert (written[-GUARD:] == 0xA5).all()
        log.info("%d users killed, %d writes announced", KILLS, notes)
        # The owner still serves.
        with UcxAgent("survivor", config=transport["config"]) as survivor:
            target = np.zeros(SIZE, dtype=np.uint8)
            survivor.register(target)
            ends = rows(target.ctypes.data, (0, SIZE)), rows(pool.ctypes.data, (0, SIZE))
            transfer = survivor.read_descriptors(survivor.connect(given[0]), *ends)
            transfer.wait(WAIT_S)
            assert transfer.state is TransferState.DONE
            assert np.array_equal(target, pool)
        assert agent.quarantined == 0


def serve(peer, config):
    """Own bytes, and say when a reader is found dead; for as long as readers come."""
    agent = UcxAgent("owner", config=config)
    pool = np.zeros(SIZE, dtype=np.uint8)
    pool[:] = random_bytes(SIZE, SEED)
    agent.register(pool)
    peer.send((agent.hello(), pool.ctypes.data))
    while (hello := peer.receive()) is not None:
        connected = agent.connect(hello)
        deadline = time.monotonic() + WAIT_S
        peer.send("connected")
        peer.receive()
        while agent.is_alive(connected):
            assert time.monotonic() < deadline
        peer.send("found it dead")


def begin_to_read(peer, config, hello):
    """Connect to an owner that has connected to here."""
    agent = UcxAgent("reader", config=config)
    pool = np.zeros(SIZE, dtype=np.uint8)
    agent.register(pool)
    peer.send(agent.hello())
    peer.receive()
    return agent, pool, agent.connect(hello)


def ask_for_much(peer, config, hello, there):
    """Ask for far more bytes than a connection holds."""
    agent, pool, owner = begin_to_read(peer, config, hello)
    reads = [
        agent.read_descriptors(
            owner, rows(pool.ctypes.data, (0, SIZE)), rows(there, (0, SIZE)), timeout=WAIT_S
        )
        for _ in range(64)
    ]
    reads[0].wait()
    peer.send("under way")
    reads[-1].wait()


def test_an_owner_outlives_readers_that_it_owes_bytes(start_peer):
    """Replies that wait for a full socket when the reader dies; see csrc/ucx/lane.hpp.

    The allocator of the owner's process fills what it hands out, so that an object in which
    something was not set does not look fine by chance.
    """
    config = {"TLS": "tcp"}
    owner = start_peer(serve, config, env={"MALLOC_PERTURB_": "253"})
    hello, there = owner.receive()
    for _ in range(3):
        reader = start_peer(ask_for_much, config, hello, there)
        owner.send(reader.receive())
        assert owner.receive() == "connected"
        reader.send("go")
        assert reader.receive() == "under way"
        reader.stop()
        time.sleep(0.2)  # the owner fills the connection
        reader.kill()
        owner.send("look")
        assert owner.receive() == "found it dead"
    with UcxAgent("survivor", config=config) as survivor:
        target = np.zeros(SIZE, dtype=np.uint8)
        survivor.register(target)
        ends = rows(target.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
        survivor.read_descriptors(survivor.connect(hello), *ends, timeout=WAIT_S).wait()
        assert np.array_equal(target, random_bytes(SIZE, SEED))
    owner.send(None)
    owner.finish()


def ask_and_be_killed(peer, config, op, hello, there):
    """Read all; then post far more when told so, to an owner that stands still."""
    agent, pool, owner = begin_to_read(peer, config, hello)
    pieces = range(SIZE // PIECE)
    ends = scattered(pool.ctypes.data, pieces), scattered(there, pieces)
    agent.read_descriptors(owner, *ends).wait(WAIT_S)
    assert np.array_equal(pool, random_bytes(SIZE, SEED))
    peer.send("has read")
    peer.receive()
    move = agent.read_descriptors if op == "read" else agent.write_descriptors
    transfers = [move(owner, *ends, timeout=WAIT_S) for _ in range(4)]
    time.sleep(0.3)  # until no more fits into the connection
    peer.send("asked")
    transfers[-1].wait()


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_owner_that_stood_still_outlives_those_who_were_killed_meanwhile(start_peer, op):
    """It finds their questions, and nobody to answer: UCX's own emulation aborts the owner then."""
    config = {"TLS": "tcp"}
    owner = start_peer(serve, config)
    hello, there = owner.receive()
    for _ in range(3):
        reader = start_peer(ask_and_be_killed, config, op, hello, there)
        owner.send(reader.receive())
        assert owner.receive() == "connected"
        reader.send("go")
        assert reader.receive() == "has read"
        owner.stop()
        reader.send("go")
        assert reader.receive() == "asked"
        reader.kill()
        owner.send("look")
        owner.resume()
        assert owner.receive() == "found it dead"
    owner.send(None)
    owner.finish()
