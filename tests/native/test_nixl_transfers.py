"""Bytes, metadata, notifications and storage through the thin binding, in one process."""

import os
import weakref

import numpy as np
import pytest
from transfers import Area, run, take_notifications

from pynixlkv.errors import (
    NixlBackendError,
    NixlError,
    NixlNotFoundError,
    NotRegisteredError,
    RegistrationInUseError,
    StalePeerError,
    StateError,
    UnknownPeerError,
)
from pynixlkv.nixl import AgentConfig, Notification, ThreadSync
from pynixlkv.types import MemoryType, Operation

BLOCK = 4096
NUM_BLOCKS = 32


@pytest.fixture
def pair(make_agent):
    """Two agents that know each other, each with one registered area."""
    agents = [make_agent("a"), make_agent("b")]
    areas = [Area(BLOCK * NUM_BLOCKS, seed) for seed in (1, 2)]
    registrations = [
        agent.register_buffers(area.inside) for agent, area in zip(agents, areas, strict=True)
    ]
    a, b = agents
    assert a.load_remote_md(b.get_local_md()) == "b"
    assert b.load_remote_md(a.get_local_md()) == "a"
    yield a, b, *areas
    for registration in registrations:
        registration.close()


def move(op, local, local_blocks, remote, remote_blocks):
    """Do to the expected bytes what a transfer should do."""
    for i, j in zip(local_blocks, remote_blocks, strict=True):
        ours = slice(64 + i * BLOCK, 64 + (i + 1) * BLOCK)
        theirs = slice(64 + j * BLOCK, 64 + (j + 1) * BLOCK)
        if op is Operation.READ:
            local.expected[ours] = remote.expected[theirs]
        else:
            remote.expected[theirs] = local.expected[ours]


@pytest.mark.parametrize("op", list(Operation))
@pytest.mark.parametrize(
    "blocks", [([0], [0]), ([3, 9, 4, 31], [0, 1, 30, 7]), (range(8), range(8))]
)
@pytest.mark.parametrize("how", ["create", "make", "make without merging"])
def test_blocks_arrive_and_nothing_else_changes(pair, op, blocks, how):
    a, b, ours, theirs = pair
    li, ri = blocks
    with_note = {"notification": b"moved"}
    if how == "create":
        request = a.create_xfer_req(
            op, ours.rows(li, BLOCK), theirs.rows(ri, BLOCK), "b", **with_note
        )
        lists = []
    else:
        everything = range(NUM_BLOCKS)
        lists = [
            a.prep_xfer_dlist(None, ours.rows(everything, BLOCK)),
            a.prep_xfer_dlist("b", theirs.rows(everything, BLOCK)),
        ]
        assert [len(prepared) for prepared in lists] == [NUM_BLOCKS, NUM_BLOCKS]
        assert [prepared.peer for prepared in lists] == [None, "b"]
        request = a.make_xfer_req(
            op, lists[0], list(li), lists[1], list(ri), skip_merge="without" in how, **with_note
        )
    assert (request.num_descriptors, request.num_bytes) == (len(li), len(li) * BLOCK)
    run(a, request)
    move(op, ours, li, theirs, ri)
    assert take_notifications(b, 1) == [Notification("a", b"moved")]
    ours.check()
    theirs.check()
    # Again, with other bytes and another notification.
    source = theirs if op is Operation.READ else ours
    source.inside[:] ^= 0xFF
    source.expected[64:-64] ^= 0xFF
    run(a, request, notification=b"again")
    move(op, ours, li, theirs, ri)
    assert take_notifications(b, 1) == [Notification("a", b"again")]
    ours.check()
    theirs.check()
    assert a.release_xfer_req(request)
    for prepared in lists:
        a.release_dlist_handle(prepared)


def test_lists_released_when_unused_go_with_their_last_request(make_agent):
    a, b = make_agent("a"), make_agent("b")
    ours, theirs = Area(BLOCK * 4, 1), Area(BLOCK * 4, 2)
    registration, kept = a.register_buffers(ours.inside), b.register_buffers(theirs.inside)
    a.load_remote_md(b.get_local_md())
    local = a.prep_xfer_dlist("", ours.rows([1], BLOCK))
    remote = a.prep_xfer_dlist("b", theirs.rows([2], BLOCK))
    requests = [a.make_xfer_req(Operation.READ, local, [0], remote, [0]) for _ in range(2)]
    for prepared in (local, remote):
        a.release_dlist_handle(prepared, when_unused=True)
    a.release_xfer_req(requests.pop())
    with pytest.raises(RegistrationInUseError):
        a.deregister_mem(registration)
    run(a, requests[0])
    move(Operation.READ, ours, [1], theirs, [2])
    ours.check()
    a.release_xfer_req(requests.pop())
    a.deregister_mem(registration)
    a.close()
    kept.close()


@pytest.mark.parametrize(
    "config",
    [
        AgentConfig(progress_thread=False),
        AgentConfig(thread_sync=ThreadSync.STRICT),
        AgentConfig(thread_sync=ThreadSync.RW),
    ],
    ids=str,
)
def test_an_agent_reads_from_itself_in_every_mode(make_agent, config):
    agent = make_agent("a", config)
    area = Area(BLOCK * 4, 1)
    with (
        agent.register_buffers(area.inside),
        agent.create_xfer_req("READ", area.rows([0], BLOCK), area.rows([3], BLOCK), "a") as request,
    ):
        run(agent, request)
    move(Operation.READ, area, [0], area, [3])
    area.check()


def torch_tensor(num_bytes):
    torch = pytest.importorskip("torch")
    return torch.zeros(num_bytes // 2, dtype=torch.bfloat16)


class OnlyDlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, num_bytes):
        self._array = np.zeros((2, num_bytes // 2), dtype=np.uint8)
        self.tobytes = self._array.tobytes

    def __dlpack__(self):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def content(buffer):
    if hasattr(buffer, "untyped_storage"):
        return bytes(buffer.untyped_storage())
    return (
        bytes(memoryview(buffer).cast("B"))
        if isinstance(buffer, bytearray)
        else buffer.tobytes("A")
    )


@pytest.mark.parametrize(
    "make",
    [
        torch_tensor,
        OnlyDlpack,
        bytearray,
        lambda n: memoryview(bytearray(n)),
        lambda n: np.zeros((4, n // 4), np.uint8, order="F"),
        lambda n: np.zeros(n // 8),
    ],
    ids=["torch bfloat16", "DLPack", "bytearray", "memoryview", "Fortran order", "float64"],
)
def test_memory_of_every_kind_of_buffer(make_agent, make):
    agent = make_agent()
    area = Area(1024, 3)
    target = make(1024)
    with (
        agent.register_buffers(area.inside, target) as both,
        agent.create_xfer_req("WRITE", both.descriptors[:1], both.descriptors[1:], "a") as request,
    ):
        assert both.descriptors[:, 1].tolist() == [1024, 1024]
        assert both.memory_type is MemoryType.DRAM
        run(agent, request)
    assert content(target) == area.inside.tobytes()


def test_a_registered_buffer_outlives_its_name(make_agent):
    agent = make_agent()
    area = Area(1024, 3)
    data = bytearray(1024)
    with agent.register_buffers(data), pytest.raises(BufferError):
        data.extend(b"cannot move while it is registered")
    data.extend(b"can now")
    array = np.zeros(1024, np.uint8)
    watch = weakref.ref(array)
    registration = agent.register_buffers(array, area.inside)
    del array
    rows = registration.descriptors
    with agent.create_xfer_req("WRITE", rows[1:], rows[:1], "a") as request:
        run(agent, request)
        assert watch().tobytes() == area.inside.tobytes()
    registration.close()
    assert watch() is None


def test_plugins_and_backends(make_agent):
    agent = make_agent(params={"num_workers": "2"})
    assert "UCX" in agent.get_available_plugins()
    info = agent.get_plugin_params("UCX")
    assert info.memory_types == (MemoryType.DRAM, MemoryType.VRAM)
    assert info.params["num_workers"] == "1"
    second = agent.create_backend("POSIX")
    assert MemoryType.FILE in agent.get_backend_params(second).memory_types
    with pytest.raises(StateError, match="has a backend UCX already"):
        agent.create_backend("UCX")
    with pytest.raises(NixlBackendError, match="plugin 'NOPE'"):
        agent.create_backend("NOPE")
    with pytest.raises(NixlBackendError):
        agent.get_plugin_params("NOPE")
    with pytest.raises(NixlNotFoundError, match="is there a backend for this kind of memory"):
        agent.register_mem([(0, 64, 0)], "OBJ")


def test_the_only_backend_is_asked_about_files(make_agent, tmp_path):
    agent = make_agent(backend="POSIX")
    path = tmp_path / "file"
    path.write_bytes(bytes(12288))
    answers = agent.query_mem(
        [(0, 0, 0), (0, 0, 0)], "FILE", metadata=[str(path), str(tmp_path / "none")]
    )
    assert answers[0]["size"] == "12288"
    assert answers[1] is None


# ---- metadata


def test_memory_registered_later_is_named_until_metadata_is_refreshed(pair):
    a, b, ours, _theirs = pair
    more = Area(BLOCK, 9)
    with b.register_buffers(more.inside) as later:
        mine = ours.rows([0, 1], BLOCK)
        rows = np.concatenate([_theirs.rows([0], BLOCK), later.descriptors])
        address = f"0x{int(later.descriptors[0, 0]):x}"
        for ask in (
            lambda: a.create_xfer_req("READ", mine, rows, "b"),
            lambda: a.prep_xfer_dlist("b", rows),
        ):
            with pytest.raises(NotRegisteredError, match=rf"remote descriptor 1 .*{address}"):
                ask()
        assert not a.check_remote_md("b", rows)
        assert a.load_remote_md(b.get_local_partial_md(later.descriptors)) == "b"
        assert a.check_remote_md("b", rows)
        with a.create_xfer_req("READ", mine, rows, "b") as request:
            run(a, request)
    move(Operation.READ, ours, [0], _theirs, [0])
    move(Operation.READ, ours, [1], more, [0])
    ours.check()


def test_partial_metadata_is_of_registered_memory_only(make_agent):
    with pytest.raises(NotRegisteredError):
        make_agent().get_local_partial_md([(4096, 64, 0)])


def test_handles_of_an_earlier_generation_are_stale(pair):
    a, b, ours, theirs = pair
    rows = theirs.rows(range(4), BLOCK)
    with a.prep_xfer_dlist(None, ours.rows(range(4), BLOCK)) as local:
        old = a.prep_xfer_dlist("b", rows)
        request = a.make_xfer_req("READ", local, [0], old, [1])
        a.invalidate_remote_md("b")
        with pytest.raises(StalePeerError, match="generation 0 of peer 'b'"):
            a.make_xfer_req("READ", local, [0], old, [1])
        with pytest.raises(UnknownPeerError):
            a.create_xfer_req("READ", ours.rows([0], BLOCK), rows[:1], "b")
        a.load_remote_md(b.get_local_md())
        for use in (
            lambda: a.make_xfer_req("READ", local, [0], old, [1]),
            lambda: a.post_xfer_req(request),
        ):
            with pytest.raises(StalePeerError, match="make it again"):
                use()
        request.close()
        old.close()
        with (
            a.prep_xfer_dlist("b", rows) as new,
            a.make_xfer_req("READ", local, [0], new, [1]) as request,
        ):
            run(a, request)
    move(Operation.READ, ours, [0], theirs, [1])
    ours.check()


def test_loading_more_metadata_of_a_peer_keeps_its_handles_valid(pair):
    a, b, ours, theirs = pair
    with (
        a.create_xfer_req("READ", ours.rows([0], BLOCK), theirs.rows([1], BLOCK), "b") as request,
        b.register_buffers(bytearray(64)),
    ):
        a.load_remote_md(b.get_local_md())
        run(a, request)
    move(Operation.READ, ours, [0], theirs, [1])
    ours.check()


def test_a_second_agent_of_a_name_is_refused(pair, make_agent):
    a, _b, ours, theirs = pair
    twin = make_agent("b")
    with pytest.raises(NixlBackendError, match="another agent under a name that is loaded"):
        a.load_remote_md(twin.get_local_md())
    mine = make_agent("a")
    with pytest.raises(Exception, match="metadata of this agent itself"):
        a.load_remote_md(mine.get_local_md())
    # The first one is still there.
    with a.create_xfer_req("READ", ours.rows([0], BLOCK), theirs.rows([1], BLOCK), "b") as request:
        run(a, request)
    # Only after the first one was forgotten can the second take its place.
    a.invalidate_remote_md("b")
    assert a.load_remote_md(twin.get_local_md()) == "b"


def test_unknown_peers_are_named(make_agent):
    a = make_agent()
    area = Area(BLOCK, 1)
    rows = area.rows([0], BLOCK)
    with a.register_buffers(area.inside):
        for use in (
            lambda: a.create_xfer_req("READ", rows, rows, "nobody"),
            lambda: a.prep_xfer_dlist("nobody", rows),
            lambda: a.invalidate_remote_md("nobody"),
            lambda: a.gen_notif("nobody", b"x"),
            lambda: a.make_connection("nobody"),
        ):
            with pytest.raises(UnknownPeerError, match="'nobody'"):
                use()
    assert not a.check_remote_md("nobody")


def test_sending_metadata_nowhere_names_the_metadata_server(make_agent):
    with pytest.raises(NixlError, match="to the metadata server"):
        make_agent().send_local_md()


# ---- notifications


def test_notifications_are_exact_and_delivered_once(pair):
    a, b, *_ = pair
    messages = [b"", b"a", b"ab", b"a", b"\0\0x\0", bytes(range(256)), os.urandom(1 << 20)]
    a.make_connection("b")
    for message in messages:
        a.gen_notif("b", message)
    notes = take_notifications(b, len(messages))
    assert notes == [Notification("a", message) for message in messages]
    a.gen_notif("a", b"to myself")
    assert take_notifications(a, 1) == [Notification("a", b"to myself")]
    assert b.get_notifs() == []


def test_notifications_of_many_senders(make_agent):
    sink = make_agent("sink")
    senders = [make_agent(f"sender {i}", backend="UCX") for i in range(8)]
    metadata = sink.get_local_md()
    for i, sender in enumerate(senders):
        sender.load_remote_md(metadata)
        for j in range(5):
            sender.gen_notif("sink", f"{i} {j}".encode())
    notes = take_notifications(sink, 40)
    for i, sender in enumerate(senders):
        got = [note.message for note in notes if note.peer == sender.name]
        assert got == [f"{i} {j}".encode() for j in range(5)]
