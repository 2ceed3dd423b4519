"""Transfers when processes die, hang, or lie; real transfer backends, real processes."""

from __future__ import annotations

import functools
import random
import threading
import time

import numpy as np
import psutil
import pytest
from interpreter import run_python
from mutations import mutate

from pynixlkv import TransferPlan, TransferState
from pynixlkv.agent import num_quarantined_agents
from pynixlkv.errors import HandshakeError, PeerLostError, TransferError
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.testing.remote import Pool, ProcessRemote
from pynixlkv.ucx import UcxAgent

BACKENDS = {
    "nixl, same-host copies": NixlAgent,
    "nixl, tcp": functools.partial(NixlAgent, backend_params={"engine_config": "TLS=tcp"}),
    "ucx, same-host copies": UcxAgent,
    "ucx, tcp": functools.partial(UcxAgent, config={"TLS": "tcp"}),
}
WAIT_S = 60.0
GUARD = 4096
SIZE = 32 << 20


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS))
def make(request):
    return request.param


@pytest.fixture
def remote(closing, make):
    return closing(ProcessRemote(make))


class Guarded:
    """A buffer between guard bytes."""

    def __init__(self, nbytes):
        self.all = np.full(nbytes + 2 * GUARD, 0xA5, dtype=np.uint8)
        self.inside = self.all[GUARD:-GUARD]
        self.address = int(self.inside.__array_interface__["data"][0])

    def guards_are_untouched(self):
        return (self.all[:GUARD] == 0xA5).all() and (self.all[-GUARD:] == 0xA5).all()


def test_a_peer_killed_at_random_moments_never_gives_wrong_bytes(remote, make):
    rng = random.Random(5)
    expected = random_bytes(SIZE, 21)
    parts = [(i, SIZE // 8) for i in range(0, SIZE, SIZE // 8)]
    lost = 0
    with make("reader") as agent:
        for turn in range(8):
            buffer = Guarded(SIZE)
            with agent.register(buffer.all):
                theirs = remote.register_more(SIZE, 21)
                peer = agent.connect(remote.hello())
                assert peer.generation == turn + 1
                killer = threading.Timer(rng.uniform(0.0, 0.06), remote.kill)
                killer.start()
                # Ended by an error of a read, whatever was running when the loss was noticed.
                while lost == turn:
                    buffer.inside[:] = 0
                    try:
                        transfer = agent.read_descriptors(
                            peer, rows(buffer.address, *parts), rows(theirs, *parts), timeout=WAIT_S
                        )
                        transfer.wait()
                    except PeerLostError:
                        lost += 1
                    else:
                        assert np.array_equal(buffer.inside, expected)
                assert agent.quarantined == 0 or transfer.wait_quiet(WAIT_S)
                assert buffer.guards_are_untouched()
                killer.join()
            remote.start()
    assert lost == 8


def pull(peer, make, hello, theirs):
    """Read again and again, until killed."""
    with make("victim") as agent:
        buffer = Guarded(SIZE)
        agent.register(buffer.all)
        owner = agent.connect(hello)
        pieces = [(i, SIZE // 64) for i in range(0, SIZE, SIZE // 64)]
        ends = rows(buffer.address, *pieces), rows(theirs, *pieces)
        transfers = [agent.read_descriptors(owner, *ends) for _ in range(20)]
        peer.send("pulling")
        transfers[-1].wait(WAIT_S)
        peer.receive()


@pytest.mark.parametrize(
    "make",
    # Over TCP, UCX may end the process that is read, and NixlAgent cannot keep it from that; see
    # "An owner's life over TCP" in docs/concepts/libraries.md.
    [make for name, make in BACKENDS.items() if name != "nixl, tcp"],
    ids=[name for name in BACKENDS if name != "nixl, tcp"],
)
def test_a_killed_reader_does_not_harm_the_one_that_is_read(remote, make, start_peer):
    theirs = remote.register_more(SIZE, 22)
    for _ in range(3):
        victim = start_peer(pull, make, remote.hello(), theirs)
        assert victim.receive() == "pulling"
        victim.kill()
    with make("survivor") as agent:
        buffer = Guarded(SIZE)
        agent.register(buffer.all)
        peer = agent.connect(remote.hello())
        agent.read_descriptors(peer, rows(buffer.address, (0, SIZE)), rows(theirs, (0, SIZE))).wait(
            WAIT_S
        )
        assert np.array_equal(buffer.inside, random_bytes(SIZE, 22))
        assert buffer.guards_are_untouched()


class _Spy:
    """Passes everything on and remembers what was called."""

    def __init__(self, native):
        self._native = native
        self.calls = []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self._native, name)


def test_no_mutated_hello_reaches_the_library(make):
    rng = random.Random(11)
    with make("a") as a, make("b") as b:
        pool = Pool()
        b.register(pool.cache)
        good = b.hello(pool.cache)
        spy = a._native = _Spy(a._native)
        for _ in range(10_000):
            with pytest.raises(HandshakeError):
                a.connect(mutate(good, rng))
        assert "connect" not in spy.calls
        assert a.connect(good).name == "b"
        assert "connect" in spy.calls
        a._native = spy._native


def test_ten_thousand_transfers_leave_nothing_behind(remote, make):
    process = psutil.Process()
    pool = Pool("BNKHD")
    with make("many") as agent:
        agent.register(pool.cache)
        remote.fill(1)
        peer = agent.connect(remote.hello())
        plan = TransferPlan(pool.cache.geometry, peer.geometry)

        def pull(count):
            for i in range(count):
                agent.read(peer, plan, [i % 64], [(i + 1) % 64]).wait(WAIT_S)

        pull(1_000)  # pools and caches fill up
        rss = process.memory_info().rss
        pull(10_000)
        grown = process.memory_info().rss - rss
    assert grown < 4 << 20, f"{grown} bytes"


@pytest.mark.parametrize("make", [BACKENDS["nixl, tcp"], BACKENDS["ucx, tcp"]], ids=["nixl", "ucx"])
def test_an_agent_dropped_with_a_hung_transfer_keeps_its_memory_until_quiet(make):
    remote = ProcessRemote(make)
    try:
        buffer = np.zeros(SIZE, dtype=np.uint8)
        address = int(buffer.__array_interface__["data"][0])
        theirs = remote.register_more(SIZE, 23)
        agent = make("dropped")
        agent.register(buffer)
        peer = agent.connect(remote.hello())
        both = rows(address, (0, SIZE)), rows(theirs, (0, SIZE))
        # One that waits for its connection would be quiet when it ends.
        agent.read_descriptors(peer, *both).wait(WAIT_S)
        remote.pause()
        transfer = agent.read_descriptors(peer, *both)
        native = transfer._native
        deadline = time.monotonic() + WAIT_S
        while transfer.state is not TransferState.RUNNING:
            assert time.monotonic() < deadline
        with pytest.warns(ResourceWarning, match="dropped without close"):
            del agent, peer, transfer
        assert num_quarantined_agents() == 1
        assert native.wait(WAIT_S)
        assert native.state == TransferState.CANCELLED
        assert not native.is_quiet
        remote.resume()
        assert native.wait(WAIT_S, for_quiet=True)
        deadline = time.monotonic() + WAIT_S
        while num_quarantined_agents() > 0:
            assert time.monotonic() < deadline
    finally:
        remote.close()


def test_a_refused_read_names_what_arrived(remote, make):
    cache = Pool().cache
    with make("late") as agent:
        agent.register(cache)
        peer = agent.connect(remote.hello())
        remote.kill()
        with pytest.raises(TransferError) as caught:
            agent.read(
                peer, TransferPlan(cache.geometry, peer.geometry), range(64), range(64)
            ).wait(WAIT_S)
        assert caught.value.peer == "remote"
        assert caught.value.bytes_done == 0
        cause = caught.value.__cause__
        assert cause is None or cause.library == agent.transfer_backend


LIMITED = """
import os, resource
from pynixlkv.errors import PynixlkvError
from pynixlkv.nixl import NixlAgent
from pynixlkv.ucx import UcxAgent
kind = {"nixl": NixlAgent, "ucx": UcxAgent}[os.environ["KIND"]]
spare = int(os.environ["SPARE"])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
try:
    with kind("a") as a, kind("b") as b:
        a.connect(b.hello())
        print("done")
except PynixlkvError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_too_few_descriptors_are_an_error(backend):
    for spare in range(0, 109, 9):
        answer = run_python(LIMITED, KIND=backend, SPARE=str(spare))
        if spare < 32 or spare > 100:
            assert answer == ("ResourceExhausted" if spare < 32 else "done"), spare


SINKING = """
import resource, time
import numpy as np
from pynixlkv.testing.conformance import rows
from pynixlkv.ucx import UcxAgent
here, there = np.zeros(4096, np.uint8), np.full(4096, 7, np.uint8)
with UcxAgent("a") as a, UcxAgent("b") as b:
    a.register(here), b.register(there)
    peer = a.connect(b.hello())
    ends = rows(here.ctypes.data, (0, 4096)), rows(there.ctypes.data, (0, 4096))
    a.read_descriptors(peer, *ends, notify=b"first").wait(60)
    b.notifications(60)
    here[:] = 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    used = time.process_time()
    time.sleep(1)  # a busy machine only takes time away from threads that do not sleep
    used = time.process_time() - used
    a.read_descriptors(peer, *ends, notify=b"read").wait(60)
    note = b.notifications(60)[0].message
    print(used < 0.5, (here == 7).all(), note)
"""


def test_agents_sleep_and_work_when_no_descriptor_may_be_polled():
    # NIXL's own thread does not work then: its transfers time out.
    assert run_python(SINKING) == "True True b'read'"


FORKED = """
import os, warnings
from pynixlkv.errors import ForkError
from pynixlkv.nixl import NixlAgent
from pynixlkv.ucx import UcxAgent
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
kind = {"nixl": NixlAgent, "ucx": UcxAgent}[os.environ["KIND"]]
with kind("a"):
    child = os.fork()
    if child == 0:
        try:
            kind("b")
        except ForkError:
            os._exit(7)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_a_forked_child_is_refused_an_agent_that_could_not_work(backend):
    assert run_python(FORKED, KIND=backend) == "7"
