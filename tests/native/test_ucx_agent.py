"""`UcxAgent` beyond the conformance suite: allocated memory, settings, two UCX copies."""

import os
import re
import time

import numpy as np
import pytest
from interpreter import run_python

from pynixlkv import _loader
from pynixlkv.errors import ClosedError, ConfigError, PeerLostError, RegistrationError, UcxError
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.types import MemorySpan, MemoryType
from pynixlkv.ucx import UcxAgent

WAIT_S = 60.0
SIZE = 4 << 20


@pytest.fixture
def make_agent():
    made = []

    def make(name, **options):
        made.append(UcxAgent(name, **options))
        return made[-1]

    yield make
    for agent in made:
        assert agent.close(WAIT_S)


def own_pool(peer, options, takes_part):
    """An agent with a pool of allocated memory, which it only uses if it takes part."""
    with UcxAgent("owner", **options) as agent:
        pool = agent.allocate((64, SIZE // 64))
        pool[:] = random_bytes(SIZE, 1).reshape(pool.shape)
        agent.register(pool)
        peer.send((agent.hello(), pool.ctypes.data))
        connected = agent.connect(peer.receive())
        peer.send("connected")
        if takes_part:
            (note,) = agent.notifications(WAIT_S)
            assert np.array_equal(pool.reshape(-1), random_bytes(SIZE, 2))
            agent.notify(connected, note.message[::-1])
        peer.receive()
        return pool.tobytes()


@pytest.fixture
def connect(start_peer, make_agent):
    def start(config=None, *, takes_part=True, error_handling=True):
        options = {"config": config, "error_handling": error_handling}
        owner = start_peer(own_pool, options, takes_part)
        hello, there = owner.receive()
        agent = make_agent("reader", **options)
        owner.send(agent.hello())
        assert owner.receive() == "connected"
        return owner, agent, agent.connect(hello), there

    return start


@pytest.mark.parametrize("config", [{}, {"TLS": "tcp"}], ids=["shared", "tcp"])
@pytest.mark.parametrize("ours", ["allocated", "ordinary"])
def test_allocated_memory_is_read_and_written_like_any_other(connect, config, ours):
    owner, agent, peer, there = connect(config)
    here = agent.allocate(SIZE) if ours == "allocated" else np.zeros(SIZE, dtype=np.uint8)
    agent.register(here)
    block = 16384
    order = np.random.default_rng(5).permutation(SIZE // block)
    local = rows(here.ctypes.data, *[(i * block, block) for i in range(len(order))])
    remote = rows(there, *[(int(i) * block, block) for i in order])
    agent.read_descriptors(peer, local, remote).wait(WAIT_S)
    expected = random_bytes(SIZE, 1).reshape(-1, block)[order]
    assert np.array_equal(here.reshape(-1, block), expected)
    here[:] = random_bytes(SIZE, 2)
    both = rows(here.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
    agent.write_descriptors(peer, *both, notify=b"written").wait(WAIT_S)
    (note,) = agent.notifications(WAIT_S)
    assert note.message == b"nettirw"
    owner.send("end")
    assert owner.finish() == random_bytes(SIZE, 2).tobytes()


@pytest.mark.parametrize("transports", ["all", "tcp,posix"])
def test_allocated_memory_is_read_while_its_owner_is_stopped(connect, transports):
    owner, agent, peer, there = connect(takes_part=False, config={"TLS": transports})
    here = np.zeros(SIZE, dtype=np.uint8)
    agent.register(here)
    agent.read_descriptors(peer, rows(here.ctypes.data, (0, 8)), rows(there, (0, 8))).wait(WAIT_S)
    owner.stop()
    agent.read_descriptors(
        peer, rows(here.ctypes.data, (0, SIZE)), rows(there, (0, SIZE)), timeout=WAIT_S
    ).wait(WAIT_S)
    assert np.array_equal(here, random_bytes(SIZE, 1))
    owner.resume()
    owner.send("end")
    owner.finish()


def test_the_death_of_an_owner_of_allocated_memory_is_noticed(connect):
    owner, agent, peer, there = connect(takes_part=False)
    here = np.zeros(SIZE, dtype=np.uint8)
    agent.register(here)
    owner.kill()
    with pytest.raises(PeerLostError):
        agent.read_descriptors(
            peer, rows(here.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
        ).wait(WAIT_S)


def test_without_error_handling_the_end_of_a_process_of_this_host_is_noticed(connect):
    owner, agent, peer, there = connect(takes_part=False, error_handling=False)
    here = np.zeros(SIZE, dtype=np.uint8)
    agent.register(here)
    owner.kill()
    assert not agent.is_alive(peer)
    ends = rows(here.ctypes.data, (0, SIZE)), rows(there, (0, SIZE))
    with pytest.raises(PeerLostError):
        agent.read_descriptors(peer, *ends).wait(WAIT_S)


def test_a_cache_in_allocated_memory_moves_by_plan(make_agent):
    caches, agents = [], []
    for name, axes in (("a", "KBHND"), ("b", "KBNHD")):
        agent = make_agent(name)
        shape = (2, 16, 4, 8, 32) if axes == "KBHND" else (2, 16, 8, 4, 32)
        tensor = agent.allocate(shape, np.float16)
        assert tensor.shape == shape
        assert not tensor.any()
        tensor.view(np.uint8)[:] = random_bytes(tensor.nbytes, len(agents)).reshape(
            tensor.view(np.uint8).shape
        )
        cache = KVCache.from_tensors({"layer.0": tensor}, axes=axes, kv_heads=4)
        agent.register(cache)
        caches.append((tensor, cache))
        agents.append(agent)
    (here, ours), (there, theirs) = caches
    peer = agents[0].connect(agents[1].hello(theirs))
    agents[0].read(peer, TransferPlan(ours.geometry, peer.geometry), [3, 4], [9, 2]).wait(WAIT_S)
    for mine, its in ((3, 9), (4, 2)):
        moved = here[:, mine].transpose(0, 2, 1, 3)
        assert np.array_equal(moved.view(np.uint16), there[:, its].view(np.uint16))


def test_what_cannot_be_allocated_is_refused(make_agent):
    agent = make_agent("a")
    for shape, dtype in ((0, "u1"), ((4, 0), "u1"), ((-1, -8), "u1"), (4, object)):
        with pytest.raises(ConfigError):
            agent.allocate(shape, dtype)
    with pytest.raises(ConfigError, match="bytes of memory are free"):
        agent.allocate(1 << 60)
    array = agent.allocate((3, 5), np.int32)
    agent.close()
    array[:] = 7  # the array outlives its agent
    with pytest.raises(ClosedError):
        agent.allocate(4)


def test_memory_that_this_ucx_does_not_move_is_refused(make_agent):
    agent = make_agent("a")
    array = np.zeros(64, dtype=np.uint8)
    for kind in (MemoryType.VRAM, MemoryType.FILE):
        if kind is MemoryType.VRAM and "VRAM" in _loader.native_report().memory_types:
            continue
        with pytest.raises(RegistrationError, match=r"does not move|host and GPU memory only"):
            agent.register(MemorySpan(array.ctypes.data, 64, kind, 0))


def test_settings_are_checked_and_shown(make_agent, monkeypatch):
    agent = make_agent("a", config={"TLS": "tcp"})
    settings = {"RNDV_THRESH": "inf", "TCP_CONN_NB": "y", "MAX_EAGER_RAILS": "1"}
    settings |= {"TCP_KEEPIDLE": "5s", "TCP_KEEPINTVL": "2s", "TCP_KEEPCNT": "3"}
    assert agent.config == {**settings, "TLS": "tcp"}
    assert agent.transport == "UCX, UCX_TLS=tcp"
    assert agent.error_handling
    monkeypatch.setenv("UCX_RNDV_THRESH", "64k")
    monkeypatch.setenv("UCX_MAX_EAGER_RAILS", "2")
    # The environment cannot change the order of notifications.
    del settings["RNDV_THRESH"]
    assert make_agent("b").config == settings
    assert os.environ["UCX_MAX_EAGER_RAILS"] == "2"
    with pytest.raises(ConfigError, match="MAX_EAGER_RAILS must be '1'"):
        UcxAgent("c", config={"MAX_EAGER_RAILS": "2"})
    for setting in ({"UNIFIED_MODE": "y"}, {"ADDRESS_VERSION": "v2"}):
        with pytest.raises(ConfigError, match="UCX_UNIFIED_MODE=n and UCX_ADDRESS_VERSION=v1"):
            UcxAgent("c", config=setting)
    with pytest.raises(ConfigError, match="string"):
        UcxAgent("c", config={"TLS": 5})
    with pytest.raises((ConfigError, UcxError), match="no-such"):
        UcxAgent("c", config={"TLS": "no-such"})
    with pytest.raises(ConfigError, match="name"):
        UcxAgent("")


def test_an_idle_agent_sleeps(make_agent):
    agent = make_agent("a")
    agent.notifications(0.2)
    before = time.process_time()
    agent.notifications(1.0)
    assert time.process_time() - before < 0.1


# ---- which UCX


# A transfer between two agents of one process; the arguments name their class.
MOVE = """
import numpy as np

def move(agent_class):
    with agent_class("a") as a, agent_class("b") as b:
        source, target = np.arange(1000), np.zeros(1000, dtype=int)
        a.register(source)
        b.register(target)
        peer = b.connect(a.hello())
        rows = [
            np.array([[x.__array_interface__["data"][0], x.nbytes, 0]], dtype=np.uint64)
            for x in (target, source)
        ]
        b.read_descriptors(peer, *rows).wait(60.0)
        assert (source == target).all()
"""
ENGINES = {"nixl": "NixlAgent", "ucx": "UcxAgent"}


@pytest.mark.parametrize("order", ["nixl ucx", "ucx nixl", "libucx ucx nixl", "ucx libucx nixl"])
def test_two_ucx_copies_work_side_by_side_in_either_order(order):
    if "libucx" in order:
        pytest.importorskip("libucx", reason="needs the libucx wheel")
    code = MOVE
    for part in order.split():
        if part == "libucx":
            code += "import libucx\nlibucx.load_library()\n"
        else:
            code += f"from pynixlkv.{part} import {ENGINES[part]} as {part}\nmove({part})\n"
    code += """
from pynixlkv import _loader
move(ucx)
move(nixl)
loaded = [l.path for l in _loader._loaded_libraries() if "libucp" in l.path]
assert _loader.find_ucx().path in loaded
print(len(loaded))
"""
    expected = 1 if _loader.find_ucx().origin.startswith("nixl") else 2
    assert run_python(code) == str(expected)


def test_the_ucx_inside_nixl_can_be_used(make_agent):
    tried = []
    inside = next(_loader.UCX_IN_NIXL.search(tried), None)
    if inside is None:
        pytest.skip("needs a NIXL distribution with a UCX of its own")
    code = (
        MOVE
        + """
from pynixlkv import _loader
from pynixlkv.types import MemorySpan, MemoryType
from pynixlkv.ucx import UcxAgent
move(UcxAgent)
print(_loader.load_ucx().path, _loader.load_ucx().version)
print(*(l.path for l in _loader._loaded_libraries() if "libucp" in l.path))
"""
    )
    used, loaded = run_python(code, PYNIXLKV_UCX_LIBRARY=inside.path).splitlines()
    assert used.split()[0] == inside.path == loaded
    assert re.fullmatch(r"\d+\.\d+\.\d+", used.split()[1])


def test_nixl_works_without_any_other_ucx():
    code = (
        "import sys; sys.modules['libucx'] = None\n"
        + MOVE
        + """
from pynixlkv import _loader
from pynixlkv.nixl import NixlAgent
move(NixlAgent)
assert not any("libucx" in l.path for l in _loader._loaded_libraries())
"""
    )
    run_python(code)


def test_importing_loads_nothing():
    run_python("""
    import threading
    import pynixlkv.ucx
    assert threading.active_count() == 1
    assert not any("libucp" in line for line in open("/proc/self/maps"))
    """)
