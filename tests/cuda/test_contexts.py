"""Contexts, devices and drivers: what an agent does with them, and leaves alone."""

import functools
import os
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cuda_memory import (
    DeviceArray,
    DevicePool,
    SecondDevicePool,
    StreamOrderedPool,
    VmmPool,
    count,
    current,
    current_context,
    driver,
    num_cards,
)

from pynixlkv import _loader
from pynixlkv.errors import NixlError, RegistrationError, RegistrationInUseError, TransferTimeout
from pynixlkv.hello import Hello
from pynixlkv.nixl import NixlAgent
from pynixlkv.plan import TransferPlan
from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.testing.conformance import WAIT_S
from pynixlkv.testing.process import RunError
from pynixlkv.testing.remote import Pool, ProcessRemote
from pynixlkv.types import MemorySpan, MemoryType
from pynixlkv.ucx import UcxAgent

BACKENDS = pytest.mark.parametrize("make", [UcxAgent, NixlAgent], ids=["ucx", "nixl"])
BLOCKS = range(Pool.NUM_BLOCKS)
THROUGH_HOST = "moves to and from peer 'remote' through host memory and "
TWO_CARDS = pytest.mark.usefixtures("two_cards")


@pytest.fixture
def two_cards():
    if num_cards() < 2:
        pytest.skip("needs two cards")


@pytest.fixture
def connect(closing):
    """Return a function that connects an agent with a pool to a remote with another."""

    def start(make, pool, make_remote_pool=DevicePool, name="local"):
        agent = closing(make(name))
        remote = closing(ProcessRemote(make, make_pool=make_remote_pool))
        agent.register(pool.cache)
        peer = agent.connect(remote.hello())
        remote.connect(agent.hello(pool.cache))
        return agent, remote, peer

    return start


def read_all(agent, pool, peer, **options):
    plan = TransferPlan(pool.cache.geometry, peer.geometry)
    return agent.read(peer, plan, BLOCKS, BLOCKS, **options)


def check_both_ways(agent, pool, peer, remote):
    """Move the whole pool both ways, and compare every byte."""
    remote.fill(1)
    pool.fill(2)
    read_all(agent, pool, peer).wait(WAIT_S)
    assert pool.bytes.tobytes() == remote.content()
    pool.fill(3)
    plan = TransferPlan(pool.cache.geometry, peer.geometry)
    agent.write(peer, plan, BLOCKS, BLOCKS).wait(WAIT_S)
    assert pool.bytes.tobytes() == remote.content()


# ---- threads


@BACKENDS
@TWO_CARDS
def test_threads_of_the_caller_are_left_as_they_were(make, connect):
    pool = DevicePool()
    assert current_context() is None
    agent, remote, peer = connect(make, pool)
    check_both_ways(agent, pool, peer, remote)
    assert current_context() is None
    with current(1):
        mine = current_context()
        check_both_ways(agent, pool, peer, remote)
        agent.register(DeviceArray([64]))
        agent.close()
        assert current_context() == mine


@pytest.mark.stub
@BACKENDS
def test_what_an_agent_retains_it_releases_at_close(make, connect):
    pool, other = DevicePool(), SecondDevicePool()
    before = count("retained")
    agent, remote, peer = connect(make, pool)
    agent.register(other.cache)
    check_both_ways(agent, pool, peer, remote)
    assert count("retained") >= before + 2
    assert agent.close(WAIT_S)
    assert count("retained") == before


def move(channel, make):
    """Do what `check_both_ways` does."""
    pool = DevicePool()
    remote = ProcessRemote(make, make_pool=DevicePool)
    with make("local") as agent:
        agent.register(pool.cache)
        peer = agent.connect(remote.hello())
        check_both_ways(agent, pool, peer, remote)
    remote.close()


@pytest.mark.stub
@BACKENDS
def test_device_memory_moves_only_with_our_contexts(make, start_peer):
    start_peer(move, make, env={"CUDA_STUB_DEAF_TO": "of no library"}).finish()
    without = start_peer(move, make, env={"CUDA_STUB_DEAF_TO": "/_native."})
    with pytest.raises(RunError):
        without.finish()


# ---- devices


@BACKENDS
@TWO_CARDS
def test_cards_of_one_agent_and_unlike_cards(make, connect):
    first, second = DevicePool(), SecondDevicePool()
    agent, remote, peer = connect(make, first)
    agent.register(second.cache)
    for pool in (first, second, first):
        check_both_ways(agent, pool, peer, remote)


@pytest.mark.stub
@BACKENDS
@pytest.mark.parametrize(
    ("make_pool", "setting"),
    [
        (DevicePool, None),
        (VmmPool, "unset expandable_segments"),
        (StreamOrderedPool, "unset backend:cudaMallocAsync"),
    ],
)
def test_memory_of_each_kind_moves_and_is_named_if_it_is_slow(
    make, make_pool, setting, connect, caplog
):
    pool = make_pool()
    before = count("ipc open")
    agent, remote, peer = connect(make, pool, make_pool)
    check_both_ways(agent, pool, peer, remote)
    used = read_all(agent, pool, peer).wait(WAIT_S).transports
    assert used == peer.transports
    assert "tcp" in used or make is NixlAgent
    is_direct = setting is None
    assert (count("ipc open") > before) is is_direct
    assert ("cuda_ipc" in used) is (is_direct and make is UcxAgent)
    assert ("other processes of this host cannot reach" in caplog.text) is not is_direct
    assert (f"GPU memory, 0.5 MiB of both sides, {THROUGH_HOST}" in caplog.text) is not is_direct
    if setting is not None:
        assert setting in caplog.text


@pytest.mark.stub
@BACKENDS
def test_the_kind_of_the_peers_memory_decides(make, connect, caplog):
    # The side that posts opens the memory of the other.
    mine, theirs = VmmPool(), DevicePool()
    before = count("ipc open")
    agent, remote, peer = connect(make, mine)
    check_both_ways(agent, mine, peer, remote)
    assert count("ipc open") > before
    assert THROUGH_HOST not in caplog.text
    other, remote, peer = connect(make, theirs, VmmPool, name="other")
    opened = count("ipc open")
    check_both_ways(other, theirs, peer, remote)
    assert count("ipc open") == opened
    assert f"GPU memory, 0.5 MiB of both sides, {THROUGH_HOST}" in caplog.text


@pytest.mark.stub
@pytest.mark.parametrize("is_here", [True, False])
def test_a_nixl_peer_of_another_host_is_reached_through_this_one(is_here, connect, caplog):
    # NIXL does not say which transports it uses; cuda_ipc is one between processes of a host.
    agent, remote, peer = connect(NixlAgent, DevicePool())
    assert THROUGH_HOST not in caplog.text
    agent.disconnect(peer)
    body = Hello.unseal(remote.hello())
    if not is_here:
        body = msgspec.structs.replace(body, incarnation=os.urandom(16))
    agent.connect(body.seal())
    assert (THROUGH_HOST in caplog.text) is not is_here


@BACKENDS
def test_managed_memory_is_refused(make, closing):
    agent = closing(make("a"))
    with pytest.raises(RegistrationError, match=r"managed memory .* allocate it with cudaMalloc"):
        agent.register(DeviceArray([64], kind="managed"))
    assert agent.registrations == ()


@pytest.mark.stub
def test_a_refusal_of_the_library_names_the_kind_and_the_setting(closing):
    # UCX without a transport for device memory refuses it, as network cards refuse some kinds.
    agent = closing(NixlAgent("a", backend_params={"engine_config": "TLS=tcp"}))
    with pytest.raises(NixlError, match=r"virtual memory .* unset expandable_segments"):
        agent.register(VmmPool().cache)
    with pytest.raises(NixlError) as caught:
        agent.register(DevicePool().cache)
    assert "PYTORCH" not in str(caught.value)


@pytest.mark.stub
@pytest.mark.parametrize(("kind", "is_named"), [("plain", False), ("vmm", True)])
def test_memory_that_network_cards_cannot_reach_is_named(
    kind, is_named, closing, tmp_path, monkeypatch, caplog
):
    agent = closing(UcxAgent("a"))
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(_loader, "_RDMA_DEVICES", tmp_path)
    agent.register(*(DeviceArray([64], kind=kind) for _ in range(2)))
    assert ("256 bytes on GPU 0 are" in caplog.text) is is_named
    assert ("the network cards mlx5_0 cannot reach" in caplog.text) is is_named


@BACKENDS
@TWO_CARDS
def test_memory_from_before_and_after_the_start_of_the_library(make, connect, monkeypatch, closing):
    # The remote's pool is made before its agent, in a new process; this one after its agent.
    # Both number their cards differently.
    agent = closing(make("local"))
    pool = DevicePool()
    agent.register(pool.cache)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    remote = closing(ProcessRemote(make, make_pool=DevicePool))
    peer = agent.connect(remote.hello())
    check_both_ways(agent, pool, peer, remote)


@BACKENDS
@TWO_CARDS
def test_a_wrong_device_and_memory_that_is_none_are_refused(make, closing):
    agent = closing(make("a"))
    array = DeviceArray([4096], np.uint8)
    host = np.zeros(4096, np.uint8)
    address = array.address
    for span, text in [
        (MemorySpan(address, 4096, MemoryType.VRAM, 1), "memory of GPU 0, not of 1"),
        (MemorySpan(host.ctypes.data, 4096, MemoryType.VRAM, 0), "not memory of one GPU"),
        (MemorySpan(address, 1 << 30, MemoryType.VRAM, 0), "not memory of one GPU"),
    ]:
        with pytest.raises(RegistrationError, match=text):
            agent.register(span)
    array.free()
    with pytest.raises(RegistrationError, match="was it freed"):
        agent.register(array)
    assert agent.registrations == ()


BYTES_PER_TOKEN = 2 * Pool.HEADS * Pool.DIM * 2


@pytest.mark.stub
def test_the_transports_of_a_transfer_are_in_its_result(connect, caplog):
    pool = DevicePool()
    agent, remote, peer = connect(UcxAgent, pool)
    remote.fill(1)
    assert "cuda_ipc" in read_all(agent, pool, peer).wait(WAIT_S).transports
    assert "through host memory" not in caplog.text


@pytest.mark.parametrize(
    ("make", "their_pool", "mib"),
    [
        (functools.partial(UcxAgent, config={"TLS": "tcp,cuda_copy"}), Pool, "0.2"),
        (functools.partial(NixlAgent, backend_params={"engine_config": "TLS=^cuda_ipc"}),
         DevicePool, "0.5"),
    ],
    ids=["ucx", "nixl"],
)  # fmt: skip
def test_ways_through_the_host_are_named_with_bytes(make, their_pool, mib, connect, caplog):
    connect(make, DevicePool(), their_pool)
    assert f"GPU memory, {mib} MiB of both sides, moves to and from peer 'remote'" in caplog.text
    assert re.search(r"through host memory and [a-z, ]*tcp", caplog.text)
    assert f"{BYTES_PER_TOKEN / 1024:.1f} KiB for each token" in caplog.text


@pytest.mark.stub
@BACKENDS
def test_the_log_says_at_the_start_what_is_used(make, closing, caplog):
    caplog.set_level("INFO", "pynixlkv")
    closing(make("a"))
    (line,) = [each for each in caplog.messages if each.startswith(f"{make.__name__} 'a' on ")]
    assert "host memory moves by " in line
    assert "same host: cuda_ipc, from GPU to GPU" in line
    assert "missing RDMA: " in line


# ---- drivers


def register_one(channel):
    """Register memory that claims to be on a card, and return what was said."""
    array = np.zeros(4096, np.uint8)
    with UcxAgent("a", config={"TLS": "tcp"}) as agent:
        try:
            agent.register(MemorySpan(array.ctypes.data, 4096, MemoryType.VRAM, 0))
        except RegistrationError as error:
            return str(error)
    return ""


@pytest.mark.stub
@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"CUDA_STUB_INIT_ERROR": "999"}, "did not start, cuInit: error 999, unknown error"),
        ({"CUDA_STUB_INIT_ERROR": "803", "CUDA_STUB_VERSION": "11040"}, "driver for CUDA 11.4"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "no CUDA-capable device"),
    ],
)
def test_a_driver_that_does_not_start_is_named(environment, text, start_peer):
    said = start_peer(register_one, env=environment).finish()
    assert text in said
    assert "nvidia-smi" in said


@pytest.mark.stub
def test_a_driver_without_the_functions_that_are_needed_is_named(start_peer, tmp_path):
    (stub,) = (Path(folder) for folder in os.environ["LD_LIBRARY_PATH"].split(":")[:1])
    shutil.copy(stub / "libcudart.so.12", tmp_path / "libcuda.so.1")  # has none of them
    said = start_peer(register_one, env={"LD_LIBRARY_PATH": str(tmp_path)}).finish()
    assert "the CUDA driver is too old: " in said
    assert "cuInit" in said


def register_with_fake(channel):
    """Give a FakeAgent memory of a card; return what was said, and the CUDA libraries here."""
    with FakeAgent("a", FakeNetwork()) as agent:
        try:
            agent.register(MemorySpan(1 << 45, 4096, MemoryType.VRAM, 0))
        except RegistrationError as error:
            return str(error), cuda_libraries()
    return "", []


def test_a_fake_agent_refuses_device_memory_and_opens_no_driver(start_peer):
    said, opened = start_peer(register_with_fake).finish()
    assert "is not host memory" in said
    assert opened == []


def cuda_libraries():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda" in line]


def move_host_memory(channel):
    """Move host memory between two agents, and return the CUDA libraries of this process."""
    with UcxAgent("a") as a, UcxAgent("b") as b:
        ours, theirs = Pool(), Pool()
        a.register(ours.cache)
        b.register(theirs.cache)
        peer = a.connect(b.hello(theirs.cache))
        theirs.fill(1)
        read_all(a, ours, peer).wait(WAIT_S)
        assert np.array_equal(ours.bytes, theirs.bytes)
    return cuda_libraries()


def test_a_process_without_device_memory_opens_no_driver(start_peer):
    # UCX's own modules would.
    assert start_peer(move_host_memory, env={"UCX_MODULES": "^cuda"}).finish() == []


# ---- late copies


@pytest.mark.stub
@BACKENDS
def test_a_transfer_ends_when_its_copies_have(make, connect):
    pool = DevicePool()
    agent, remote, peer = connect(make, pool)
    remote.fill(1)
    pool.fill(2)
    before = pool.bytes.copy()
    driver().cudaStubHold(1)
    try:
        late = read_all(agent, pool, peer, notify=b"late", timeout=0.3)
        with pytest.raises(TransferTimeout):
            late.wait(WAIT_S)
        assert not late.is_quiet
        assert remote.notifications(0.0) == []
        assert np.array_equal(pool.bytes, before)
        with pytest.raises(RegistrationInUseError):
            agent.registrations[0].close()
        transfer = read_all(agent, pool, peer, notify=b"done")
        assert not transfer.done()
    finally:
        driver().cudaStubHold(0)
    transfer.wait(WAIT_S)
    assert late.wait_quiet(WAIT_S)
    assert remote.notifications(WAIT_S) == [("local", b"done")]
    assert pool.bytes.tobytes() == remote.content()


@pytest.mark.stub
@BACKENDS
def test_reading_device_memory_of_a_stopped_process_needs_nothing_of_it(make, connect):
    pool = DevicePool()
    agent, remote, peer = connect(make, pool)
    check_both_ways(agent, pool, peer, remote)
    content = remote.content()
    pool.fill(9)
    opened = count("ipc open")
    assert opened > 0
    remote.pause()
    read_all(agent, pool, peer).wait(WAIT_S)
    remote.resume()
    assert pool.bytes.tobytes() == content
