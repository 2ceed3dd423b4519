"""The thin binding between two processes: bytes both ways, lost peers, peers that stand still."""

import ctypes
import gc
import os
import time
import warnings

import numpy as np
import pytest
from transfers import Area, run, take_notifications

from pynixlkv.errors import NixlBackendError, RegistrationInUseError
from pynixlkv.nixl import Agent, XferState

BLOCK = 1 << 16
NUM_BLOCKS = 64
TCP = {"engine_config": "TLS=tcp"}


def serve(channel, params):
    """Target: show an area, compare it when told to, end when told to."""
    area = Area(BLOCK * NUM_BLOCKS, 2)
    with Agent("target") as agent:
        agent.create_backend("UCX", params)
        with agent.register_buffers(area.inside):
            channel.send((agent.get_local_md(), area.rows(range(NUM_BLOCKS), BLOCK)))
            agent.load_remote_md(channel.receive())
            channel.send("connected")
            while True:
                expected_notes = channel.receive()
                if expected_notes is None:
                    break
                notes = take_notifications(agent, len(expected_notes))
                channel.send((notes == expected_notes, area.whole.copy()))
    return "closed"


@pytest.fixture
def connect(make_agent, start_peer):
    """Start a target and connect an agent with one registered area to it."""

    def connect_to(params=None):
        peer = start_peer(serve, params)
        agent = make_agent("initiator", params=params)
        area = Area(BLOCK * NUM_BLOCKS, 1)
        registration = agent.register_buffers(area.inside)
        metadata, rows = peer.receive()
        assert agent.load_remote_md(metadata) == "target"
        peer.send(agent.get_local_md())
        assert peer.receive() == "connected"
        return peer, agent, area, registration, rows

    return connect_to


def run_many(agent, request):
    """The first post after a peer's death can still succeed."""
    for _ in range(1000):
        run(agent, request)


@pytest.mark.parametrize("params", [None, TCP], ids=["default", "tcp"])
def test_a_killed_peer_is_an_error_and_everything_can_be_released(connect, params):
    peer, agent, area, registration, rows = connect(params)
    ours = area.rows(range(NUM_BLOCKS), BLOCK)
    with agent.create_xfer_req("READ", ours, rows, "target") as request:
        run(agent, request)
        peer.kill()
        with pytest.raises(NixlBackendError, match="peer 'target'"):
            run_many(agent, request)
        assert request.state is XferState.FAILED
        with pytest.raises(NixlBackendError):
            agent.get_xfer_status(request)
    registration.close()


def test_a_request_to_a_stopped_peer_is_quarantined_until_it_is_quiet(connect):
    peer, agent, area, registration, rows = connect(TCP)
    ours = area.rows(range(NUM_BLOCKS), BLOCK)
    with agent.create_xfer_req("READ", ours[:1], rows[:1], "target") as warm:
        run(agent, warm)
    peer.stop()
    request = agent.create_xfer_req("READ", ours, rows, "target")
    assert agent.post_xfer_req(request) is XferState.PENDING
    started = time.monotonic()
    assert not agent.release_xfer_req(request, timeout=0.1)
    assert time.monotonic() - started >= 0.1
    assert agent.num_quarantined == 1
    assert "1 requests quarantined" in repr(agent)
    with pytest.raises(RegistrationInUseError):
        registration.close()
    peer.resume()
    # Closing waits for the bytes; then they are all there.
    assert agent.close(timeout=60)
    assert registration.is_closed
    assert agent.num_quarantined == 0
    assert np.array_equal(area.inside, Area(BLOCK * NUM_BLOCKS, 2).inside)
    peer.send(None)
    assert peer.finish() == "closed"


def abandon(channel, params):
    """Initiator: close an agent whose request cannot end."""
    area = Area(BLOCK * NUM_BLOCKS, 1)
    agent = Agent("initiator")
    agent.create_backend("UCX", params)
    registration = agent.register_buffers(area.inside)
    metadata, rows = channel.receive()
    agent.load_remote_md(metadata)
    channel.send(agent.get_local_md())
    channel.receive()  # the target stands still now
    request = agent.create_xfer_req("READ", area.rows(range(NUM_BLOCKS), BLOCK), rows, "target")
    state = agent.post_xfer_req(request)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_quiet = agent.close(timeout=0.1)
    # The memory stays, whoever forgets it, and the bytes still arrive in it.
    address = area.inside.ctypes.data
    del registration, agent, area
    gc.collect()
    channel.send((state.name, is_quiet, [str(w.message) for w in caught]))
    expected = channel.receive()
    memory = (ctypes.c_char * len(expected)).from_address(address)
    deadline = time.monotonic() + 60
    while memory.raw != expected:
        assert time.monotonic() < deadline
        os.sched_yield()
    return "arrived"


def test_closing_on_a_stopped_peer_abandons_the_agent_and_kills_nobody(start_peer):
    target = start_peer(serve, TCP)
    initiator = start_peer(abandon, TCP)
    initiator.send(target.receive())
    target.send(initiator.receive())
    assert target.receive() == "connected"
    target.stop()
    initiator.send("go")
    state, is_quiet, caught = initiator.receive()
    assert (state, is_quiet) == ("PENDING", False)
    assert "closed with 1 requests running" in caught[0]
    target.resume()
    initiator.send(Area(BLOCK * NUM_BLOCKS, 2).inside.tobytes())
    assert initiator.finish() == "arrived"
    target.send([])
    notes_are_right, whole = target.receive()
    assert notes_are_right
    assert np.array_equal(whole, Area(BLOCK * NUM_BLOCKS, 2).whole)
    target.send(None)
    assert target.finish() == "closed"
