"""Hellos with a valid digest that lie, strangers' messages, and memory that goes away."""

import contextlib
import mmap
import os
import random
import struct
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from mutations import mutate

from pynixlkv.errors import (
    ConfigError,
    NotRegisteredError,
    PeerLostError,
    PynixlkvError,
    RegistrationError,
    StateError,
    TransferError,
)
from pynixlkv.geometry import KVCache
from pynixlkv.hello import Hello
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import rows
from pynixlkv.testing.contents import random_bytes
from pynixlkv.types import MemorySpan, MemoryType
from pynixlkv.ucx import UcxAgent

WAIT_S = 60.0
SIZE = 1 << 16


def address(array):
    return array.ctypes.data


def changed(hello, change, **fields):
    """Return the hello with other metadata, and a digest that fits."""
    body = Hello.unseal(hello)
    return msgspec.structs.replace(body, metadata=change(body.metadata), **fields).seal()


def claim_more(peer, op, far):
    """Reach beyond the memory of a key; the process must live."""
    with UcxAgent("owner") as owner, UcxAgent("reader") as reader:
        pool = owner.allocate(SIZE)
        pool[:] = 7
        owner.register(pool)
        here = np.zeros(SIZE, np.uint8)
        reader.register(here)
        claimed = 1 << 40
        true, false = (struct.pack("<QQQ", address(pool), n, 0) for n in (SIZE, claimed))
        hello = changed(
            owner.hello(),
            lambda metadata: metadata.replace(true, false),
            spans=[MemorySpan(address(pool), claimed, MemoryType.DRAM, 0)],
        )
        there = reader.connect(hello)
        move = getattr(reader, op)
        ends = rows(address(here), (0, SIZE)), rows(address(pool) + far, (0, SIZE))
        transfer = move(there, *ends, timeout=WAIT_S)
        assert transfer.wait_quiet(WAIT_S)
        return transfer.state.name, bool((here == 7).all())


@pytest.mark.parametrize("op", ["read_descriptors", "write_descriptors"])
@pytest.mark.parametrize("far", [0, 1, SIZE, 1 << 30, 1 << 39])
def test_memory_beyond_a_key_is_not_reached(start_peer, op, far):
    state, is_read = start_peer(claim_more, op, far).finish()
    assert state == ("DONE" if far == 0 else "FAILED")
    assert is_read == (far == 0 and op == "read_descriptors")


def own_memory(peer):
    """Have an agent with memory of its own, until the end."""
    with UcxAgent("third") as agent:
        array = np.full(SIZE, 3, np.uint8)
        agent.register(array)
        peer.send((agent.hello(), address(array)))
        peer.receive()
        return bool((array == 3).all())


def test_a_hello_with_the_number_of_another_process_does_not_reach_it(start_peer):
    owner, third = start_peer(own_memory), start_peer(own_memory)
    hello, there = owner.receive()
    third.receive()
    numbers = [struct.pack("<I", process.process.pid) for process in (owner, third)]
    assert numbers[0] in Hello.unseal(hello).metadata
    with UcxAgent("reader") as reader:
        here = np.zeros(SIZE, np.uint8)
        reader.register(here)
        peer = reader.connect(changed(hello, lambda metadata: metadata.replace(*numbers)))
        ends = rows(address(here), (0, SIZE)), rows(there, (0, SIZE))
        # Over TCP instead, from the process that the hello is of.
        reader.read_descriptors(peer, *ends).wait(WAIT_S)
        assert (here == 3).all()
        here[:] = 9
        reader.write_descriptors(peer, *ends).wait(WAIT_S)
    for process, is_untouched in ((third, True), (owner, False)):
        process.send("end")
        assert process.finish() is is_untouched


def connect_to_each(peer, hellos, config):
    """Return why each was refused, None for those that were not."""
    reasons = []
    with UcxAgent("reader", config=config) as agent:
        for hello in hellos:
            try:
                agent.disconnect(agent.connect(hello))
                reasons.append(None)
            except PynixlkvError as error:
                reasons.append(f"{type(error).__name__}: {error}")
    return reasons


def test_damaged_addresses_end_no_process(start_peer):
    rng = np.random.default_rng(3)
    with UcxAgent("owner", config={"TLS": "tcp"}) as owner:
        good = owner.hello()
        (length,) = struct.unpack_from("<I", Hello.unseal(good).metadata, 17)

        def with_address(made):
            return changed(
                good, lambda m: m[:17] + struct.pack("<I", len(made)) + made + m[21 + length :]
            )

        true = Hello.unseal(good).metadata[21 : 21 + length]
        bad = [b"x", true[:1], true[:-1], true + b"\0", rng.bytes(length), b"\0" * length]
        bad += [true[:at] + rng.bytes(1) for at in range(1, length)]
        hellos = [with_address(made) for made in bad]
        assert len(start_peer(connect_to_each, hellos, {"TLS": "tcp"}).finish()) == len(bad)


KEYED = [({}, "allocated"), ({}, "ordinary"), ({"TLS": "tcp"}, "ordinary")]


@pytest.mark.parametrize(("config", "kind"), KEYED)
def test_damaged_keys_end_no_process(start_peer, config, kind):
    with UcxAgent("owner", config=config) as owner:
        memory = owner.allocate(SIZE) if kind == "allocated" else np.zeros(SIZE, np.uint8)
        owner.register(memory)
        good = owner.hello()
        metadata = Hello.unseal(good).metadata
        at = metadata.index(struct.pack("<QQQ", address(memory), SIZE, 0)) + 28
        (length,) = struct.unpack_from("<I", metadata, at - 4)
        true = metadata[at:]
        assert len(true) == length

        def with_key(made):
            return changed(good, lambda m: m[: at - 4] + struct.pack("<I", len(made)) + made)

        of_types = [true[:8] + bytes([number]) + true[9:] for number in range(256)]
        ending = [true[:end] for end in range(8 + true[8])]
        rng = random.Random(5)
        damaged = [mutate(true, rng) for _ in range(300)]
        # A key names shared memory by its number: only that of this test is tried.
        damaged = [made for made in damaged if made[10:] == true[10:] or kind == "ordinary"]
        hellos = [with_key(made) for made in [*of_types, *ending, *damaged]]
        reasons = start_peer(connect_to_each, hellos, config).finish()
    assert len(reasons) == len(hellos)
    assert reasons[0] is None
    for number in range(2, 256):
        assert "WireError" in reasons[number]
        assert f"memory of type {number}; expected 0 (host) or 1 (CUDA)" in reasons[number]
    assert all("WireError" in reason for reason in reasons[256 : 256 + len(ending)])


def shared_files():
    """The files of this process that UCX shares memory through."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "ucx_shm" in str(file.readlink()):
                found.add(file)
    return found


def serve_mapped(peer, config):
    """Serve allocated memory, and truncate it when told."""
    with UcxAgent("owner", config=config) as agent:
        before = shared_files()
        pool = agent.allocate(SIZE)
        (file,) = shared_files() - before
        pool[:] = random_bytes(SIZE, 1)
        agent.register(pool)
        peer.send((agent.hello(), address(pool)))
        peer.receive()
        os.truncate(file, SIZE // 2)
        peer.send("truncated")
        peer.receive()
        return bool((pool[: SIZE // 2] == 9).all())


def test_shared_memory_that_its_owner_truncates_fails_the_transfer_alone(start_peer):
    config = {"TLS": "posix,self,tcp"}
    owner = start_peer(serve_mapped, config)
    hello, there = owner.receive()
    half = SIZE // 2
    with UcxAgent("reader", config=config) as reader:
        here = np.zeros(SIZE, np.uint8)
        reader.register(here)
        peer = reader.connect(hello)
        whole = rows(address(here), (0, SIZE)), rows(there, (0, SIZE))
        first = rows(address(here), (0, half)), rows(there, (0, half))
        reader.read_descriptors(peer, *whole).wait(WAIT_S)
        assert np.array_equal(here, random_bytes(SIZE, 1))
        owner.send("truncate")
        owner.receive()
        for move in (reader.read_descriptors, reader.write_descriptors):
            with pytest.raises(TransferError, match="no longer mapped"):
                move(peer, *whole).wait(WAIT_S)
        here[:] = 0
        reader.read_descriptors(peer, *first).wait(WAIT_S)
        assert np.array_equal(here[:half], random_bytes(SIZE, 1)[:half])
        here[:] = 9
        reader.write_descriptors(peer, *first).wait(WAIT_S)
    owner.send("end")
    assert owner.finish()


def test_a_connection_that_closes_at_once_leaves_no_descriptor(start_peer):
    owner = start_peer(own_memory)
    hello, _ = owner.receive()
    theirs, ours = psutil.Process(owner.process.pid), psutil.Process()
    with UcxAgent("reader") as agent:
        agent.disconnect(agent.connect(hello))
        before = theirs.num_fds(), ours.num_fds()
        for _ in range(30):
            agent.disconnect(agent.connect(hello))
        agent.connect(hello)
        deadline = time.monotonic() + WAIT_S
        while theirs.num_fds() - before[0] >= 10 or ours.num_fds() - before[1] >= 10:
            assert time.monotonic() < deadline
    owner.send("end")
    owner.finish()


def serve_fragile(peer, config, path):
    """Register a read-only mapping and one of a file, which the test truncates."""
    with UcxAgent("owner", config=config) as agent:
        size = mmap.PAGESIZE * 4
        private = mmap.mmap(
            -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
        )
        read_only = np.frombuffer(private, np.uint8)
        with path.open("r+b") as file:
            of_file = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        agent.register(read_only, of_file)
        peer.send((agent.hello(), address(read_only), address(of_file)))
        peer.receive()
        return "alive"


@pytest.mark.parametrize("config", [{}, {"TLS": "tcp"}], ids=["same host", "tcp"])
def test_read_only_and_truncated_memory_of_an_owner(start_peer, tmp_path, config):
    path = tmp_path / "pool"
    size = mmap.PAGESIZE * 4
    path.write_bytes(random_bytes(size, 1).tobytes())
    owner = start_peer(serve_fragile, config, path)
    hello, read_only, of_file = owner.receive()
    with UcxAgent("reader", config=config) as agent:
        here = np.ones(size, np.uint8)
        agent.register(here)
        mine = rows(address(here), (0, size))
        peer = agent.connect(hello)
        agent.read_descriptors(peer, mine, rows(read_only, (0, size))).wait(WAIT_S)
        assert not here.any()
        with pytest.raises(NotRegisteredError, match="read-only memory of peer 'owner'"):
            agent.write_descriptors(peer, mine, rows(read_only, (0, size)))
        # One that does not say so: the owner, or its kernel, refuses.
        body = Hello.unseal(hello)
        spans = [msgspec.structs.replace(span, read_only=False) for span in body.spans]
        peer = agent.connect(msgspec.structs.replace(body, spans=spans).seal())
        with pytest.raises((TransferError, PeerLostError)):
            agent.write_descriptors(peer, mine, rows(read_only, (0, size))).wait(WAIT_S)
        peer = agent.connect(hello)
        agent.read_descriptors(peer, mine, rows(of_file, (0, size))).wait(WAIT_S)
        assert np.array_equal(here, random_bytes(size, 1))
        os.truncate(path, 0)
        for move in (agent.read_descriptors, agent.write_descriptors):
            with pytest.raises((TransferError, PeerLostError)):
                move(agent.connect(hello), mine, rows(of_file, (0, size))).wait(WAIT_S)
    owner.send("end")
    assert owner.finish() == "alive"


def test_nixl_refuses_memory_that_it_could_not_protect():
    array = np.zeros(SIZE, np.uint8)
    array.flags.writeable = False
    with NixlAgent("a") as agent, pytest.raises(PynixlkvError, match="is read-only"):
        agent.register(array)


def test_a_local_source_is_not_read_into():
    source, target = np.full(SIZE, 5, np.uint8), np.zeros(SIZE, np.uint8)
    source.flags.writeable = False
    cache = KVCache.from_tensors({"0": source.reshape(4, 16, 1, 1024)}, axes="BHND", kv_heads=16)
    with UcxAgent("a") as a, UcxAgent("b") as b:
        a.register(cache)
        b.register(target)
        peer = a.connect(b.hello())
        ends = rows(address(source), (0, SIZE)), rows(address(target), (0, SIZE))
        with pytest.raises(NotRegisteredError, match="read-only memory of agent 'a'"):
            a.read_descriptors(peer, *ends)
        a.write_descriptors(peer, *ends).wait(WAIT_S)
        assert (target == 5).all()


def test_a_killed_process_is_noticed_though_its_child_lives(start_peer):
    owner = start_peer(have_a_child)
    hello, child = owner.receive()
    try:
        with UcxAgent("reader", config={"TLS": "tcp"}) as agent:
            peer = agent.connect(hello)
            assert agent.is_alive(peer)
            owner.kill()
            assert psutil.Process(child).is_running()
            seen = 0
            while peer.is_connected:  # noticed without being asked
                seen = agent.wait_activity(seen, 0.05)
            assert not agent.is_alive(peer)
    finally:
        psutil.Process(child).kill()


def have_a_child(peer):
    agent = UcxAgent("owner", config={"TLS": "tcp"})
    child = os.fork()
    if child == 0:
        threading.Event().wait(WAIT_S)
        os._exit(0)
    peer.send((agent.hello(), child))
    peer.receive()


def test_untaken_notifications_are_bounded_and_the_loss_is_told():
    with UcxAgent("a") as a, UcxAgent("b") as b:
        peer = a.connect(b.hello())
        sent = 100
        for i in range(sent):
            a.notify(peer, bytes([i]) * (1 << 20))
        a.notify(peer, b"last")
        taken, told = [], ""
        while not told and b"last" not in taken[-1:]:
            try:
                taken += [note.message for note in b.notifications(WAIT_S)]
            except StateError as error:
                told = str(error)
        assert "notifications of peer 'a' were dropped" in told or len(taken) == sent + 1
        if told:  # none is missing between those that were kept
            assert taken == [bytes([i]) * (1 << 20) for i in range(len(taken))]


def test_a_name_is_bounded():
    with UcxAgent("n" * 512) as a, UcxAgent("b") as b:
        a.notify(a.connect(b.hello()), b"here")
        assert b.notifications(WAIT_S)[0].peer == a.name
    with pytest.raises(ConfigError, match="513 bytes"):
        UcxAgent("n" * 513)


@pytest.mark.parametrize("device", [0, 64])
def test_allocated_host_memory_is_not_taken_for_device_memory(device):
    with UcxAgent("a") as agent:
        memory = np.asarray(agent.allocate(SIZE))
        span = MemorySpan(
            address=address(memory), nbytes=SIZE, memory=MemoryType.VRAM, device=device
        )
        with pytest.raises(RegistrationError):
            agent.register(span)
        agent.register(memory)
