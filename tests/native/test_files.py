"""Files of KV blocks: every byte, killed writers, what disks and stores of objects do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from object_store import ObjectStore

from pynixlkv import KVCache, TransferPlan
from pynixlkv.errors import (
    ConfigError,
    InvalidBlocksError,
    KVCorruptError,
    NixlError,
    NotRegisteredError,
    PlanError,
    RegistrationInUseError,
    StorageError,
    TransferCancelled,
    TransferTimeout,
)
from pynixlkv.nixl import BlockFile, NixlAgent, files
from pynixlkv.testing.contents import random_bytes
from pynixlkv.topology import held_heads
from pynixlkv.types import TransferState

WAIT_S = 60.0
LAYERS, HEADS, DIM = 3, 8, 16


class Rank:
    """A cache of one rank, and its elements by logical coordinates."""

    def __init__(self, axes, tokens, num_blocks, tp=(0, 1), seed=0):
        self.axes, self.tokens, self.heads = axes, tokens, held_heads(*tp, HEADS)
        sizes = {"K": 2, "B": num_blocks, "H": len(self.heads), "N": tokens, "D": DIM}
        shape = [sizes[letter] for letter in axes]
        count = 2 * int(np.prod(shape))
        self.tensors = {
            f"layer.{i}": random_bytes(count, [seed, *tp, i]).view(np.uint16).reshape(shape)
            for i in range(LAYERS)
        }
        self.cache = KVCache.from_tensors(self.tensors, axes=axes, kv_heads=HEADS, tp=tp)

    def values(self, blocks):
        """Return the elements of a block table: layer, K or V, head, token, dim."""
        order = [self.axes.index(letter) for letter in "KHBND"]
        ordered = np.stack([t.transpose(order)[:, :, list(blocks)] for t in self.tensors.values()])
        return ordered.reshape(LAYERS, 2, len(self.heads), -1, DIM)


@pytest.fixture(scope="module")
def all_stores():
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def store(all_stores):
    yield all_stores
    all_stores.answer, all_stores.is_gone = None, False
    all_stores.goes_on.set()


@pytest.fixture
def options(request):
    """How agents are made; of objects in the tests that say `both`."""
    if getattr(request, "param", "POSIX") == "POSIX":
        return {"backend": "POSIX"}
    store = request.getfixturevalue("store")
    return {"backend": "OBJ", "storage_params": store.params()}


both = pytest.mark.parametrize("options", ["POSIX", "OBJ"], indirect=True)
of_objects = pytest.mark.parametrize("options", ["OBJ"], indirect=True)


@pytest.fixture
def agent(options):
    with NixlAgent("a", **options) as made:
        yield made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "blocks"


@pytest.fixture
def written(agent, path):
    """A writer's rank and file, whose blocks 0 to 7 are valid."""
    rank = Rank("KBHND", 16, 8)
    agent.register(rank.cache)
    file = agent.create_file(path, rank.cache, 16)
    plan = TransferPlan(rank.cache.geometry, file.geometry)
    agent.write(file, plan, range(8), range(8)).wait(WAIT_S)
    return rank, file, plan


def plan_to(rank, file):
    return TransferPlan(rank.cache.geometry, file.geometry)


# ---- bytes


@pytest.mark.parametrize(
    ("axes", "tokens", "in_file"),
    [
        (("KBHND", "BNKHD"), (16, 32), ("KBHND", 16)),
        (("BNKHD", "KBHND"), (32, 8), ("BKNHD", 64)),
    ],
    ids=["like the writer", "a layout of its own"],
)
@both
def test_written_by_tp4_and_read_by_tp2(options, tmp_path, axes, tokens, in_file):
    num_tokens = 256
    with NixlAgent("w", **options) as agent:
        writers = [Rank(axes[0], tokens[0], 40, (rank, 4)) for rank in range(4)]
        for number, writer in enumerate(writers):
            agent.register(writer.cache)
            like = Rank(in_file[0], in_file[1], 2, (number, 4)).cache
            with agent.create_file(tmp_path / str(number), like, 24) as file:
                here = list(range(3, 3 + num_tokens // tokens[0]))[::-1]
                there = [(5 * i + 1) % 24 for i in range(num_tokens // in_file[1])]
                plan = TransferPlan(writer.cache.geometry, file.geometry)
                result = agent.write(file, plan, here, there).wait(WAIT_S)
                assert result.bytes == LAYERS * 2 * len(writer.heads) * num_tokens * DIM * 2
                assert file.valid_blocks() == sorted(there)
    with NixlAgent("r", **options) as agent:
        for rank in range(2):
            reader = Rank(axes[1], tokens[1], 40, (rank, 2), seed=1)
            agent.register(reader.cache)
            mine = list(range(2, 2 + num_tokens // tokens[1]))
            others = sorted(set(range(40)) - set(mine))
            before = reader.values(others).copy()
            for number in (2 * rank, 2 * rank + 1):
                with agent.open_file(tmp_path / str(number)) as file:
                    heads = writers[number].heads
                    plan = TransferPlan(reader.cache.geometry, file.geometry, heads=heads)
                    agent.read(file, plan, mine, there).wait(WAIT_S)
            wanted = [w.values(here) for w in writers[2 * rank : 2 * rank + 2]]
            assert np.array_equal(reader.values(mine), np.concatenate(wanted, axis=2))
            assert np.array_equal(reader.values(others), before)


@both
def test_groups_that_share_a_table_move_together(agent, path):
    def make(seed):
        data = random_bytes(6 * 2 * 16 * 64, seed).reshape(2, 6, 16, 2, 32)
        scales = random_bytes(6 * 16 * 4, seed + 1).view(np.float32).reshape(6, 16, 1)
        state = random_bytes(9 * 3 * 20, seed + 2).reshape(9, 3, 20)
        options = {"kv_heads": None}
        return (data, scales, state), KVCache.combine(
            KVCache.from_tensors({"0": data}, axes="KBNHD", kv_heads=2),
            KVCache.from_tensors({"0": scales}, axes="BND", group="scales", table="kv", **options),
            KVCache.from_tensors({"0": state}, axes="BKD", group="state", **options),
        )

    (ours, cache), (theirs, other) = make(1), make(9)
    agent.register(cache, other)
    with agent.create_file(path, cache, {"kv": 4, "state": 2}) as file:
        tables = {"kv": [5, 2, 0], "state": [8]}
        there = {"kv": [3, 0, 1], "state": [1]}
        agent.write(file, TransferPlan(cache.geometry, file.geometry), tables, there).wait(WAIT_S)
        assert [file.valid_blocks(g) for g in ("kv", "scales", "state")] == [[0, 1, 3]] * 2 + [[1]]
        with pytest.raises(ConfigError, match="the file has"):
            file.valid_blocks()
        back = {"kv": [1, 3, 4], "state": [0]}
        agent.read(file, TransferPlan(other.geometry, file.geometry), back, there).wait(WAIT_S)
    assert np.array_equal(theirs[0][:, back["kv"]], ours[0][:, tables["kv"]])
    assert np.array_equal(
        theirs[1][back["kv"]].view(np.uint32), ours[1][tables["kv"]].view(np.uint32)
    )
    assert np.array_equal(theirs[2][0], ours[2][8])


def beside_ucx(options):
    return NixlAgent("a", storage=options["backend"], storage_params=options.get("storage_params"))


@both
def test_a_peer_and_a_file_at_once(options, path):
    """Two geometries: blocks come from a peer over UCX while others go to a file."""
    near, there = Rank("KBHND", 16, 64), Rank("BNKHD", 32, 32, seed=5)
    with NixlAgent("b") as other, beside_ucx(options) as agent:
        other.register(there.cache)
        agent.register(near.cache)
        peer = agent.connect(other.hello(there.cache))
        to_peer = TransferPlan(near.cache.geometry, peer.geometry)
        with agent.create_file(path, Rank("BKNHD", 64, 2).cache, 8) as file:
            to_file = TransferPlan(near.cache.geometry, file.geometry)
            stored = near.values(range(32)).copy()
            moves = [
                agent.write(file, to_file, range(4 * i, 4 * i + 4), [i]) if kind else
                agent.read(peer, to_peer, [32 + 4 * i + j for j in range(4)], [2 * i, 2 * i + 1])
                for i, kind in itertools.product(range(8), (True, False))
            ]  # fmt: skip

            async def all_of_them():
                await asyncio.gather(*moves)

            asyncio.run(all_of_them())
            assert np.array_equal(near.values(range(32, 64)), there.values(range(16)))
            agent.read(file, to_file, range(32, 64), range(8)).wait(WAIT_S)
            assert agent.is_alive(file)
            with pytest.raises(ConfigError, match="no notifications"):
                agent.notify(file, b"x")
        assert np.array_equal(near.values(range(32, 64)), stored)


@both
def test_a_reader_beside_the_writer_gets_whole_blocks_or_none(options, written, path):
    rank, file, plan = written
    rounds = 40
    reader = Rank("BNKHD", 16, 8, seed=3)
    # moto drops an object that is replaced, in the middle of an answer that has it.
    refused = StorageError if options["backend"] == "OBJ" else InvalidBlocksError
    with NixlAgent("r", **options) as other:
        other.register(reader.cache)
        theirs = other.open_file(path)
        read = TransferPlan(reader.cache.geometry, theirs.geometry)
        with ThreadPoolExecutor() as pool:

            def rewrite():
                for i in range(rounds):
                    file._agent.write(file, plan, [i % 8], [3]).wait(WAIT_S)

            writing = pool.submit(rewrite)
            good = 0
            while not writing.done():
                with contextlib.suppress(refused):
                    other.read(theirs, read, [0], [3]).wait(WAIT_S)
                    good += any(
                        np.array_equal(reader.values([0]), rank.values([i])) for i in range(8)
                    ) or pytest.fail("a block of several contents")
            writing.result()
        other.read(theirs, read, [0], [3]).wait(WAIT_S)
        assert np.array_equal(reader.values([0]), rank.values([(rounds - 1) % 8]))


# ---- killed writers


def contents(block, seed):
    """What a killed writer writes: says its seed, from which the rest follows."""
    data = random_bytes(LAYERS * 2 * HEADS * 16 * DIM * 2, [block, seed]).view(np.uint16).copy()
    data[0] = seed
    return data.reshape(LAYERS, 2, HEADS, 16, DIM)


def write_until_killed(channel, options, path, stage):
    rank = Rank("KBHND", 16, 8)
    if stage:
        original = getattr(BlockFile, stage)
        calls = itertools.count()

        def die(self, *args):
            number = next(calls)
            if number == {"_write_record": 3 * 8 + 3, "_digest": 8 + 5}.get(stage, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args)

        setattr(BlockFile, stage, die)
    with NixlAgent("w", **options) as agent:
        agent.register(rank.cache)
        file = agent.open_file(path, writable=True)
        plan = TransferPlan(rank.cache.geometry, file.geometry)
        for seed in itertools.count(1):
            blocks = list(range(8)) if stage or seed == 1 else [seed % 8, (seed * 3 + 1) % 8]
            for block in set(blocks):
                for i, tensor in enumerate(rank.tensors.values()):
                    tensor[:, block] = contents(block, seed)[i]
            agent.write(file, plan, sorted(set(blocks)), sorted(set(blocks))).wait(WAIT_S)
            channel.send((seed, blocks))


@pytest.mark.parametrize(
    ("options", "stage"),
    [("POSIX", stage) for stage in (None, "begin_write", "end_write", "_digest", "_write_record")]
    + [("OBJ", stage) for stage in (None, "end_write", "_digest")],
    indirect=["options"],
)
def test_a_killed_writer_leaves_blocks_that_are_refused_or_right(
    options, agent, path, start_peer, stage
):
    are_objects = options["backend"] == "OBJ"
    rank = Rank("KBHND", 16, 8)
    agent.register(rank.cache)
    agent.create_file(path, rank.cache, 8).close()
    moments = np.random.default_rng(7).uniform(0, 0.2 if are_objects else 0.05, 1 if stage else 4)
    for moment in moments:
        writer = start_peer(write_until_killed, options, str(path), stage)
        done = [writer.receive(WAIT_S)]
        if stage:
            writer.process.wait(WAIT_S)
        else:
            threading.Event().wait(moment)
        done += [value for value in writer.last_words() if value is not None]
        newest = {block: seed for seed, blocks in done for block in blocks}
        with agent.open_file(path) as file:
            plan = TransferPlan(rank.cache.geometry, file.geometry)
            valid, refused = file.valid_blocks(), []
            for block in range(8):
                try:
                    agent.read(file, plan, [block], [block]).wait(WAIT_S)
                except InvalidBlocksError as error:
                    refused.append((block, error.blocks["kv"]))
                    continue
                values = rank.values([block])
                seed = int(values[0, 0, 0, 0, 0])
                assert seed >= newest[block]
                assert np.array_equal(values, contents(block, seed))
            assert refused == [(block, [block]) for block in range(8) if block not in valid]
            # Only what was being written when the writer died is lost; objects never are.
            assert len(valid) >= (8 if are_objects else 0 if stage else 6)
            assert are_objects or len(valid) == {
                "begin_write": 8,
                "end_write": 0,
                "_digest": 5,
                "_write_record": 3,
            }.get(stage, len(valid))


# ---- what goes wrong


def test_files_that_cannot_be_opened(agent, path, tmp_path):
    cache = Rank("KBHND", 16, 2).cache
    agent.create_file(path, cache, 4).close()
    good = path.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "foreign").write_bytes(b"\x7fELF" + bytes(9000))
    (tmp_path / "empty").write_bytes(b"")
    for name, words in {
        "none": "No such file.*create it",
        "pipe": "no regular file",
        "": "no regular file",
        "foreign": "begins with b'.x7fELF",
        "empty": "begins with b''",
    }.items():
        with pytest.raises(StorageError, match=words) as caught:
            agent.open_file(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
    with pytest.raises(StorageError, match=r"File exists.*remove it"):
        agent.create_file(path, cache, 4)
    with pytest.raises(StorageError, match="No such file"):
        agent.create_file(tmp_path / "no" / "folder", cache, 4)
    header = 16 + int.from_bytes(good[8:16], "little")
    rng = np.random.default_rng(1)
    for at in rng.integers(0, header, 150).tolist():
        damaged = bytearray(good)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(StorageError):
            agent.open_file(path)
    for size in (5, 16, 100, header, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(StorageError):
            agent.open_file(path)
    path.write_bytes(good)
    agent.open_file(path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blocks", "empty", "foreign", "pipe"]


def test_a_file_that_says_something_impossible_is_refused(agent, path):
    """Its header is whole, so its digest fits."""
    rank = Rank("KBHND", 16, 2)
    for geometry, words in {
        rank.cache.geometry: "none of a file",
        files._lay_out(rank.cache.geometry, [1 << 22], 0): "its blocks take",
        files._lay_out(rank.cache.geometry, [1 << 40], 0): "blocks, more than",
    }.items():
        sealed = files.wire.seal(files._Header("little", geometry, bytes(16)), "file")
        path.write_bytes(files.PREFIX.pack(b"PNKVFILE", len(sealed)) + sealed + bytes(1 << 20))
        with pytest.raises(StorageError, match=words):
            agent.open_file(path)


def test_one_writer_at_a_time(written, path):
    rank, file, plan = written
    with NixlAgent("other", backend="POSIX") as other:
        with pytest.raises(StorageError, match=r"has a writer already.*at a time"):
            other.open_file(path, writable=True)
        other.register(rank.cache)
        with other.open_file(path) as reader:
            with pytest.raises(StorageError, match="open for reading"):
                other.write(reader, plan, [0], [0])
            with pytest.raises(ConfigError, match="opened by agent 'other'"):
                file._agent.read(reader, plan, [0], [0])
            file.close()
            with pytest.raises(StorageError, match="is closed"):
                file._agent.read(file, plan, [0], [0])
            other.open_file(path, writable=True).close()


def test_damage_is_found_before_anybody_uses_the_blocks(agent, written, path):
    rank, file, plan = written
    values = rank.values(range(8)).copy()
    base = file.geometry.spans[0].address
    nbytes = file.geometry.spans[0].nbytes // 16
    with path.open("r+b") as raw:
        raw.seek(base + 2 * nbytes + 77)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))
        raw.seek(file._at("kv", 6))
        raw.write(b"\4")
    with pytest.raises(KVCorruptError, match="blocks 2 of file"):
        agent.read(file, plan, [0, 1, 2], [1, 2, 3]).wait(WAIT_S)
    with pytest.raises(InvalidBlocksError, match="no valid blocks 6, 9:"):
        agent.read(file, plan, [0, 1, 2], [9, 6, 3]).wait(WAIT_S)
    os.truncate(path, base + 3 * nbytes + 100)
    with pytest.raises(StorageError, match="short"):
        agent.read(file, plan, [4], [4]).wait(WAIT_S)
    agent.read(file, plan, [5], [1]).wait(WAIT_S)  # the file is usable after an error
    assert np.array_equal(rank.values([5]), values[:, :, :, 16:32])


def test_a_closed_descriptor_is_noticed(agent, written, path):
    _, file, plan = written
    for at in [int(at.name) for at in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if at != file._fd and os.path.samestat(os.fstat(at), path.stat()):
                os.close(at)  # the agent's own
    with pytest.raises(StorageError, match="closed the file's descriptor"):
        agent.read(file, plan, [0], [0]).wait(WAIT_S)
    number = os.open(os.devnull, os.O_RDONLY)
    os.dup2(number, file._fd)
    os.close(number)
    with pytest.raises(StorageError, match="closed its descriptor"):
        agent.read(file, plan, [0], [0]).wait(WAIT_S)
    number = file._fd
    file.close()
    os.close(number)  # was left alone


def fill_the_disk(_channel, path, kind):
    rank = Rank("KBHND", 16, 8)
    found = []

    def seen(call):
        with pytest.raises(StorageError) as caught:
            call()
        found.append((caught.value.errno, str(caught.value)))

    with NixlAgent("w", backend="POSIX") as agent:
        agent.register(rank.cache)
        if kind == "small":
            seen(lambda: agent.create_file(path + "/big", rank.cache, 4000))
            found.append(list(Path(path).iterdir()))
        elif kind == "read-only":
            seen(lambda: agent.create_file(path + "/new", rank.cache, 4))
            seen(lambda: agent.open_file(path + "/old", writable=True))
            agent.open_file(path + "/old").close()
        else:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            seen(lambda: agent.create_file(path + "/big", rank.cache, 64))
            file = agent.create_file(path + "/small", rank.cache, 8)
            plan = TransferPlan(rank.cache.geometry, file.geometry)
            limit = file.geometry.spans[0].address + 3 * file.geometry.spans[0].nbytes // 8
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            seen(lambda: agent.write(file, plan, range(8), range(8)).wait(WAIT_S))
            found.append(file.valid_blocks())
            agent.write(file, plan, [1], [1]).wait(WAIT_S)
            found.append(file.valid_blocks())
    return found


def test_full_disks_and_read_only_mounts(agent, tmp_path, start_peer):
    assert_seen = {}
    agent.create_file(tmp_path / "old", Rank("KBHND", 16, 2).cache, 2).close()
    for kind, mount in {
        "small": f"mount -t tmpfs -o size=2m none {tmp_path}",
        "read-only": f"cd {tmp_path} && mount --bind . . && mount -o remount,bind,ro {tmp_path}",
        "limit": "true",
    }.items():
        prefix = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh")
        assert_seen[kind] = start_peer(fill_the_disk, str(tmp_path), kind, prefix=prefix).finish()
    (number, words), left = assert_seen["small"]
    assert (number, left) == (28, [])
    assert "No space left" in words
    assert [number for number, _ in assert_seen["read-only"]] == [30, 30]
    (first, _), (_, second), none, one = assert_seen["limit"]
    assert first == 27
    assert "File too large (errno 27)" in second or "were written" in second
    assert (none, one) == ([], [1])


@both
def test_what_a_write_must_not_do(agent, written):
    rank, file, plan = written
    for blocks, options in (([0], {"num_tokens": 5}), ([0, 1], {"num_tokens": 20})):
        with pytest.raises(PlanError, match="written in whole blocks"):
            agent.write(file, plan, blocks, blocks, **options)
    part = TransferPlan(rank.cache.geometry, file.geometry, layers=[0, 1])
    with pytest.raises(PlanError, match="written in whole blocks: all layers"):
        agent.write(file, part, [0], [0])
    agent.read(file, part, [7], [0], num_tokens=5).wait(WAIT_S)
    assert np.array_equal(rank.values([7])[:2, :, :, :5], rank.values([0])[:2, :, :, :5])
    with pytest.raises(PlanError, match="twice"):
        agent.write(file, plan, [0, 1], [2, 2])
    with pytest.raises(ConfigError, match="no notifications"):
        agent.write(file, plan, [0], [0], notify=b"")
    with pytest.raises(ConfigError, match="positive"):
        agent.write(file, plan, [0], [0], timeout=0)
    with pytest.raises(ConfigError, match="by plans"):
        agent.read_descriptors(file, *plan.descriptors([0], [0]))
    other = Rank("KBHND", 16, 8)
    with pytest.raises(NotRegisteredError):
        agent.write(file, TransferPlan(other.cache.geometry, file.geometry), [0], [0])
    with pytest.raises(PlanError, match="none of those"):
        agent.read(file, TransferPlan(rank.cache.geometry, other.cache.geometry), [0], [0])
    assert file.valid_blocks() == list(range(8))


def test_agents_say_what_they_cannot_do(agent, path):
    cache = Rank("KBHND", 16, 2).cache
    with pytest.raises(ConfigError, match="reaches no peer"):
        agent.hello()
    with NixlAgent("u") as other:
        with pytest.raises(ConfigError, match="reaches no peer"):
            agent.connect(other.hello())
        with pytest.raises(ConfigError, match='storage="POSIX"'):
            other.create_file(path, cache, 2)
    for options in ({"storage": "GDS"}, {"backend": "POSIX", "storage": "GDS"}):
        with pytest.raises(ConfigError, match=r"expected one of|give it"):
            NixlAgent("b", **options)
    for count in (0, {"other": 3}, 1.5):
        with pytest.raises(ConfigError, match="num_blocks"):
            agent.create_file(path, cache, count)
    with pytest.raises(ConfigError, match="expected a KVCache or a Geometry"):
        agent.create_file(path, [1], 2)


def test_a_missing_plugin_is_named(monkeypatch):
    monkeypatch.setattr("pynixlkv.nixl.agent._STORAGE", frozenset({"NO_SUCH"}))
    with pytest.raises(NixlError, match="NO_SUCH"):
        NixlAgent("b", storage="NO_SUCH")


# ---- disks that hang


@pytest.fixture
def hang(monkeypatch):
    """Let flushes hang until the event is set."""
    go_on, original = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: go_on.wait(WAIT_S) and original(fd))
    yield go_on
    go_on.set()


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_a_hung_disk_ends_the_transfer_and_not_the_others(agent, written, tmp_path, hang, end):
    rank, file, plan = written
    transfer = agent.write(file, plan, [1, 2], [5, 6], timeout=0.3 if end == "deadline" else WAIT_S)
    behind = agent.write(file, plan, [3], [7], timeout=WAIT_S)
    with agent.create_file(tmp_path / "other", rank.cache, 2) as other:
        # Nothing else waits: the blocks of a new file were never used, so reading needs no flush.
        with pytest.raises(InvalidBlocksError):
            agent.read(other, plan_to(rank, other), [0], [1]).wait(WAIT_S)
        if end == "cancel":
            with pytest.raises(TransferTimeout, match="goes on"):
                transfer.wait(0.01)
            transfer.cancel()
        with pytest.raises(TransferTimeout if end == "deadline" else TransferCancelled) as caught:
            transfer.wait()
        assert caught.value.transfer_id == transfer.id
        assert not transfer.is_quiet
        assert not file.close(0.05)
        hang.set()
        assert transfer.wait_quiet(WAIT_S)
        assert behind.state is TransferState.CANCELLED
        assert file.close(WAIT_S)
    with agent.open_file(file.path) as again:
        assert again.valid_blocks() == [0, 1, 2, 3, 4, 7]


@both
def test_a_deadline_that_has_passed_moves_nothing(agent, written):
    rank, file, plan = written
    transfer = agent.write(file, plan, [1, 2], [5, 6], timeout=1e-6)
    with pytest.raises(TransferTimeout):
        transfer.wait()
    assert transfer.wait_quiet(WAIT_S)
    agent.read(file, plan, [0, 1], [5, 6]).wait(WAIT_S)
    assert np.array_equal(rank.values([0, 1]), rank.values([5, 6]))


@both
def test_memory_stays_registered_while_its_blocks_move(agent, path):
    rank = Rank("KBHND", 16, 2048)
    registration = agent.register(rank.cache)
    with agent.create_file(path, rank.cache, 2048) as file:
        transfer = agent.write(file, plan_to(rank, file), range(2048), range(2048))
        while transfer._inner is None and not transfer.state.is_end:
            threading.Event().wait(0.001)
        with contextlib.suppress(RegistrationInUseError):
            registration.close()
            assert transfer._inner.is_quiet
        transfer.cancel()
        assert transfer.wait_quiet(WAIT_S)
        if registration in agent.registrations:
            registration.close()


@both
def test_a_dropped_file_warns_and_is_closed(agent, path):
    file = agent.create_file(path, Rank("KBHND", 16, 2).cache, 2)
    assert "writer" in repr(file)
    held = [file]
    del file
    with pytest.warns(ResourceWarning, match="without close"):
        held.clear()
    agent.open_file(path, writable=True).close()


# ---- objects


@of_objects
def test_objects_that_are_no_file(agent, store, path):
    cache = Rank("KBHND", 16, 2).cache
    with pytest.raises(StorageError, match=r"no file .* or no such bucket; create it") as caught:
        agent.open_file(path)
    assert caught.value.path == str(path)
    with pytest.raises(ConfigError, match="at most 4194304 blocks"):
        agent.create_file(path, cache, 1 << 40)
    agent.create_file(path, cache, 4).close()
    with pytest.raises(StorageError, match="exists; open it"):
        agent.create_file(path, cache, 4)
    good = store.call("GET", path / "header")
    places = range(0, len(good), len(good) // 20)
    damaged = [good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :] for at in places]
    for content, words in (
        (b"", "reading the header"),
        (b"\x7fELF" + bytes(9000), "begins with b'.x7fELF"),
        (good[:5], "begins with b'PNKVF"),
        *((each, "no file of KV blocks") for each in (good[:100], good[:-1], *damaged)),
    ):
        store.call("PUT", path / "header", content)
        with pytest.raises(StorageError, match=words):
            agent.open_file(path)
    store.call("PUT", path / "header", good)
    agent.open_file(path).close()


@of_objects
def test_stores_that_refuse(agent, store, path):
    cache = Rank("KBHND", 16, 2).cache
    with NixlAgent("b", backend="OBJ", storage_params=store.params(bucket="none-such")) as other:
        with pytest.raises(StorageError, match=r"putting the header .* failed.*bucket"):
            other.create_file(path, cache, 4)
        with pytest.raises(StorageError, match="no such bucket"):
            other.open_file(path)
    agent.create_file(path, cache, 4).close()
    store.check_credentials(True)
    try:
        with pytest.raises(StorageError, match=r"failed: .*access_key"):
            agent.open_file(path)
    finally:
        store.check_credentials(False)
    with pytest.raises(NixlError, match="OBJ with") as caught:
        NixlAgent("b", storage="OBJ", storage_params={"scheme": "gopher", "secret_key": "hush"})
    assert "hush" not in str(caught.value)


@of_objects
def test_objects_that_are_damaged_missing_or_of_another_file(agent, written, store, path):
    rank, file, plan = written
    values = rank.values([0]).copy()
    first, second = (store.call("GET", path / name) for name in "01")
    agent.create_file(path.with_name("other"), rank.cache, 16).close()
    moved = store.call("GET", path.with_name("other") / "header")
    store.call("PUT", path / "0", bytes([first[0] ^ 1]) + first[1:])
    with pytest.raises(KVCorruptError, match="blocks 0 of file"):
        agent.read(file, plan, [0], [0]).wait(WAIT_S)
    for content in (first[:-1], first[:20], second, bytes(len(first)), None):
        store.call("PUT" if content else "DELETE", path / "0", content)
        with pytest.raises(InvalidBlocksError, match="no valid blocks 0, 12:") as caught:
            agent.read(file, plan, [0, 1, 2], [0, 12, 1]).wait(WAIT_S)
        assert caught.value.blocks == {"kv": [0, 12]}
        assert file.valid_blocks() == list(range(1, 8))
    store.call("PUT", path / "0", b"")
    with pytest.raises(StorageError, match="getting blocks 0 of file"):
        agent.read(file, plan, [0], [0]).wait(WAIT_S)
    store.call("PUT", path / "0", first)
    agent.read(file, plan, [5], [0]).wait(WAIT_S)
    assert np.array_equal(rank.values([5]), values)
    # The objects of a file that was here before are none of this one.
    store.call("PUT", path / "header", moved)
    with agent.open_file(path) as file:
        assert file.valid_blocks() == []


@of_objects
@pytest.mark.parametrize("status", ["403 Forbidden", "507 Insufficient Storage"])
def test_what_is_not_put_leaves_the_old_blocks(agent, written, store, status):
    rank, file, plan = written
    before = rank.values([1, 2]).copy()
    store.answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    with pytest.raises(StorageError, match=r"putting blocks 1, 2, 9 of file .* failed") as caught:
        agent.write(file, plan, [3, 4, 5], [1, 2, 9]).wait(WAIT_S)
    assert caught.value.blocks == {"kv": [1, 2, 9]}
    store.answer = None
    assert file.valid_blocks() == list(range(8))
    agent.read(file, plan, [6, 7], [1, 2]).wait(WAIT_S)
    assert np.array_equal(rank.values([6, 7]), before)


@of_objects
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("end", ["deadline", "cancel", "hangs up"])
def test_a_hung_store_ends_the_transfer_and_not_the_others(agent, written, store, path, op, end):
    rank, file, plan = written
    with agent.create_file(path.with_name("other"), rank.cache, 2) as other:
        if end == "hangs up":
            store.is_gone = True
        else:
            store.goes_on.clear()
        start = getattr(agent, op)
        transfer = start(file, plan, [1, 2], [5, 6], timeout=WAIT_S if end == "cancel" else 0.3)
        behind = agent.write(file, plan, [3], [7], timeout=0.3)
        if end == "cancel":
            with pytest.raises(TransferTimeout, match="goes on"):
                transfer.wait(0.1)
            transfer.cancel()
        with pytest.raises(TransferCancelled if end == "cancel" else TransferTimeout):
            transfer.wait()
        with pytest.raises(TransferTimeout):
            agent.write(other, plan_to(rank, other), [0], [0], timeout=0.2).wait()
        with pytest.raises(TransferTimeout):
            behind.wait()
        if end != "hangs up":  # which NIXL takes for an answer after some tries
            assert not transfer.is_quiet
            assert not file.close(0.05)
        store.is_gone = False
        store.goes_on.set()
        assert transfer.wait_quiet(WAIT_S)
        assert file.close(WAIT_S)
    with agent.open_file(path) as file:
        agent.read(file, plan, range(8), range(8)).wait(WAIT_S)
