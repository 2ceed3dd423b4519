"""The side whose scattered blocks are read: ``python -m bench.peers.owner FD ENGINE MEMORY``.

Sends its hello and the address of its blocks, then waits until the reader hangs up.
"""

import contextlib
import sys
from multiprocessing.connection import Connection

import numpy as np

TOTAL_BYTES = 64 << 20
SEED = 11


def make_bytes():
    """Return the bytes that the owner has."""
    return np.random.default_rng(SEED).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)


def make_agent(engine, name):
    """Return an agent of an engine."""
    if engine == "ucx":
        from pynixlkv.ucx import UcxAgent

        return UcxAgent(name)
    from pynixlkv.nixl import NixlAgent

    return NixlAgent(name)


def main(fd, engine, memory):
    reader = Connection(int(fd))
    with make_agent(engine, "owner") as agent:
        blocks = (
            agent.allocate(TOTAL_BYTES) if memory == "allocated" else np.empty(TOTAL_BYTES, "u1")
        )
        blocks[:] = make_bytes()
        agent.register(blocks)
        reader.send((agent.hello(), blocks.ctypes.data))
        with contextlib.suppress(EOFError):
            reader.recv()


if __name__ == "__main__":
    main(*sys.argv[1:])
