"""The pool that is read from, in a child process, and how a reader reaches it."""

from bench.peers.pools import make_pool, spans


class PynixlkvSource:
    def __init__(self, seed):
        from pynixlkv import KVCache
        from pynixlkv.nixl import NixlAgent

        self.tensors = make_pool(seed)
        layers = {f"layer.{i}": tensor for i, tensor in enumerate(self.tensors)}
        self.cache = KVCache.from_tensors(layers, axes="KBHND", kv_heads=8)
        self.agent = NixlAgent("source")
        self.agent.register(self.cache)

    def describe(self):
        return self.agent.hello(self.cache)

    def close(self):
        self.agent.close()


class NixlPythonSource:
    def __init__(self, seed):
        from nixl_cu12._api import nixl_agent

        self.tensors = make_pool(seed)
        self.agent = nixl_agent("source")
        self.agent.register_memory([(*span, 0, "") for span in spans(self.tensors)], "DRAM")

    def describe(self):
        return self.agent.get_agent_metadata(), [address for address, _ in spans(self.tensors)]
