"""Bad input and misuse of the thin binding: an exception each, a living process, no leak."""

import gc
import os
import re
import warnings

import numpy as np
import psutil
import pytest
from interpreter import interpret
from transfers import Area, run

from pynixlkv import _native, errors
from pynixlkv.errors import (
    AlreadyRegisteredError,
    ClosedError,
    ConfigError,
    NixlBackendError,
    NotRegisteredError,
    RegistrationInUseError,
    StateError,
)
from pynixlkv.nixl import Agent, AgentConfig, XferState
from pynixlkv.types import MemorySpan, MemoryType

BLOCK = 4096
NUM_BLOCKS = 16


@pytest.fixture
def one(make_agent):
    """An agent, its registered area, and prepared lists of all blocks for both sides."""
    agent = make_agent()
    area = Area(BLOCK * NUM_BLOCKS, 1)
    rows = area.rows(range(NUM_BLOCKS), BLOCK)
    with (
        agent.register_buffers(area.inside),
        agent.prep_xfer_dlist(None, rows) as local,
        agent.prep_xfer_dlist("a", rows) as remote,
    ):
        yield agent, area, local, remote
    area.check()


# ---- life cycle


def test_registering_and_deregistering_twice_are_errors(make_agent):
    agent = make_agent()
    area = Area(BLOCK, 1)
    first = agent.register_buffers(area.inside)
    address = f"0x{area.inside.ctypes.data:x}"
    with pytest.raises(AlreadyRegisteredError, match=f"{address}.*registered already"):
        agent.register_buffers(area.inside)
    with pytest.raises(AlreadyRegisteredError, match=r"descriptor 1 .* given twice"):
        agent.register_mem([(4096, 8, 0), (4096, 8, 0)])
    agent.deregister_mem(first)
    with pytest.raises(ClosedError, match="was released before"):
        agent.deregister_mem(first)
    first.close()
    with agent.register_buffers(area.inside) as again:
        assert not again.is_closed


def test_memory_in_use_cannot_be_deregistered(make_agent):
    agent = make_agent()
    area = Area(BLOCK * 2, 1)
    registration = agent.register_buffers(area.inside)
    request = agent.create_xfer_req("READ", area.rows([0], BLOCK), area.rows([0], BLOCK), "a")
    prepared = agent.prep_xfer_dlist(None, area.rows([0, 1], BLOCK))
    assert registration.num_users == 3  # the request uses it on both sides
    with pytest.raises(RegistrationInUseError, match="used by 3"):
        agent.deregister_mem(registration)
    request.close()
    with pytest.raises(RegistrationInUseError, match="used by 1"):
        registration.close()
    prepared.close()
    registration.close()


def test_a_released_request_is_refused(one):
    agent, area, *_ = one
    request = agent.create_xfer_req("READ", area.rows([0], BLOCK), area.rows([0], BLOCK), "a")
    assert agent.get_xfer_status(request) is XferState.NOT_POSTED
    run(agent, request)
    assert agent.release_xfer_req(request)
    assert request.state is XferState.RELEASED
    for use in (
        agent.get_xfer_status,
        agent.post_xfer_req,
        agent.release_xfer_req,
        agent.estimate_xfer_cost,
        agent.query_xfer_backend,
        agent.get_xfer_telemetry,
    ):
        with pytest.raises(ClosedError, match="the request was released"):
            use(request)
    request.close()


def test_released_lists_are_refused(one):
    agent, area, _local, remote = one
    short = agent.prep_xfer_dlist(None, area.rows([0], BLOCK))
    request = agent.make_xfer_req("READ", short, [0], remote, [0])
    with pytest.raises(StateError, match="used by 1 requests"):
        agent.release_dlist_handle(short)
    request.close()
    agent.release_dlist_handle(short)
    for use in (
        lambda: agent.release_dlist_handle(short),
        lambda: agent.make_xfer_req("READ", short, [0], remote, [0]),
    ):
        with pytest.raises(ClosedError, match="was released"):
            use()


def test_handles_of_another_agent_are_refused(one, make_agent):
    agent, area, local, remote = one
    other = make_agent("other")
    request = agent.create_xfer_req("READ", area.rows([0], BLOCK), area.rows([0], BLOCK), "a")
    with other.register_buffers(bytearray(64)) as foreign:
        for use in (
            lambda: other.post_xfer_req(request),
            lambda: other.get_xfer_status(request),
            lambda: other.release_xfer_req(request),
            lambda: other.make_xfer_req("READ", local, [0], remote, [0]),
            lambda: other.release_dlist_handle(local),
            lambda: agent.deregister_mem(foreign),
            lambda: other.register_mem([(4096, 8, 0)], backends=agent.backends),
        ):
            with pytest.raises(ConfigError, match="made by another agent"):
                use()
    request.close()


def test_a_closed_agent_is_refused_and_closes_what_it_made():
    agent = Agent("a")
    backend = agent.create_backend("UCX")
    area = Area(BLOCK, 1)
    registration = agent.register_buffers(area.inside)
    prepared = agent.prep_xfer_dlist(None, area.rows([0], BLOCK))
    request = agent.create_xfer_req("READ", area.rows([0], BLOCK), area.rows([0], BLOCK), "a")
    assert agent.close()
    assert agent.close()
    assert registration.is_closed
    assert prepared.is_closed
    assert request.is_closed
    for use in (
        agent.get_local_md,
        agent.get_notifs,
        lambda: agent.register_buffers(area.inside),
        lambda: agent.get_backend_params(backend),
        lambda: agent.post_xfer_req(request),
        lambda: agent.deregister_mem(registration),
    ):
        with pytest.raises(ClosedError):
            use()
    assert "closed" in repr(agent)


def test_what_is_dropped_warns_and_is_freed(make_agent):
    agent = make_agent()
    area = Area(BLOCK, 1)
    request = agent.create_xfer_req  # not called yet: it needs registered memory
    with pytest.warns(ResourceWarning, match="unreleased <Registration of 4096 bytes DRAM"):
        agent.register_buffers(area.inside)
    registration = agent.register_buffers(area.inside)
    with pytest.warns(ResourceWarning, match="unreleased <PreparedList of 1 descriptors"):
        agent.prep_xfer_dlist(None, area.rows([0], BLOCK))
    with pytest.warns(ResourceWarning, match="unreleased <XferRequest READ of 4096 bytes"):
        request("READ", area.rows([0], BLOCK), area.rows([0], BLOCK), "a")
    registration.close()
    with pytest.warns(ResourceWarning, match="unclosed <Agent 'forgotten', open>"):
        Agent("forgotten")


def test_half_made_objects_are_dropped_silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("", "a\0b"):
            with pytest.raises(ConfigError, match="name of an agent"):
                Agent(name)
        with pytest.raises(ConfigError, match="must be a str"):
            Agent(7)
        gc.collect()


def test_a_forked_child_is_refused_and_the_parent_goes_on(one):
    agent, _area, local, remote = one
    request = agent.make_xfer_req("READ", local, [0], remote, [0])
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside NIXL's own thread
        child = os.fork()
    if child == 0:
        answers = []
        for use in (
            agent.get_local_md,
            agent.get_notifs,
            lambda: agent.post_xfer_req(request),
            lambda: agent.release_xfer_req(request),
            lambda: agent.make_xfer_req("READ", local, [0], remote, [0]),
        ):
            try:
                use()
            except Exception as error:
                answers.append(type(error).__name__)
            else:
                answers.append("nothing")
        answers.append(str(agent.close()))
        os.write(write, " ".join(answers).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read().decode().split() == ["ForkError"] * 5 + ["True"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run(agent, request)
    request.close()


@pytest.mark.slow
def test_ten_thousand_transfers_leave_nothing_behind(one):
    agent, area, local, remote = one
    area.expected[:] = area.whole
    process = psutil.Process()
    rows = area.rows([0, 2], BLOCK)

    def transfers(count):
        for _ in range(count):
            with agent.make_xfer_req("READ", local, [0, 2], remote, [0, 2]) as request:
                run(agent, request)
            with agent.create_xfer_req("WRITE", rows, rows, "a", notification=b"n") as request:
                run(agent, request)
            agent.get_notifs()

    transfers(1000)
    counts, before = _native.live_counts(), process.memory_info().rss
    transfers(5000)
    assert _native.live_counts() == counts
    assert process.memory_info().rss - before < 2 << 20


# ---- arguments


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 99], "index 99 at position 1 is out of range; the list has 16"),
        ([-1], "index -1 at position 0 is out of range; the list has 16"),
        ([2**31], "index 2147483648 at position 0 is out of range; the list has 16"),
        ([0, True], "indices holds True at index 1; expected integers"),
        (np.array([True, False]), "dtype bool"),
        (np.array([-5], np.int64), "index -5 at position 0"),
        (np.array([2**63], np.uint64), "index 9223372036854775808 at position 0"),
        ([], "0 local and 0 remote indices"),
        (["0"], "dtype <U1; expected"),
    ],
    ids=str,
)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_bad_indices_are_named_with_position_and_limit(one, indices, message, side):
    agent, _area, local, remote = one
    good = [0] * np.size(np.asarray(indices, dtype=object))
    pair = (indices, good) if side == "local" else (good, indices)
    with pytest.raises(ConfigError, match=message):
        agent.make_xfer_req("READ", local, pair[0], remote, pair[1])


def test_numbers_of_indices_must_agree(one):
    agent, _area, local, remote = one
    with pytest.raises(ConfigError, match="2 local and 1 remote indices"):
        agent.make_xfer_req("READ", local, [0, 1], remote, [0])
    with pytest.raises(ConfigError, match="for the local side and one for a peer"):
        agent.make_xfer_req("READ", remote, [0], local, [0])


def test_lengths_that_differ_are_named(one):
    agent, area, local, _remote = one
    uneven = area.rows(range(8), BLOCK)
    uneven[3, 1] = 2 * BLOCK
    even = area.rows(range(8), BLOCK)
    with pytest.raises(ConfigError, match=r"descriptor 3: local has 4096 bytes, remote has 8192"):
        agent.create_xfer_req("READ", even, uneven, "a")
    with (
        agent.prep_xfer_dlist("a", uneven) as other,
        pytest.raises(ConfigError, match=r"position 1: local descriptor 5 has 4096 .* 3 has 8192"),
    ):
        agent.make_xfer_req("READ", local, [0, 5], other, [0, 3])
    with pytest.raises(ConfigError, match="8 local but 1 remote"):
        agent.create_xfer_req("READ", even, even[:1], "a")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "descriptors are empty"),
        ([(4096, 0, 0)], r"descriptor 0 \(0x1000\+0 on device 0\) has zero length"),
        ([(4096, 8, 0), (-1, 8, 0)], "descriptor 1 has the address -1"),
        ([(4096, -8, 0)], "descriptor 0 has the length -8"),
        ([(4096, 8, 0.0)], r"dtype float64; expected integers of shape \(n, 3\)"),
        ([(2**64 - 4, 8, 0)], "beyond the end of the address space"),
    ],
    ids=str,
)
def test_bad_descriptors_are_named(make_agent, rows, message):
    agent = make_agent()
    for use in (
        lambda: agent.register_mem(rows),
        lambda: agent.prep_xfer_dlist(None, rows),
        lambda: agent.create_xfer_req("READ", rows, rows, "a"),
    ):
        with pytest.raises(ConfigError, match=message):
            use()


def test_unregistered_memory_is_named(one):
    agent, area, *_ = one
    beyond = area.rows([0, NUM_BLOCKS], BLOCK)
    address = f"0x{int(beyond[1, 0]):x}"
    for use in (
        lambda: agent.prep_xfer_dlist(None, beyond),
        lambda: agent.create_xfer_req("READ", beyond, area.rows([0, 1], BLOCK), "a"),
    ):
        with pytest.raises(NotRegisteredError, match=rf"local descriptor 1 \(DRAM {address}"):
            use()
    with pytest.raises(NotRegisteredError, match="remote descriptor 1"):
        agent.create_xfer_req("READ", area.rows([0, 1], BLOCK), beyond, "a")


@pytest.mark.parametrize("name", ["dra", "", "GPU", 0, None, 9])
def test_unknown_memory_types_are_named(make_agent, name):
    with pytest.raises(ConfigError, match=re.escape(repr(name)) + ".*DRAM, VRAM, BLOCK"):
        make_agent().register_mem([(4096, 8, 0)], name)


def test_unknown_operations_are_named(one):
    agent, area, *_ = one
    with pytest.raises(ConfigError, match="'MOVE' is not an operation"):
        agent.create_xfer_req("MOVE", area.rows([0], BLOCK), area.rows([0], BLOCK), "a")


class CudaArray:
    """Claims to be on a GPU."""

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self):
        return np.zeros(64).__dlpack__()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (7, "int: it has neither the buffer protocol nor DLPack"),
        (b"constant", "bytes: it is read-only"),
        (np.zeros((4, 4))[:, ::2], "ndarray: it is not contiguous"),
        (np.zeros(0), "ndarray: it is empty"),
    ],
    ids=["int", "bytes", "strided", "empty"],
)
def test_buffers_that_cannot_be_registered_say_why(make_agent, buffer, message):
    with pytest.raises(ConfigError, match=message):
        make_agent().register_buffers(buffer)


def test_tensors_that_cannot_be_registered_say_why(make_agent):
    torch = pytest.importorskip("torch")
    agent = make_agent()
    with pytest.raises(
        ConfigError, match=r"Tensor: it is not contiguous \(shape \[4, 8\], strides \[1, 4\]"
    ):
        agent.register_buffers(torch.zeros(8, 4).t())
    with pytest.raises(ConfigError, match="Tensor: it is empty"):
        agent.register_buffers(torch.zeros(0))
    with pytest.raises(ConfigError, match="device 'meta:0'"):
        agent.register_buffers(torch.zeros(8, device="meta"))


def test_a_cuda_array_needs_a_backend_for_vram(make_agent):
    with pytest.raises(ConfigError, match=r"no backend for VRAM \(backends: \['POSIX'\]\)"):
        make_agent(backend="POSIX").register_buffers(CudaArray())
    # UCX declares VRAM; without a GPU it refuses what turns out to be host memory.
    with pytest.raises(NixlBackendError, match="VRAM"):
        make_agent().register_buffers(CudaArray())
    with pytest.raises(ConfigError, match="DRAM and VRAM cannot share"):
        make_agent().register_buffers(CudaArray(), bytearray(8))


def test_a_memory_span_is_registered_as_it_is(make_agent):
    area = Area(64, 1)
    span = MemorySpan(area.inside.ctypes.data, 64, MemoryType.DRAM, 0)
    with make_agent().register_buffers(span) as registration:
        assert registration.descriptors.tolist() == [[area.inside.ctypes.data, 64, 0]]
        with pytest.raises(ValueError, match="read-only"):
            registration.descriptors[0, 0] = 0


@pytest.mark.parametrize(
    "options",
    [
        {"listen_port": 65536},
        {"listen_port": True},
        {"progress_delay_us": -1},
        {"thread_sync": 9},
        {"listen_delay_us": 1.5},
    ],
    ids=str,
)
def test_bad_configuration_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AgentConfig(**options)


def test_other_bad_arguments_are_named(one):
    agent, *_ = one
    with pytest.raises(ConfigError, match="message is a str"):
        agent.gen_notif("a", "text")
    with pytest.raises(ConfigError, match="metadata is a str"):
        agent.load_remote_md("text")
    with pytest.raises(ConfigError, match="metadata given to agent 'a' is empty"):
        agent.load_remote_md(b"")
    with pytest.raises(ConfigError, match="at least one buffer"):
        agent.register_buffers()
    with pytest.raises(ConfigError, match="1 metadata strings for 2 descriptors"):
        agent.register_mem([(4096, 8, 0), (8192, 8, 0)], metadata=["x"])
    with pytest.raises(ConfigError, match="timeout is -1"):
        agent.close(timeout=-1)
    with pytest.raises(ConfigError, match="port is 70000"):
        agent.send_local_md("127.0.0.1", 70000)


# ---- status codes


def test_every_status_has_a_kind_that_errors_knows():
    table = {name: (code, kind) for code, name, kind in _native.nixl.status_table()}
    codes = [code for code, _kind in table.values()]
    assert sorted(codes) == list(range(-14, 2))
    for name, (code, kind) in table.items():
        if name in ("SUCCESS", "IN_PROG"):
            assert kind == ""
            continue
        error = errors.from_native(kind, "message", "nixl", code, "call", "detail")
        assert isinstance(error, errors.NixlError)
        assert (error.status, error.call, error.detail) == (code, "call", "detail")
    assert table["BACKEND"] == (-2, "backend")
    assert table["NOT_FOUND"] == (-6, "not_found")


def test_what_is_open_at_exit_is_silent():
    code = """
        from pynixlkv.nixl import Agent
        agent = Agent("a")
        agent.create_backend("UCX")
        registration = agent.register_buffers(bytearray(64))
        rows = registration.descriptors
        request = agent.create_xfer_req("READ", rows, rows, "a")
    """
    done = interpret(code)
    assert (done.stdout, done.stderr) == ("", "")
