"""Read scattered blocks of another process, as far as that is from copying them in this one."""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from bench.peers.owner import TOTAL_BYTES, make_agent, make_bytes

ROOT = Path(__file__).parents[1]
WAIT_S = 60.0


def rows(address, places, block):
    table = np.zeros((len(places), 3), dtype=np.uint64)
    table[:, 0] = np.asarray(places, dtype=np.uint64) * np.uint64(block) + np.uint64(address)
    table[:, 1] = block
    return table


@pytest.fixture
def pull(engine, memory, block):
    """Return a function that reads all blocks in a scattered order, and what it must have read."""
    order = np.random.default_rng(1).permutation(TOTAL_BYTES // block)
    here = np.zeros((len(order), block), dtype=np.uint8)
    there = make_bytes().reshape(len(order), block)
    if engine == "memcpy":
        yield lambda: np.take(there, order, axis=0, out=here), here, there[order]
        return
    ours, theirs = socket.socketpair()
    with theirs:
        owner = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.owner", str(theirs.fileno()), engine, memory],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
    connection = Connection(ours.detach())
    try:
        with make_agent(engine, "reader") as agent:
            agent.register(here)
            hello, address = connection.recv()
            peer = agent.connect(hello)
            local = rows(here.ctypes.data, range(len(order)), block)
            remote = rows(address, order, block)
            yield (
                lambda: agent.read_descriptors(peer, local, remote, timeout=WAIT_S).wait(),
                here,
                there[order],
            )
    finally:
        connection.close()
        owner.wait(WAIT_S)


@pytest.mark.parametrize("block", [4 << 10, 16 << 10, 1 << 20], ids=["4 KiB", "16 KiB", "1 MiB"])
@pytest.mark.parametrize(
    ("engine", "memory"),
    [("memcpy", "own"), ("ucx", "allocated"), ("ucx", "ordinary"), ("nixl", "ordinary")],
)
def test_scattered_blocks(benchmark, pull, engine, memory, block):
    read, here, expected = pull
    benchmark.pedantic(read, rounds=15, warmup_rounds=2)
    assert np.array_equal(here, expected)
    benchmark.group = f"scattered blocks of {block >> 10} KiB"
    benchmark.extra_info |= {
        "bytes": TOTAL_BYTES, "descriptors": len(here), "block_bytes": block, "engine": engine,
        "memory": memory, "transport": os.environ.get("UCX_TLS", "all"),
    }  # fmt: skip
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = TOTAL_BYTES / benchmark.stats.stats.median / 1e9
