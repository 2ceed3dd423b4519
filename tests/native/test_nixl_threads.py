"""One agent used by many threads at once, in every mode of NIXL's own locking."""

import threading

import numpy as np
import pytest
from transfers import Area, run, take_notifications

from pynixlkv.nixl import AgentConfig, ThreadSync

BLOCK = 4096
NUM_READERS = 4
ROUNDS = 200


@pytest.mark.parametrize("sync", list(ThreadSync), ids=lambda sync: sync.name)
def test_threads_transfer_register_connect_and_notify(make_agent, sync):
    agent = make_agent("a", AgentConfig(thread_sync=sync))
    remote = make_agent("b", AgentConfig(thread_sync=sync))
    source, target = Area(BLOCK * NUM_READERS, 1), Area(BLOCK * NUM_READERS, 2)
    others = [make_agent(f"peer {i}") for i in range(3)]
    metadata = [other.get_local_md() for other in others]
    failures, seen = [], []
    is_over = threading.Event()

    def guarded(function, *args):
        def body():
            try:
                function(*args)
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=body)

    def read(i):
        ours, theirs = target.rows([i], BLOCK), source.rows([i], BLOCK)
        for round_number in range(ROUNDS):
            note = f"{i} {round_number}".encode()
            with agent.create_xfer_req("READ", ours, theirs, "b", notification=note) as request:
                run(agent, request)

    def register():
        while not is_over.is_set():
            data = bytearray(BLOCK)
            with agent.register_buffers(data) as registration:
                agent.get_local_partial_md(registration.descriptors)

    def connect():
        while not is_over.is_set():
            for bytes_of_peer, other in zip(metadata, others, strict=True):
                agent.load_remote_md(bytes_of_peer)
                agent.invalidate_remote_md(other.name)

    def listen():
        seen.extend(take_notifications(remote, NUM_READERS * ROUNDS, timeout=300))

    with agent.register_buffers(target.inside), remote.register_buffers(source.inside):
        agent.load_remote_md(remote.get_local_md())
        readers = [guarded(read, i) for i in range(NUM_READERS)] + [guarded(listen)]
        background = [guarded(register), guarded(connect)]
        for thread in readers + background:
            thread.start()
        for thread in readers:
            thread.join()
        is_over.set()
        for thread in background:
            thread.join()
    assert not failures
    assert np.array_equal(target.inside, source.inside)
    expected = {f"{i} {n}".encode() for i in range(NUM_READERS) for n in range(ROUNDS)}
    assert len(seen) == len(expected)
    assert {note.message for note in seen} == expected
