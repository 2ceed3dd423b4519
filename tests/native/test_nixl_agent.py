"""`NixlAgent` beyond the conformance suite."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter import run_python

from pynixlkv import KVCache, MemorySpan, MemoryType, TransferPlan
from pynixlkv.errors import (
    ConfigError,
    HandshakeError,
    LayoutError,
    NixlError,
    ProtocolVersionError,
    RegistrationError,
)
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.testing.conformance import rows

BLOCKS = 512


@pytest.fixture
def pair():
    """Two agents of this process with a cache of many small blocks each."""
    shape = (2, BLOCKS, 4, 16, 8)
    rng = np.random.default_rng(3)
    sides = []
    with NixlAgent("a") as a, NixlAgent("b") as b:
        for agent in (a, b):
            tensors = {
                f"layer.{i}": rng.integers(0, 1 << 16, shape, dtype=np.uint16) for i in range(8)
            }
            cache = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=4)
            agent.register(cache)
            sides.append((agent, tensors, cache))
        yield sides


def test_scattered_blocks_come_to_be_chosen_from_prepared_rows(pair):
    (a, ours, cache), (b, theirs, other) = pair
    peer = a.connect(b.hello(other))
    plan = TransferPlan(cache.geometry, peer.geometry)
    rng = np.random.default_rng(4)
    seen = []
    for _ in range(30):
        here, there = rng.permutation(BLOCKS)[:200], rng.permutation(BLOCKS)[:200]
        before = {name: array.copy() for name, array in ours.items()}
        result = a.read(peer, plan, here, there).wait(60.0)
        seen.append(result.prepared)
        assert result.bytes == 8 * 2 * 200 * 4 * 16 * 8 * 2
        for name, array in ours.items():
            before[name][:, here] = theirs[name][:, there]
            assert np.array_equal(array, before[name])
    # From when on, and whether for ever, is decided by costs that are measured meanwhile.
    assert not seen[0]
    assert any(seen)
    # Contiguous blocks merge to a few rows, which no list of unmerged ones can beat; neither can
    # part of a block be chosen from them.
    assert not a.read(peer, plan, range(300), range(100, 400)).wait(60.0).prepared
    assert not a.read(peer, plan, here, there, num_tokens=199 * 16 + 3).wait(60.0).prepared


def test_prepared_rows_do_not_keep_memory_registered(pair):
    (a, _, cache), (b, _, other) = pair
    peer = a.connect(b.hello(other))
    plan = TransferPlan(cache.geometry, peer.geometry)
    rng = np.random.default_rng(5)
    seen = []
    while not any(seen) and len(seen) < 100:
        tables = rng.permutation(BLOCKS), rng.permutation(BLOCKS)
        seen.append(a.read(peer, plan, *tables).wait(60.0).prepared)
    assert any(seen)
    (registration,) = a.registrations
    registration.close()
    with a.register(cache):
        assert not a.read(peer, plan, [5, 1], [9, 2]).wait(60.0).prepared


def test_another_transfer_backend_or_release_is_refused(pair, monkeypatch):
    (a, _, _), (b, _, _) = pair
    with FakeAgent("fake", FakeNetwork()) as fake:
        hello = fake.hello()
    with pytest.raises(HandshakeError, match=r"transfer backend 'fake'.*'nixl'"):
        a.connect(hello)
    monkeypatch.setattr(b, "_backend_version", "0.9.0")
    with pytest.raises(ProtocolVersionError, match=r"nixl 0\.9\.0") as caught:
        a.connect(b.hello())
    assert caught.value.remote_version == "0.9.0"


def test_a_backend_or_parameter_that_does_not_exist(monkeypatch):
    with pytest.raises(NixlError, match="NOSUCH"):
        NixlAgent("x", backend="NOSUCH")
    with pytest.raises(NixlError):
        NixlAgent("x", backend_params={"ucx_error_handling_mode": "sideways"})
    with pytest.raises(ConfigError, match="num_threads"):
        NixlAgent("x", backend_params={"num_threads": 1})
    with pytest.raises(ConfigError, match="name"):
        NixlAgent("")
    monkeypatch.setattr("pynixlkv.nixl.agent._STORAGE", frozenset())
    with pytest.raises(ConfigError, match="POSIX reaches no peer"):
        NixlAgent("x", backend="POSIX")


def test_memory_that_the_backend_does_not_move():
    array = np.zeros(4096, np.uint8)
    address = int(array.__array_interface__["data"][0])
    with NixlAgent("a") as agent:
        with pytest.raises(RegistrationError, match="UCX backend does not move FILE memory"):
            agent.register(MemorySpan(address, 4096, MemoryType.FILE, 0))
        # Host memory that claims to be on a GPU: UCX looks, here and where there is a GPU.
        with pytest.raises(NixlError, match="VRAM"):
            agent.register(MemorySpan(address, 4096, MemoryType.VRAM, 0))
        assert agent.registrations == ()


def test_the_registration_cache_is_bounded_unless_the_user_says_otherwise():
    with NixlAgent("a") as agent:
        assert "RCACHE_MAX_UNRELEASED=1024" in agent.backend_params["engine_config"]
    with NixlAgent("a", backend_params={"engine_config": ""}) as agent:
        assert agent.backend_params["engine_config"] == ""


def test_no_usable_transport_names_ucx_tls(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(NixlError, match="UCX_TLS"):
        NixlAgent("x")


def test_leaving_without_close_ends_the_process_cleanly():
    code = """
import numpy as np
from pynixlkv.nixl import NixlAgent
a, b = NixlAgent("a"), NixlAgent("b")
x = np.zeros(1 << 20, np.uint8); y = np.ones(1 << 20, np.uint8)
a.register(x); b.register(y)
peer = a.connect(b.hello())
rows = lambda v: np.array([(v.__array_interface__["data"][0], v.nbytes, 0)], np.uint64)
a.read_descriptors(peer, rows(x), rows(y)).wait(60.0)
assert x.all()
print("moved")
"""
    assert run_python(code) == "moved"


def test_memory_beside_the_registered_one_is_out_of_reach(pair):
    (a, _, _), (b, _, other) = pair
    peer = a.connect(b.hello(other))
    span = other.spans[0]
    ours = a.registrations[0].spans[0].address
    for offset, length in [(-1, 2), (span.nbytes - 1, 2), (span.nbytes, 1)]:
        with pytest.raises(ConfigError, match="peer 'b'"):
            a.read_descriptors(peer, rows(ours, (0, length)), rows(span.address, (offset, length)))


def pull(target, source, here, there):
    with NixlAgent("a") as a, NixlAgent("b") as b:
        a.register(target)
        b.register(source)
        peer = a.connect(b.hello(source))
        a.read(peer, TransferPlan(target.geometry, peer.geometry), here, there).wait(60.0)


def test_torch_tensors_move_as_arrays_do():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(6)
    theirs = torch.randn((2, 32, 4, 16, 8), generator=generator).to(torch.bfloat16)
    ours = torch.zeros((2, 32, 16, 4, 8), dtype=torch.bfloat16)
    source = KVCache.from_tensors({"0": theirs}, axes="KBHND", kv_heads=4)
    target = KVCache.from_tensors({"0": ours}, axes="KBNHD", kv_heads=4)
    pull(target, source, torch.tensor([3, 30]), torch.tensor([7, 1]))
    assert torch.equal(ours[:, [3, 30]], theirs[:, [7, 1]].transpose(2, 3))
    assert ours[:, :3].count_nonzero() == ours[:, 4:30].count_nonzero() == 0
    with NixlAgent("a") as a:
        with pytest.raises(LayoutError, match="not contiguous"):
            a.register(torch.zeros((8, 8))[:, ::2])
        with a.register(torch.ones(64)) as registration:
            assert registration.nbytes == 256


def test_an_array_pulls_from_a_tensor():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(2 * 4 * 2 * 4 * 8, dtype=torch.int32).reshape(2, 4, 2, 4, 8)
    ours = np.zeros((2, 4, 2, 4, 8), dtype=np.int32)
    source = KVCache.from_tensors({"0": theirs}, axes="KBHND", kv_heads=2)
    target = KVCache.from_tensors({"0": ours}, axes="KBHND", kv_heads=2)
    pull(target, source, [0, 3], [1, 2])
    assert np.array_equal(ours[:, [0, 3]], theirs.numpy()[:, [1, 2]])
