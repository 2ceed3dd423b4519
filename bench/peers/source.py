"""The side that is read from: ``python -m bench.peers.source FD ENGINE SEED``.

Sends what the reader needs to reach its pool, then waits until the reader hangs up.
"""

import sys
from multiprocessing.connection import Connection

from bench.peers.pools import make_pool, spans


def main(fd, engine, seed):
    reader = Connection(int(fd))
    tensors = make_pool(int(seed))
    if engine == "pynixlkv":
        from pynixlkv import KVCache
        from pynixlkv.nixl import NixlAgent

        cache = KVCache.from_tensors(
            {f"layer.{i}": tensor for i, tensor in enumerate(tensors)}, axes="KBHND", kv_heads=8
        )
        agent = NixlAgent("source")
        agent.register(cache)
        reader.send_bytes(agent.hello(cache))
    else:
        from nixl_cu12._api import nixl_agent

        agent = nixl_agent("source")
        agent.register_memory([(*span, 0, "") for span in spans(tensors)], "DRAM")
        reader.send((agent.get_agent_metadata(), [address for address, _ in spans(tensors)]))
    try:
        reader.recv_bytes()
    except EOFError:
        pass
    finally:
        if engine == "pynixlkv":
            agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
