"""A complete KV connector for an imaginary engine: prefill here, decode in another process.

python minimal_connector.py [nixl | ucx]
"""

import multiprocessing
import sys
import time

import numpy as np

from pynixlkv import KVCache
from pynixlkv.connector import (
    ConnectorScheduler,
    ConnectorWorker,
    GroupSpec,
    KVTransferParams,
    RequestInfo,
)
from pynixlkv.handshake import Handshake

LAYERS, HEADS, DIM, BLOCK, NUM_BLOCKS = 4, 8, 64, 16, 256


class Engine:
    """The parts of a serving engine that a connector deals with."""

    def __init__(self, name, library):
        # The cache: one tensor per layer, K and V apart, blocks of 16 tokens.
        shape = (2, NUM_BLOCKS, HEADS, BLOCK, DIM)
        self.tensors = {f"layer.{i}": np.zeros(shape, np.float16) for i in range(LAYERS)}
        cache = KVCache.from_tensors(self.tensors, axes="KBHND", kv_heads=HEADS)
        if library == "ucx":
            from pynixlkv.ucx import UcxAgent as Agent
        else:
            from pynixlkv.nixl import NixlAgent as Agent
        self.agent = Agent(name)
        self.worker = ConnectorWorker(self.agent, engine_id=name)
        metadata = self.worker.register_kv_caches(cache)
        self.handshake = Handshake(name, {metadata.rank: metadata.hello}, compatibility={})
        address = self.handshake.host, self.handshake.port
        self.scheduler = ConnectorScheduler(name, [GroupSpec(BLOCK)], address=address)

    def step(self):
        """Run what every step of an engine does; the model would run in the middle."""
        self.worker.start_load_kv(self.scheduler.build_connector_meta())
        finished = self.worker.get_finished()
        self.scheduler.update_finished(**vars(finished))  # sent, received and failed requests
        time.sleep(0.001)
        return finished

    def close(self):
        self.worker.shutdown()
        self.handshake.close()
        self.agent.close()


def prefill(library, pipe):
    """Compute a prompt, hand it over, and free its blocks when the consumer has them."""
    engine = Engine("prefill", library)
    blocks, num_tokens = (7, 3, 200, 12), 64
    for i, tensor in enumerate(engine.tensors.values()):
        tensor[:, list(blocks)] = np.random.default_rng(i).random((2, 4, HEADS, BLOCK, DIM))
    request = RequestInfo("prompt-1", num_tokens, KVTransferParams(do_remote_decode=True))
    _, params = engine.scheduler.request_finished(request, (blocks,), num_tokens)
    pipe.send(params)  # through the proxy, as JSON
    while "prompt-1" not in engine.step().sent:
        pass
    pipe.send([tensor[:, list(blocks)] for tensor in engine.tensors.values()])  # for the check
    engine.close()


def decode(library, pipe):
    """Fetch the prompt's blocks instead of computing them."""
    engine = Engine("decode", library)
    request = RequestInfo("request-a", 64, KVTransferParams.from_dict(pipe.recv()))
    engine.scheduler.on_new_request(request)
    count, _ = engine.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = (50, 51, 52, 53)
    engine.scheduler.update_state_after_alloc(request, (blocks,), 0, count)
    while "request-a" not in (finished := engine.step()).received:
        for end in finished.failed.values():
            raise RuntimeError(f"not received: {end.error}")
    while not pipe.poll():  # the release goes out in the background
        engine.step()
    for tensor, expected in zip(engine.tensors.values(), pipe.recv(), strict=True):
        assert np.array_equal(tensor[:, list(blocks)], expected)
    print(f"decode has the KV of {count} tokens that it did not compute")
    engine.close()


if __name__ == "__main__":
    library = sys.argv[1] if len(sys.argv) > 1 else "nixl"
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=prefill, args=(library, theirs))
    other.start()
    decode(library, ours)
    other.join(10)
