"""NIXL's Python API: one suite for NIXL's own package and for `pynixlkv.nixl_api`.

What NIXL's package does wrong (it crashes, hangs or reads stray memory) is tested on ours only.
"""

import gc
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from interpreter import interpret, run_python
from ports import free_port
from transfers import Area

BLOCK = 1 << 14
NUM_BLOCKS = 32
PACKAGES = {"nixl": "nixl_cu12", "pynixlkv": "pynixlkv.nixl_api"}
TCP = {"engine_config": "TLS=tcp"}


def load(which):
    """NIXL's own package or ours."""
    api, bindings, utils = (
        importlib.import_module(f"{PACKAGES[which]}.{name}")
        for name in ("_api", "_bindings", "_utils")
    )
    return SimpleNamespace(which=which, bindings=bindings, utils=utils, **vars(api))


@pytest.fixture(params=PACKAGES)
def api(request):
    return load(request.param)


@pytest.fixture
def torch():
    """Imported late: the processes that this file starts need none."""
    return importlib.import_module("torch")


@pytest.fixture
def ours():
    return load("pynixlkv")


def make(api, name, params=None, **config):
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[], **config))
    agent.create_backend("UCX", params or {})
    return agent


def tuples(area, blocks):
    return [tuple(int(number) for number in row) for row in area.rows(blocks, BLOCK)]


def register(agent, area):
    return agent.register_memory([(area.inside.ctypes.data, area.inside.nbytes, 0, "")], "DRAM")


def expected_blocks(area):
    return area.expected[64:-64].reshape(-1, BLOCK)


def wait_for(condition, what, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
    return value


def finish(agent, handle):
    """Poll a transfer to its end."""
    wait_for(lambda: agent.check_xfer_state(handle) == "DONE", "the end of the transfer")


def move(agent, handle):
    agent.transfer(handle)
    finish(agent, handle)


def to_register(area, blocks):
    return [(*row, "") for row in tuples(area, blocks)]


def posix_agent(api):
    return api.nixl_agent("a", api.nixl_agent_config(backends=["POSIX"]))


def with_file(agent, operation, area, block, number):
    """Make a transfer between a block of memory and the first bytes of a file."""
    in_memory = agent.get_xfer_descs(tuples(area, [block]), "DRAM")
    in_file = agent.get_xfer_descs([(0, BLOCK, number)], "FILE")
    return agent.initialize_xfer(operation, in_memory, in_file, "a")


@pytest.fixture
def two(api):
    """Two agents that know each other, each with a registered area."""
    return connect(api, capture_telemetry=True)


def connect(api, **config):
    sides = []
    for name, seed in (("a", 1), ("b", 2)):
        agent = make(api, name, **config)
        area = Area(BLOCK * NUM_BLOCKS, seed)
        registered = register(agent, area)
        sides.append(SimpleNamespace(agent=agent, area=area, registered=registered))
    a, b = sides
    assert a.agent.add_remote_agent(b.agent.get_agent_metadata()) == b"b"
    assert b.agent.add_remote_agent(a.agent.get_agent_metadata()) == b"a"
    return a, b


# ---- the surface


def public(thing):
    return {name for name in vars(thing) if not name.startswith("_")}


def test_all_names_of_nixl_are_there(ours):
    theirs = load("nixl")
    for module in ("bindings", "utils"):
        missing = public(getattr(theirs, module)) - public(getattr(ours, module))
        assert not missing, module
    assert public(importlib.import_module("nixl_cu12._api")) - set(vars(ours)) <= {
        "TYPE_CHECKING",
        "Optional",
        "Union",
        "annotations",
        "get_logger",
        "logger",
    }
    for name, value in vars(theirs.bindings).items():
        if inspect.isclass(value) and not issubclass(value, Exception):
            replacement = getattr(ours.bindings, name)
            members = {m for m in public(value) if m not in {"name", "value"}}
            made = replacement() if name in {"nixlAgentConfig", "nixlXferTelemetry"} else None
            assert {m for m in members if not hasattr(made or replacement, m)} == set(), name


@pytest.mark.parametrize(
    "kind", ["nixl_agent", "nixl_agent_config", "nixl_prepped_dlist_handle", "nixl_xfer_handle"]
)
def test_methods_take_the_same_arguments(ours, kind):
    theirs = load("nixl")
    for name, method in vars(getattr(theirs, kind)).items():
        if inspect.isroutine(method) and (not name.startswith("_") or name == "__init__"):
            wanted = list(inspect.signature(method).parameters)
            seen = list(inspect.signature(getattr(getattr(ours, kind), name)).parameters)
            assert seen == wanted, name


def test_numbers_of_enumerations(ours):
    theirs = load("nixl").bindings
    for kind in (
        "nixl_mem_t",
        "nixl_xfer_op_t",
        "nixl_cost_t",
        "nixl_status_t",
        "nixl_thread_sync_t",
    ):
        for name, value in getattr(theirs, kind).__members__.items():
            mine = getattr(ours.bindings, name)
            assert (int(mine), str(mine)) == (int(value), str(value))
    assert ours.DEFAULT_COMM_PORT == load("nixl").DEFAULT_COMM_PORT


# ---- descriptor lists


def test_descriptor_lists(api):
    bindings = api.bindings
    descs = bindings.nixlXferDList(bindings.DRAM_SEG, [(1000, 105, 0), (2000, 30, 1)])
    descs.addDesc((3000, 7, 2))
    descs.append((2**64 - 1, 2**63, 0))
    assert [descs[i] for i in range(4)] == [
        (1000, 105, 0),
        (2000, 30, 1),
        (3000, 7, 2),
        (2**64 - 1, 2**63, 0),
    ]
    assert descs.index((3000, 7, 2)) == 2
    assert descs.getType() == bindings.DRAM_SEG
    descs.remDesc(1)
    descs[0] = (5, 6, 7)
    assert (descs.descCount(), descs[0], descs[1]) == (3, (5, 6, 7), (3000, 7, 2))
    assert descs  # like any object, even when empty: callers ask for None this way
    descs.clear()
    assert descs
    assert descs.isEmpty()
    assert descs == bindings.nixlXferDList(bindings.DRAM_SEG)
    assert descs != bindings.nixlXferDList(bindings.VRAM_SEG)
    with pytest.raises(bindings.nixlNotFoundError):
        descs.index((1, 2, 3))


def test_lists_to_register(api):
    bindings = api.bindings
    descs = bindings.nixlRegDList(bindings.FILE_SEG, [(1, 2, 3, "name"), (4, 5, 6, b"\xff\0")])
    assert [descs[0], descs[1]] == [(1, 2, 3, b"name"), (4, 5, 6, b"\xff\0")]
    trimmed = descs.trim()
    assert (trimmed.getType(), trimmed[1]) == (bindings.FILE_SEG, (4, 5, 6))
    remote = bindings.nixlRemoteDList(bindings.DRAM_SEG, [(1, 2, 3, "peer")])
    assert remote[0] == (1, 2, 3, "peer")


@pytest.mark.parametrize(
    ("descs", "error"),
    [
        ([[1, 2, 3]], TypeError),
        ([(1, 2)], ValueError),
        (np.zeros((2, 3), np.int32), ValueError),
        (np.zeros((2, 4), np.uint64), ValueError),
        (np.zeros((4, 6), np.uint64)[::2, ::2], ValueError),
    ],
)
def test_lists_of_bad_descriptors(api, descs, error):
    with pytest.raises(error):
        api.bindings.nixlXferDList(api.bindings.DRAM_SEG, descs)


@pytest.mark.parametrize("writer", PACKAGES)
@pytest.mark.parametrize("reader", PACKAGES)
@pytest.mark.parametrize("kind", ["nixlXferDList", "nixlRegDList"])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_serialised_lists_are_read_by_both(monkeypatch, writer, reader, kind, count):
    theirs = importlib.import_module("nixl_cu12._bindings")  # as the package "nixl" shows it
    monkeypatch.setitem(sys.modules, "nixl", sys.modules["nixl_cu12"])
    monkeypatch.setitem(sys.modules, "nixl._bindings", theirs)
    extra = () if kind == "nixlXferDList" else ("meta",)
    descs = [(2**48 + 4096 * i, 4096, i % 3, *extra) for i in range(count)]
    read = []
    for which in (writer, reader):
        api = load(which)
        agent = api.nixl_agent("a", api.nixl_agent_config(backends=[]))
        made = getattr(api.bindings, kind)(api.bindings.VRAM_SEG, descs)
        read.append((agent, made))
    (first, made), (second, equal) = read
    assert second.deserialize_descs(first.get_serialized_descs(made)) == equal


def test_forms_of_descriptors(api, torch):
    agent = make(api, "a")
    tensor = torch.zeros((4, 8), dtype=torch.float32)
    rows = [(tensor.data_ptr() + 32 * i, 32, 0) for i in range(4)]
    whole = [(tensor.data_ptr(), 128, 0)]
    forms = [
        ((tensor,), whole),
        (([tensor[i] for i in range(4)],), rows),
        ((rows, "DRAM"), rows),
        ((rows, "cpu"), rows),
        ((np.array(rows, dtype=np.uint64), "DRAM"), rows),
        ((np.array(rows, dtype=np.int64), "DRAM"), rows),
    ]
    for arguments, expected in forms:
        descs = agent.get_xfer_descs(*arguments)
        assert [descs[i] for i in range(descs.descCount())] == expected
        assert agent.get_xfer_descs(descs) is descs
        assert agent.get_reg_descs(descs) is None
        if not isinstance(arguments[0], list) or arguments[0][0] is not rows[0]:
            registered = agent.get_reg_descs(*arguments)
            assert registered.trim() == descs
            assert agent.get_xfer_descs(registered) is None
    assert agent.get_reg_descs([(*row, "") for row in rows], "DRAM").trim() == descs
    remote = agent.get_remote_descs([(*rows[0], "b")], "DRAM")
    assert remote[0] == (*rows[0], "b")
    assert agent.get_remote_descs(remote) is remote


def test_what_no_descriptors_can_be_made_of_gives_none(api, torch):
    agent = api.nixl_agent("a", api.nixl_agent_config(backends=[]))
    bad = torch.zeros((4, 8)).T
    assert agent.get_xfer_descs(bad) is agent.get_reg_descs(bad) is None
    assert agent.get_xfer_descs([bad]) is agent.get_reg_descs([bad]) is None
    assert agent.get_xfer_descs([(1, 2, 3)]) is agent.get_reg_descs([(1, 2, 3, "")]) is None
    assert agent.get_xfer_descs([(1, 2, 3, "")], "DRAM") is None
    assert agent.get_reg_descs([(1, 2, 3)], "DRAM") is None
    assert agent.get_xfer_descs(np.zeros((2, 4), np.uint64), "DRAM") is None
    assert agent.get_remote_descs([(1, 2, 3)], "DRAM") is None
    with pytest.raises(KeyError):
        agent.get_xfer_descs([(1, 2, 3)], "V-RAM")


# ---- one process


def test_names_parameters_and_backends(api):
    agent = make(api, "a", num_threads=0)
    assert agent.name == "a"
    assert "UCX" in agent.get_plugin_list()
    assert set(agent.get_plugin_mem_types("UCX")) == {"DRAM_SEG", "VRAM_SEG"}
    assert agent.get_plugin_params("UCX")["ucx_error_handling_mode"] == "peer"
    assert set(agent.get_backend_mem_types("UCX")) >= {"DRAM_SEG"}
    assert isinstance(agent.get_backend_params("UCX"), dict)
    assert agent.get_plugin_params("UVX") == agent.get_backend_params("UVX") == {}
    assert agent.get_plugin_mem_types("UVX") == agent.get_backend_mem_types("UVX") == []
    assert list(agent.backends) == ["UCX"]
    with pytest.raises(ValueError, match="name"):
        api.nixl_agent("", api.nixl_agent_config(backends=[]))
    with pytest.raises(TypeError, match="sync_mode"):
        api.nixl_agent_config(sync_mode=1)
    # A plugin that is missing is left out.
    assert api.nixl_agent("c", api.nixl_agent_config(backends=["UVX"])).backends == {}


def test_prepared_transfers(two):
    a, b = two
    local = a.agent.prep_xfer_dlist("NIXL_INIT_AGENT", tuples(a.area, range(NUM_BLOCKS)), "DRAM")
    remote = a.agent.prep_xfer_dlist(b"b", b.area.rows(range(NUM_BLOCKS), BLOCK), "DRAM")
    forms = [([3, 1, 2], [5, 6, 0]), (np.array([9, 8]), np.array([1, 2], dtype=np.int32))]
    for ours, theirs in forms:
        for operation in ("READ", "WRITE"):
            handle = a.agent.make_prepped_xfer(operation, local, ours, remote, theirs, b"note")
            assert a.agent.transfer(handle) in ("DONE", "PROC")
            finish(a.agent, handle)
            copied, source = (a, b) if operation == "READ" else (b, a)
            pairs = (ours, theirs) if operation == "READ" else (theirs, ours)
            moved = expected_blocks(source.area)[list(pairs[1])]
            expected_blocks(copied.area)[list(pairs[0])] = moved
            wait_for(lambda: b.agent.get_new_notifs() == {"a": [b"note"]}, "the notification")
            handle.release()
    a.area.check()
    b.area.check()
    a.agent.release_dlist_handle(local)
    remote.release()


def test_strided_lists(two):
    a, b = two
    starts = [(a.area, 0, 3 * BLOCK, 4), (a.area, 20 * BLOCK, BLOCK, 2)]
    strided = np.array(
        [(area.inside.ctypes.data + first, BLOCK, 0, stride, count)
         for area, first, stride, count in starts],
        dtype=np.uint64,
    )  # fmt: skip
    local = a.agent.prep_xfer_dlist("", strided, "DRAM")
    remote = a.agent.prep_xfer_dlist("b", b.area.rows(range(6), BLOCK), "DRAM")
    handle = a.agent.make_prepped_xfer("READ", local, range(6), remote, range(6))
    move(a.agent, handle)
    expected_blocks(a.area)[[0, 3, 6, 9, 20, 21]] = expected_blocks(b.area)[:6]
    a.area.check()
    with pytest.raises(ValueError, match="mem"):
        a.agent.prep_xfer_dlist("", strided)


def test_a_transfer_again_with_another_message(two):
    a, b = two
    local = a.agent.get_xfer_descs(tuples(a.area, [0, 1]), "DRAM")
    remote = a.agent.get_xfer_descs(tuples(b.area, [7, 4]), "DRAM")
    handle = a.agent.initialize_xfer("WRITE", local, remote, "b", "made")
    expected_blocks(b.area)[[7, 4]] = expected_blocks(a.area)[[0, 1]]
    for message, seen in ((b"", b"made"), ("again", b"again"), (b"\0\xff", b"\0\xff")):
        a.agent.transfer(handle, message)
        finish(a.agent, handle)
        wait_for(lambda: b.agent.update_notifs().get("a"), "the notification")
        assert b.agent.notifs == {"a": [seen]}
        assert not b.agent.check_remote_xfer_done("a", b"nothing")
        assert not b.agent.check_remote_xfer_done("x", seen)
        assert b.agent.check_remote_xfer_done("a", seen[-1:], tag_is_prefix=False)
        assert b.agent.notifs == {"a": []}
    telemetry = a.agent.get_xfer_telemetry(handle)
    assert (telemetry.totalBytes, telemetry.descCount) == (2 * BLOCK, 2)
    assert telemetry.startTime > 0
    assert telemetry.xferDuration >= telemetry.postDuration >= 0
    assert a.agent.query_xfer_backend(handle) == "UCX"
    duration, margin, method = a.agent.estimate_xfer_cost(handle)
    assert (duration >= 0, margin >= 0) == (True, True)
    assert method in ("ANALYTICAL_BACKEND", "UNKNOWN")
    a.agent.release_xfer_handle(handle)
    assert "released=True" in repr(handle)
    handle.release()  # again does nothing
    a.area.check()
    b.area.check()


def test_notifications_by_themselves(two):
    a, b = two
    a.agent.make_connection("b")
    messages = [b"one", b"", b"x" * 5000]
    for message in messages:
        a.agent.send_notif("b", message)
    a.agent.send_notif(b"b", "text")
    seen = []
    while len(seen) < 4:
        seen += wait_for(lambda: b.agent.get_new_notifs(backends=["UCX"]), "a notification")["a"]
    assert seen == [*messages, b"text"]
    assert b.agent.get_new_notifs() == {}


def test_tensors_in_the_own_memory(api, torch):
    """Loopback: an agent reads its own memory; the messages come to itself."""
    agent = make(api, "a")
    tensor = torch.arange(64, dtype=torch.float32).reshape(8, 8).clone()
    target = torch.zeros((8, 8))
    registered = agent.register_memory([tensor, target])
    rows = agent.get_xfer_descs([tensor[i] for i in range(8)])
    targets = agent.get_xfer_descs([target[7 - i] for i in range(8)])
    handle = agent.initialize_xfer("READ", targets, rows, "a", b"self")
    move(agent, handle)
    assert torch.equal(target, tensor.flip(0))
    wait_for(lambda: agent.check_remote_xfer_done("a", b"se"), "the notification")
    handle.release()
    agent.deregister_memory(registered)


def test_rows_of_a_peer_are_known_by_their_bytes_not_by_what_lies_between(api):
    a, b = (make(api, name) for name in "ab")
    area = Area(64 * BLOCK, 1)
    base = area.inside.ctypes.data
    every_other = [(base + i * BLOCK, BLOCK, 0) for i in range(0, 64, 2)]
    b.register_memory([(*row, "") for row in every_other], "DRAM")
    a.add_remote_agent(b.get_agent_metadata())

    def knows(rows):
        return a.check_remote_metadata("b", a.get_xfer_descs(rows, "DRAM"))

    assert knows(every_other)
    assert knows(every_other[::-1])
    assert not knows([*every_other, (base + BLOCK, BLOCK, 0)])
    within = [(base + i * 16, 16, 0) for i in range(BLOCK // 16)]
    assert knows(within)
    assert not knows([*within, (base + BLOCK, 16, 0)])
    step = 1 << 62
    around = [((base + i * step) % (1 << 64), 16, 0) for i in range(64)]
    assert not knows(around)


def test_partial_metadata(api):
    a, b = (make(api, name) for name in "ab")
    areas = [Area(BLOCK, seed) for seed in (1, 2)]
    lists = [register(b, x) for x in areas]
    empty = api.bindings.nixlRegDList(api.bindings.DRAM_SEG)
    assert a.add_remote_agent(b.get_partial_agent_metadata(empty, inc_conn_info=True)) == b"b"
    assert [a.check_remote_metadata("b", x.trim()) for x in lists] == [False, False]
    assert a.add_remote_agent(b.get_partial_agent_metadata(lists[1])) == b"b"
    assert [a.check_remote_metadata("b", x.trim()) for x in lists] == [False, True]
    a.remove_remote_agent("b")
    assert not a.check_remote_metadata("b")
    both = b.get_partial_agent_metadata(lists[0], inc_conn_info=True, backends=["UCX"])
    assert a.add_remote_agent(both) == b"b"
    assert a.check_remote_metadata("b")
    assert [a.check_remote_metadata("b", x.trim()) for x in lists] == [True, False]
    own = Area(BLOCK, 3)
    registered = register(a, own)
    handle = a.initialize_xfer("READ", registered.trim(), lists[0].trim(), "b")
    move(a, handle)
    assert np.array_equal(own.inside, areas[0].inside)
    handle.release()
    for descs in lists:
        b.deregister_memory(descs)


def test_a_part_of_what_was_registered_together(api):
    agent = make(api, "a")
    area = Area(BLOCK * 3, 1)
    agent.register_memory(to_register(area, range(3)), "DRAM")
    middle = agent.get_reg_descs(to_register(area, [1]), "DRAM")
    agent.deregister_memory(middle)
    with pytest.raises(api.bindings.nixlNotFoundError):
        agent.prep_xfer_dlist("", tuples(area, [1]), "DRAM")
    agent.prep_xfer_dlist("", tuples(area, [0, 2]), "DRAM").release()
    with pytest.raises(api.bindings.nixlNotFoundError):
        agent.deregister_memory(middle)


def test_metadata_by_the_listener(api):
    ports = {name: free_port() for name in "ab"}
    agents = {
        name: make(api, name, enable_listen_thread=True, listen_port=port)
        for name, port in ports.items()
    }
    a, b = agents["a"], agents["b"]
    area = Area(BLOCK * 2, 1)
    first, second = (b.register_memory(to_register(area, [i]), "DRAM") for i in range(2))
    a.send_local_metadata("127.0.0.1", ports["b"])
    wait_for(lambda: b.check_remote_metadata("a"), "metadata that is sent")
    b.send_partial_agent_metadata(first, True, ["UCX"], "127.0.0.1", ports["a"])
    wait_for(lambda: a.check_remote_metadata("b", first.trim()), "part of the metadata")
    assert not a.check_remote_metadata("b", second.trim())
    a.fetch_remote_metadata("b", "127.0.0.1", ports["b"])
    wait_for(lambda: a.check_remote_metadata("b", second.trim()), "metadata that is fetched")
    a.invalidate_local_metadata("127.0.0.1", ports["b"])
    wait_for(lambda: not b.check_remote_metadata("a"), "the end of the metadata")


def test_querying_files(api, tmp_path):
    agent = posix_agent(api)
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    there, missing = agent.query_memory(
        [(0, 0, 0, str(path)), (0, 0, 0, str(tmp_path / "none"))], "POSIX", "FILE"
    )
    assert there["size"] == "5"
    assert missing is None
    with pytest.raises(ValueError, match="Available backends"):
        agent.query_memory([(0, 0, 0, str(path))], "UCX", "FILE")


@pytest.mark.parametrize("length", [0, BLOCK], ids=["whole file", "range"])
def test_files(api, tmp_path, length):
    agent = posix_agent(api)
    area = Area(BLOCK * 2, 1)
    memory = agent.register_memory(to_register(area, [0, 1]), "DRAM")
    with (tmp_path / "file").open("w+b") as file:
        number = file.fileno()
        registered = agent.register_memory([(0, length, number, "")], "FILE")
        for operation, block in (("WRITE", 0), ("READ", 1)):
            handle = with_file(agent, operation, area, block, number)
            move(agent, handle)
            handle.release()
        blocks = expected_blocks(area)
        blocks[1] = blocks[0]
        assert file.read() == blocks[0].tobytes()
        agent.deregister_memory(registered)
    agent.deregister_memory(memory)
    area.check()


def test_the_raw_agent(api):
    b = api.bindings
    config = b.nixlAgentConfig()
    config.useProgThread = True
    raw = b.nixlAgent("raw", config)
    ucx = raw.createBackend("UCX", {})
    addresses = [api.utils.malloc_passthru(4096) for _ in range(2)]
    api.utils.ba_buf(addresses[0], 4096)
    registered = b.nixlRegDList(b.DRAM_SEG)
    for address in addresses:
        registered.addDesc((address, 4096, 0, "dead"))
    assert raw.registerMem(registered, [ucx]) == b.NIXL_SUCCESS
    source, target = (b.nixlXferDList(b.DRAM_SEG, [(x + 8, 8, 0)]) for x in addresses)
    assert raw.checkRemoteMD("nobody", source) == b.NIXL_ERR_NOT_FOUND
    handle = raw.createXferReq(b.NIXL_WRITE, source, target, "raw", "n\0t")
    status = raw.postXferReq(handle)
    wait_for(
        lambda: status == b.NIXL_SUCCESS or raw.getXferStatus(handle) == b.NIXL_SUCCESS, "the end"
    )
    api.utils.verify_transfer(addresses[0] + 8, addresses[1] + 8, 8)
    assert wait_for(lambda: raw.getNotifs({"x": [b"old"]}).get("raw"), "a message") == [b"n\0t"]
    assert raw.releaseXferReq(handle) == b.NIXL_SUCCESS
    local = raw.prepXferDlist(source)
    remote = raw.prepXferDlist("raw", target)
    handle = raw.makeXferReq(b.NIXL_READ, local, [0], remote, [0], "", [ucx], False)
    assert raw.queryXferBackend(handle) == ucx
    assert raw.releaseXferReq(handle) == b.NIXL_SUCCESS
    assert raw.releasedDlistH(local) == raw.releasedDlistH(remote) == b.NIXL_SUCCESS
    assert raw.deregisterMem(registered, []) == b.NIXL_SUCCESS
    for address in addresses:
        api.utils.free_passthru(address)


FAILURES = {
    "nixlNotFoundError": {
        "local list of unregistered memory": lambda s: s.prepare("", [(4096, 8, 0)]),
        "remote list of unregistered memory": lambda s: s.prepare("b", [(4096, 8, 0)]),
        "list for an unknown peer": lambda s: s.prepare("x", s.theirs),
        "transfer with an unknown peer": lambda s: s.transfer(s.mine, s.theirs, "x"),
        "transfer of unregistered memory": lambda s: s.transfer(
            [(4096, 8, 0)], [(s.theirs[0][0], 8, 0)], "b"
        ),
        "message to an unknown peer": lambda s: s.agent.send_notif("x", b"hello"),
        "connection to an unknown peer": lambda s: s.agent.make_connection("x"),
        "memory that was never registered": lambda s: s.agent.deregister_memory(
            s.agent.get_reg_descs([(5, 6, 0, "")], "DRAM")
        ),
        "no such plugin": lambda s: s.agent.create_backend("UVX"),
        "a peer that was removed": lambda s: (
            s.agent.remove_remote_agent("b"),
            s.agent.remove_remote_agent("b"),  # which is no error
            s.choose(s.local, [0], s.remote, [0]),
        ),
    },
    "nixlInvalidParamError": {
        "index beyond the list": lambda s: s.choose(s.local, [0, 99], s.remote, [0, 1]),
        "index below zero": lambda s: s.choose(s.local, [0, -1], s.remote, [0, 1]),
        "more indices on one side": lambda s: s.choose(s.local, [0], s.remote, [0, 1]),
        "no indices": lambda s: s.choose(s.local, [], s.remote, []),
        "lists in the wrong place": lambda s: s.choose(s.remote, [0], s.local, [0]),
        "lengths that differ": lambda s: s.transfer(
            s.mine[:1], [(s.theirs[0][0], 2 * BLOCK, 0)], "b"
        ),
        "a second backend of a kind": lambda s: s.agent.create_backend("UCX"),
        "its own metadata": lambda s: s.agent.add_remote_agent(s.agent.get_agent_metadata()),
    },
    "KeyError": {
        "no such operation": lambda s: s.choose(s.local, [0], s.remote, [0], operation="RD"),
        "no such backend": lambda s: s.prepare("", s.mine, backends=["UVX"]),
    },
    "nixlNotPostedError": {
        "state before the post": lambda s: s.agent.check_xfer_state(
            s.choose(s.local, [0], s.remote, [0])
        ),
        "telemetry before the post": lambda s: s.agent.get_xfer_telemetry(
            s.choose(s.local, [0], s.remote, [0])
        ),
    },
    "nixlMismatchError": {
        "metadata that is none": lambda s: s.agent.add_remote_agent(b"metadata"),
    },
}


class Scene:
    """Two connected agents, with prepared lists."""

    def __init__(self, api):
        # No progress thread: that of NIXL's package keeps a core busy.
        a, b = connect(api, enable_prog_thread=False, capture_telemetry=True)
        self.agent, self.areas = a.agent, (a.area, b.area)
        self.peer = b.agent
        self.mine, self.theirs = tuples(a.area, range(4)), tuples(b.area, range(4))
        self.local, self.remote = self.prepare("", self.mine), self.prepare("b", self.theirs)

    def prepare(self, peer, rows, **options):
        return self.agent.prep_xfer_dlist(peer, rows, "DRAM", **options)

    def choose(self, *lists_and_indices, operation="READ"):
        return self.agent.make_prepped_xfer(operation, *lists_and_indices)

    def transfer(self, ours, theirs, peer):
        sides = (self.agent.get_xfer_descs(rows, "DRAM") for rows in (ours, theirs))
        return self.agent.initialize_xfer("READ", *sides, peer)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        pytest.param(error, call, id=what)
        for error, calls in FAILURES.items()
        for what, call in calls.items()
    ],
)
def test_failures_have_the_same_names(api, error, call):
    scene = Scene(api)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its name is compared
        call(scene)
    assert caught.type.__name__ == error


def test_no_telemetry(api):
    a, b = connect(api)
    lists = (a.agent.get_xfer_descs(tuples(side.area, [0]), "DRAM") for side in (a, b))
    handle = a.agent.initialize_xfer("READ", *lists, "b")
    move(a.agent, handle)
    with pytest.raises(api.bindings.nixlNoTelemetryError):
        a.agent.get_xfer_telemetry(handle)


# ---- two processes


def serve(channel, which, params):
    """Target: show an area, answer messages with it, end when told to."""
    agent = make(load(which), "target", params)
    area = Area(BLOCK * NUM_BLOCKS, 2)
    descs = [(area.inside.ctypes.data, area.inside.nbytes, 0, "")]
    registered = agent.register_memory(descs, "DRAM")
    blocks = agent.get_xfer_descs(tuples(area, range(NUM_BLOCKS)), "DRAM")
    channel.send((agent.get_agent_metadata(), agent.get_serialized_descs(blocks), descs))
    peer = agent.add_remote_agent(channel.receive()).decode()
    while (message := channel.receive()) is not None:
        wait_for(lambda m=message: agent.check_remote_xfer_done(peer, m), f"message {message}")
        channel.send(area.whole.copy())
    agent.remove_remote_agent(peer)
    agent.deregister_memory(registered)
    return "closed"


def reach(start_peer, api, target, params=None, **config):
    peer = start_peer(serve, target, params)
    agent = make(api, "initiator", params, **config)
    area = Area(BLOCK * NUM_BLOCKS, 1)
    register(agent, area)
    metadata, serialised, descs = peer.receive()
    assert agent.add_remote_agent(metadata) == b"target"
    peer.send(agent.get_agent_metadata())
    return peer, agent, area, serialised, descs


@pytest.mark.parametrize("target", PACKAGES)
@pytest.mark.parametrize("params", [None, TCP], ids=["default", "tcp"])
def test_bytes_move_between_both_packages(monkeypatch, start_peer, api, target, params):
    peer, agent, area, serialised, _ = reach(start_peer, api, target, params)
    if api.which == "nixl":  # whose own deserialisation needs the package "nixl"
        monkeypatch.setitem(sys.modules, "nixl", sys.modules["nixl_cu12"])
        monkeypatch.setitem(sys.modules, "nixl._bindings", api.bindings)
    remote = agent.prep_xfer_dlist("target", agent.deserialize_descs(serialised))
    local = agent.prep_xfer_dlist("", area.rows(range(NUM_BLOCKS), BLOCK), "DRAM")
    theirs = Area(BLOCK * NUM_BLOCKS, 2)
    order = np.random.default_rng(3).permutation(NUM_BLOCKS)
    half = NUM_BLOCKS // 2
    for operation, mine, others in (
        ("READ", order[:half], order[half:]),
        ("WRITE", order[half:], order[:half]),
    ):
        message = f"{operation} done"
        handle = agent.make_prepped_xfer(operation, local, mine, remote, others, message)
        move(agent, handle)
        blocks = [expected_blocks(x) for x in (area, theirs)]
        if operation == "READ":
            blocks[0][mine] = blocks[1][others]
        else:
            blocks[1][others] = blocks[0][mine]
        peer.send(message.encode())
        assert np.array_equal(peer.receive(), theirs.expected)
        area.check()
        handle.release()
    peer.send(None)
    assert peer.finish() == "closed"


@pytest.mark.parametrize("params", [None, TCP], ids=["default", "tcp"])
def test_a_killed_peer_is_a_lost_connection(start_peer, api, params):
    peer, agent, area, _, descs = reach(start_peer, api, api.which, params)
    remote = agent.prep_xfer_dlist("target", [descs[0][:3]], "DRAM")
    local = agent.prep_xfer_dlist("", [(area.inside.ctypes.data, area.inside.nbytes, 0)], "DRAM")
    handle = agent.make_prepped_xfer("READ", local, [0], remote, [0])
    move(agent, handle)
    peer.kill()

    def lost(call):
        try:
            call()
        except api.bindings.nixlRemoteDisconnectError:
            return True
        return False

    # Over TCP the post may succeed, and the poll then fails.
    wait_for(
        lambda: lost(lambda: agent.transfer(handle)) or lost(lambda: finish(agent, handle)),
        "the failure of a transfer",
    )
    handle.release()
    wait_for(lambda: lost(lambda: agent.send_notif("target", b"hello")), "a refused message")


# ---- ours only: what NIXL's package does not survive


def test_registrations_are_counted(ours):
    agent = make(ours, "a")
    area = Area(BLOCK, 1)
    first, second = register(agent, area), register(agent, area)
    agent.deregister_memory(first)
    agent.prep_xfer_dlist("", first.trim()).release()
    agent.deregister_memory(second)
    with pytest.raises(ours.bindings.nixlNotFoundError, match="is not registered"):
        agent.deregister_memory(second)
    with pytest.raises(ours.bindings.nixlNotFoundError):
        agent.prep_xfer_dlist("", first.trim())
    row = tuples(area, [0])[0]
    twice = agent.register_memory([(*row, "")] * 2, "DRAM")
    agent.deregister_memory(first)
    with pytest.raises(ours.bindings.nixlNotFoundError, match="is not registered"):
        agent.deregister_memory(twice)  # all or none
    agent.prep_xfer_dlist("", [row], "DRAM").release()
    agent.deregister_memory(first)
    with pytest.raises(ours.bindings.nixlNotFoundError):
        agent.prep_xfer_dlist("", [row], "DRAM")


def test_registering_is_all_or_none(ours):
    agent = make(ours, "a")
    area = Area(BLOCK * 2, 1)
    good = tuples(area, [0])[0]
    with pytest.raises(ours.bindings.nixlInvalidParamError):
        agent.register_memory([(*good, ""), (good[0] + BLOCK, 0, 0, "")], "DRAM")
    with pytest.raises(ours.bindings.nixlNotFoundError):
        agent.prep_xfer_dlist("", [good], "DRAM")


def prepare_one(a, b):
    return (
        a.agent.prep_xfer_dlist("", tuples(a.area, [0]), "DRAM"),
        a.agent.prep_xfer_dlist("b", tuples(b.area, [0]), "DRAM"),
    )


def test_handles_after_their_release(ours):
    a, b = connect(ours)
    local, remote = prepare_one(a, b)
    handle = a.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    handle.release()
    for use in (a.agent.check_xfer_state, a.agent.transfer, a.agent.get_xfer_telemetry):
        with pytest.raises(ours.bindings.nixlInvalidParamError, match="was released"):
            use(handle)
    local.release()
    with pytest.raises(ours.bindings.nixlInvalidParamError, match="was released"):
        a.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    with pytest.raises(ours.bindings.nixlInvalidParamError, match="was released"):
        a.agent.agent.releasedDlistH(local._handle)


def test_a_list_may_be_released_before_its_transfers(ours):
    a, b = connect(ours)
    local, remote = prepare_one(a, b)
    handle = a.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    local.release()
    remote.release()
    move(a.agent, handle)
    assert np.array_equal(a.area.inside[:BLOCK], b.area.inside[:BLOCK])
    a.agent.deregister_memory(a.registered)
    handle.release()


def test_memory_may_go_before_the_lists_and_finished_transfers_on_it(api):
    a, b = connect(api)
    local, remote = prepare_one(a, b)
    handle = a.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    move(a.agent, handle)
    a.agent.deregister_memory(a.registered)
    if api.which == "pynixlkv":  # NIXL follows dangling pointers
        again = register(a.agent, a.area)  # does not bring them back
        for use in (
            lambda: a.agent.transfer(handle),
            lambda: a.agent.make_prepped_xfer("WRITE", local, [0], remote, [0]),
        ):
            with pytest.raises(api.bindings.nixlNotFoundError, match="has been deregistered since"):
                use()
        a.agent.check_xfer_state(handle)
        a.agent.deregister_memory(again)
    handle.release()
    local.release()
    remote.release()


def test_a_part_of_the_memory_leaves_lists_on_the_rest_alone(ours):
    a, b = connect(ours)
    area = Area(BLOCK * 4, 3)
    rows = tuples(area, range(4))
    a.agent.register_memory([(*row, "") for row in rows], "DRAM")
    lists = {i: a.agent.prep_xfer_dlist("", rows[i : i + 2], "DRAM") for i in (0, 2)}
    remote = a.agent.prep_xfer_dlist("b", tuples(b.area, range(2)), "DRAM")
    a.agent.deregister_memory(a.agent.get_reg_descs([(*rows[1], "")], "DRAM"))
    with pytest.raises(ours.bindings.nixlNotFoundError, match="has been deregistered since"):
        a.agent.make_prepped_xfer("READ", lists[0], [0], remote, [0])
    handle = a.agent.make_prepped_xfer("READ", lists[2], [0, 1], remote, [1, 0])
    move(a.agent, handle)
    expected_blocks(area)[[2, 3]] = expected_blocks(b.area)[[1, 0]]
    area.check()


def test_tensors_live_until_they_are_deregistered(ours, torch):
    agent = make(ours, "a")
    tensor = torch.zeros(BLOCK, dtype=torch.uint8)
    free = sys.getrefcount(tensor)
    descs = agent.register_memory(tensor)
    copy = pickle.loads(pickle.dumps(descs))
    del descs
    gc.collect()
    assert sys.getrefcount(tensor) > free
    agent.deregister_memory(copy)
    assert sys.getrefcount(tensor) == free


def test_lists_end_where_they_end(ours):
    bindings = ours.bindings
    descs = bindings.nixlXferDList(bindings.DRAM_SEG, [(1, 2, 3), (4, 5, 6)])
    assert list(descs) == [(1, 2, 3), (4, 5, 6)]  # NIXL's goes on into stray memory
    for use in (descs.__getitem__, descs.remDesc):
        for index in (2, -1, 2**40):
            with pytest.raises(IndexError, match="of a list of 2"):
                use(index)
    with pytest.raises(IndexError):
        descs[2] = (1, 2, 3)
    assert bindings.nixlXferDList(bindings.DRAM_SEG, 2)[1] == (0, 0, 0)  # NIXL's are stray bytes
    for bad in ([(-1, 2, 3)], [(1, 2**64, 3)], [(1, 2.5, 3)]):
        with pytest.raises(ValueError, match="must be an int from 0"):
            bindings.nixlXferDList(bindings.DRAM_SEG, bad)


def test_another_agent_of_a_known_name(ours):
    a, _b = connect(ours)
    other = make(ours, "b")
    with pytest.raises(ours.bindings.nixlMismatchError):
        a.agent.add_remote_agent(other.get_agent_metadata())


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_from_a_peer_runs_nothing(ours, tmp_path):
    agent = ours.nixl_agent("a", ours.nixl_agent_config(backends=[]))
    evil = pickle.dumps(Evil(str(tmp_path / "made")))
    with pytest.raises(ours.bindings.nixlMismatchError, match=r"they ask for posix\.mkdir"):
        agent.deserialize_descs(evil)
    assert not (tmp_path / "made").exists()
    with pytest.raises(ours.bindings.nixlMismatchError, match="not a descriptor list"):
        agent.deserialize_descs(pickle.dumps([1, 2]))


def test_damaged_serialised_lists(ours):
    bindings = ours.bindings
    state = bindings.nixlRegDList(bindings.DRAM_SEG, [(1, 2, 3, "x")]).__getstate__()
    for length in range(len(state)):
        with pytest.raises(bindings.nixlMismatchError):
            bindings.nixlRegDList.__new__(bindings.nixlRegDList).__setstate__(state[:length])


@pytest.mark.parametrize("sync", ["NONE", "STRICT", "RW"])
def test_a_running_transfer_is_kept_with_its_memory_until_it_ends(ours, start_peer, sync):
    """Its bytes still arrive, whatever is done with the handle."""
    mode = ours.nixl_thread_sync_t[f"NIXL_THREAD_SYNC_{sync}"]
    peer, agent, area, _, descs = reach(start_peer, ours, "pynixlkv", TCP, sync_mode=mode)
    whole = [(area.inside.ctypes.data, area.inside.nbytes, 0)]
    local, remote = (agent.get_xfer_descs(rows, "DRAM") for rows in (whole, [descs[0][:3]]))
    registered = agent.get_reg_descs([(*whole[0], "")], "DRAM")
    peer.stop()
    running, released = (agent.initialize_xfer("READ", local, remote, "target") for _ in range(2))
    for handle in (running, released):
        assert agent.transfer(handle) == "PROC"
        with pytest.raises(ours.bindings.nixlRepostActiveError):
            agent.transfer(handle)
    agent.release_xfer_handle(released)
    with pytest.raises(ours.bindings.nixlInvalidParamError, match="was released"):
        agent.check_xfer_state(released)
    for _ in range(2):  # refusing changes nothing
        with pytest.raises(ours.bindings.nixlNotAllowedError, match="still moves bytes"):
            agent.deregister_memory(registered)
    peer.resume()

    def is_deregistered():
        try:
            agent.deregister_memory(registered)
        except ours.bindings.nixlNotAllowedError:
            return False
        return True

    wait_for(is_deregistered, "the end of the transfers")  # which polls them
    assert agent.check_xfer_state(running) == "DONE"
    assert np.array_equal(area.inside, Area(BLOCK * NUM_BLOCKS, 2).inside)
    running.release()


def test_memory_is_registered_again_for_a_later_backend(api, tmp_path):
    agent = make(api, "a")
    area = Area(BLOCK * 2, 1)
    descs = to_register(area, range(2))
    agent.register_memory(descs, "DRAM")
    agent.create_backend("POSIX")
    registered = agent.register_memory(descs, "DRAM")
    with (tmp_path / "file").open("w+b") as file:
        number = file.fileno()
        in_file = agent.register_memory([(0, BLOCK, number, "")], "FILE")
        handle = with_file(agent, "WRITE", area, 1, number)
        move(agent, handle)
        assert agent.query_xfer_backend(handle) == "POSIX"
        handle.release()
        assert file.read() == area.inside[BLOCK:].tobytes()
        agent.deregister_memory(in_file)
    agent.deregister_memory(registered)
    agent.deregister_memory(registered)
    with pytest.raises(api.bindings.nixlNotFoundError):
        agent.deregister_memory(registered)


@pytest.mark.parametrize("range_", [(0, BLOCK), (BLOCK, BLOCK), (0, 2 * BLOCK)], ids=str)
def test_a_device_number_is_one_file(api, tmp_path, range_):
    agent = posix_agent(api)
    area = Area(BLOCK, 1)
    agent.register_memory(to_register(area, [0]), "DRAM")
    agent.register_memory([(0, BLOCK, 5, f"rw,create:{tmp_path}/one")], "FILE")
    with pytest.raises(api.bindings.nixlBackendError):
        agent.register_memory([(*range_, 5, f"rw,create:{tmp_path}/two")], "FILE")
    handle = with_file(agent, "WRITE", area, 0, 5)
    move(agent, handle)
    handle.release()
    assert (tmp_path / "one").read_bytes() == area.inside.tobytes()
    assert not (tmp_path / "two").exists()


def test_a_failed_storage_transfer_is_a_failed_backend(api, tmp_path):
    agent = posix_agent(api)
    area = Area(BLOCK, 1)
    agent.register_memory(to_register(area, [0]), "DRAM")
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    agent.register_memory([(0, BLOCK, 5, f"ro:{tmp_path}/file")], "FILE")
    with pytest.raises(api.bindings.nixlBackendError):
        move(agent, with_file(agent, "WRITE", area, 0, 5))
    assert (tmp_path / "file").read_bytes() == bytes(BLOCK)


def test_a_large_strided_list_is_prepared_where_rows_are_chosen(ours):
    """Two million descriptors over 64 KiB: only a request makes NIXL's list of them."""
    a, b = connect(ours)
    count, length = 1 << 21, 64
    overlapping = np.array(
        [[side.area.inside.ctypes.data, length, 0, 0, count // 2] for side in (a, b)], np.uint64
    )
    overlapping[:, 3] = (BLOCK * NUM_BLOCKS - length) // (count // 2)  # all start at one address
    steps = np.array([[0, length, 0, length, BLOCK * NUM_BLOCKS // length]], np.uint64)
    lists = []
    for name, side, row in (("", a, overlapping[0]), ("b", b, overlapping[1])):
        steps[0, 0] = side.area.inside.ctypes.data
        lists.append(a.agent.prep_xfer_dlist(name, np.concatenate([[row], [row], steps]), "DRAM"))
    # The third run: what comes before it must be counted.
    mine, theirs = (np.array(chosen) + count for chosen in ([5, 100, 6], [7, 200, 8]))
    handle = a.agent.make_prepped_xfer("READ", lists[0], mine, lists[1], theirs)
    move(a.agent, handle)
    pieces, source = (x.area.expected[64:-64].reshape(-1, length) for x in (a, b))
    pieces[[5, 100, 6]] = source[[7, 200, 8]]
    a.area.check()
    b.area.check()


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ([0, 64, 0, 64, 1 << 31], "largest index"),
        ([0, 64, 0, 1 << 60, 1 << 8], "beyond the end of the address space"),
        ([0, 0, 0, 64, 8], "zero length"),
        ([0, 64, 0, 64, 0], "are empty"),
        ([BLOCK * NUM_BLOCKS - 64, 64, 0, 64, 2], "local descriptor 1 .* is not wholly inside"),
    ],
    ids=str,
)
def test_bad_strided_lists(ours, row, error):
    a, _b = connect(ours)
    bindings = ours.bindings
    strided = np.array([row], np.uint64)
    strided[0, 0] += a.area.inside.ctypes.data
    with pytest.raises((bindings.nixlInvalidParamError, bindings.nixlNotFoundError), match=error):
        a.agent.prep_xfer_dlist("", strided, "DRAM")


@pytest.mark.parametrize("form", [tuple, list, np.array, lambda x: np.array(x, np.uint16), iter])
def test_forms_of_indices(ours, form):
    a, b = connect(ours)
    local, remote = (
        a.agent.prep_xfer_dlist(name, side.area.rows(range(NUM_BLOCKS), BLOCK), "DRAM")
        for name, side in (("", a), ("b", b))
    )
    if form is iter:
        with pytest.raises(ours.bindings.nixlInvalidParamError):
            a.agent.make_prepped_xfer("READ", local, form([4, 2]), remote, form([1, 3]))
        return
    move(a.agent, a.agent.make_prepped_xfer("READ", local, form([4, 2]), remote, form([1, 3])))
    expected_blocks(a.area)[[4, 2]] = expected_blocks(b.area)[[1, 3]]
    a.area.check()


def test_none_is_serialised_and_read_back(api):
    agent = api.nixl_agent("a", api.nixl_agent_config(backends=[]))
    assert agent.deserialize_descs(agent.get_serialized_descs(None)) is None


def test_a_plugin_whose_library_is_missing(api):
    agent = api.nixl_agent("a", api.nixl_agent_config(backends=[]))
    assert "GDS" in agent.get_plugin_list()
    assert agent.get_plugin_params("GDS") == {}
    assert agent.get_plugin_mem_types("GDS") == []
    with pytest.raises(api.bindings.nixlNotFoundError):
        agent.create_backend("GDS")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": 5}, TypeError),
        ({"name": None}, TypeError),
        ({"name": ""}, ValueError),
        ({"listen_port": 1 << 16}, TypeError),
        ({"listen_port": "8888"}, TypeError),
        ({"variable": "NIXL_ETCD_ENDPOINTS"}, RuntimeError),
    ],
    ids=str,
)
def test_errors_of_the_constructor(monkeypatch, api, arguments, error):
    settings = dict(arguments)
    name = settings.pop("name", "a")
    if variable := settings.pop("variable", None):
        monkeypatch.setenv(variable, "")
    with pytest.raises(error):
        api.nixl_agent(name, api.nixl_agent_config(backends=[], **settings))


@pytest.mark.parametrize("package", PACKAGES.values())
def test_programs_that_deregister_at_exit_see_no_traceback(package):
    code = f"""
        import numpy as np
        from {package}._api import nixl_agent, nixl_agent_config
        class Holder:
            def __init__(self):
                self.agent = nixl_agent("a", nixl_agent_config(enable_prog_thread=False))
                self.memory = np.zeros(4096, np.uint8)
                row = (self.memory.ctypes.data, 4096, 0)
                self.registered = self.agent.register_memory([(*row, "")], "DRAM")
                self.prepared = self.agent.prep_xfer_dlist("", [row], "DRAM")
                descs = self.agent.get_xfer_descs([row], "DRAM")
                self.handle = self.agent.initialize_xfer("READ", descs, descs, "a")
            def __del__(self):
                self.agent.release_xfer_handle(self.handle)
                self.agent.release_dlist_handle(self.prepared)
                self.agent.deregister_memory(self.registered)
                self.agent.remove_remote_agent("nobody")
                print("deregistered")
        holder = Holder()
        holder.cycle = holder
    """
    result = interpret(code, NIXL_LOG_LEVEL="fatal")
    assert "Traceback" not in result.stderr
    assert "deregistered" in result.stdout


@pytest.mark.parametrize(("level", "shown"), [("debug", "DI"), ("info", "I"), ("error", "")])
def test_the_log_obeys_nixls_variable(level, shown):
    code = """
        from pynixlkv.nixl_api._logging import get_logger
        log = get_logger("test")
        log.debug("D")
        log.info("I")
    """
    lines = run_python(code, NIXL_LOG_LEVEL=level).splitlines()
    assert "".join(line[-1] for line in lines) == shown


# ---- the switch


def test_install_gives_our_modules_to_those_who_import_nixl():
    code = """
        from pynixlkv.nixl_api import install
        install()
        install()
        import importlib.util
        import nixl, nixl._utils, nixl.logging
        import nixl._api as a, nixl._bindings as b
        from nixl import nixl_agent, nixl_agent_config
        assert importlib.util.find_spec("nixl") is not None
        assert nixl_agent is a.nixl_agent and nixl._bindings is b is a.nixlBind
        print(a.nixl_agent.__module__, b.nixlXferTelemetry.__module__, nixl.DRAM_SEG)
        nixl.logging.get_logger(__name__).info("nothing to see")
        agent = nixl_agent("a", nixl_agent_config(backends=["UCX"]))
        print(agent.add_remote_agent.__module__, len(agent.get_agent_metadata()) > 100)
    """
    assert run_python(code, NIXL_LOG_LEVEL="error").splitlines() == [
        "pynixlkv.nixl_api._api pynixlkv.nixl_api._bindings nixl_mem_t.DRAM_SEG",
        "pynixlkv.nixl_api._api True",
    ]


def test_install_comes_too_late_after_the_import_of_nixl():
    code = """
        import nixl_cu12
        from pynixlkv.errors import StateError
        from pynixlkv.nixl_api import install
        try:
            install("nixl_cu12")
        except StateError as error:
            print(error)
    """
    assert "call install() before anything imports it" in run_python(code)


@pytest.mark.parametrize(("value", "expected"), [("0", "False"), ("1", "True"), ("yes", "refused")])
def test_the_environment_variable(value, expected):
    code = """
        import importlib.util
        import sys
        from importlib.metadata import entry_points
        (point,) = [p for p in entry_points(group="vllm.general_plugins")
                    if p.name == "pynixlkv_nixl_api"]
        try:
            point.load()()
            assert "nixl" not in sys.modules  # vLLM looks for it before it sets UCX's variables
            print(importlib.util.find_spec("nixl") is not None)
        except ValueError:
            print("refused")
    """
    assert run_python(code, PYNIXLKV_NIXL_API=value, NIXL_LOG_LEVEL="error") == expected


PROGRAM_NAMES = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "rixl")
PROGRAM = """
import sys
from {name}._api import nixl_agent
print(nixl_agent.__module__, sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("name", PROGRAM_NAMES)
def test_a_program_runs_on_ours_whatever_it_imports(tmp_path, name):
    (tmp_path / "program.py").write_text(PROGRAM.format(name=name))
    command = [sys.executable, "-m", "pynixlkv.nixl_api"]
    for arguments in (["program.py"], ["-m", "program"]):
        result = subprocess.run(
            [*command, *arguments, "--flag", "x"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        assert f"stands in for {', '.join(PROGRAM_NAMES)}" in result.stdout
        expected = "pynixlkv.nixl_api._api ['--flag', 'x'] __main__"
        assert result.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize("arguments", [["program.py"], ["-m", "program"]])
def test_a_program_keeps_the_path_that_it_was_given(tmp_path, arguments):
    (tmp_path / "program.py").write_text("import other")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "other.py").write_text("print('found')")
    path = os.pathsep.join(map(str, (tmp_path / "lib", tmp_path)))
    result = subprocess.run(
        [sys.executable, "-m", "pynixlkv.nixl_api", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines()[-1] == "found"


def test_a_program_must_be_named():
    result = subprocess.run(
        [sys.executable, "-m", "pynixlkv.nixl_api"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("usage: python -m pynixlkv.nixl_api")
