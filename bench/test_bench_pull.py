"""Pull the same scattered blocks of a Llama-3.1-8B cache from another process, through NixlAgent
and through NIXL's own Python API, in one run on one machine.
"""

from contextlib import contextmanager

import numpy as np
import pytest

from bench.peers.pools import (
    LAYERS,
    NUM_BLOCKS,
    PAGE_BYTES,
    make_pool,
    page_indices,
    page_rows,
    spans,
)
from bench.peers.source import NixlPythonSource, PynixlkvSource
from pynixlkv.testing.process import ChildProcess

SEED = 1
NUM_MOVED = 32
NUM_BYTES = NUM_MOVED * LAYERS * 2 * PAGE_BYTES


@contextmanager
def source(kind):
    with ChildProcess("source") as child:
        child.call(kind, SEED, keep=True)
        yield child.call("describe")


@contextmanager
def pull_with_pynixlkv(tensors, local, remote):
    from pynixlkv import KVCache, TransferPlan
    from pynixlkv.nixl import NixlAgent

    cache = KVCache.from_tensors(
        {f"layer.{i}": tensor for i, tensor in enumerate(tensors)}, axes="KBHND", kv_heads=8
    )
    with source(PynixlkvSource) as hello, NixlAgent("reader") as agent:
        agent.register(cache)
        peer = agent.connect(hello)
        plan = TransferPlan(cache.geometry, peer.geometry)

        def pull():
            with agent.read(peer, plan, local, remote, timeout=30.0) as transfer:
                return transfer.wait().descriptors

        yield pull


@contextmanager
def pull_with_nixl_python(tensors, local, remote):
    pytest.importorskip("torch", reason="NIXL's Python package imports torch")
    from nixl_cu12._api import nixl_agent

    agent = nixl_agent("reader")
    registered = agent.register_memory([(*span, 0, "") for span in spans(tensors)], "DRAM")
    with source(NixlPythonSource) as (metadata, addresses):
        name = agent.add_remote_agent(metadata)
        mine = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", page_rows([address for address, _ in spans(tensors)]), "DRAM"
        )
        theirs = agent.prep_xfer_dlist(name, page_rows(addresses), "DRAM")
        local_indices, remote_indices = page_indices(local), page_indices(remote)

        def pull():
            handle = agent.make_prepped_xfer("READ", mine, local_indices, theirs, remote_indices)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            assert state == "DONE"
            return len(local_indices)

        yield pull
        agent.release_dlist_handle(mine)
        agent.release_dlist_handle(theirs)
        agent.remove_remote_agent(name)
    agent.deregister_memory(registered)


@pytest.mark.parametrize("pull_with", [pull_with_pynixlkv, pull_with_nixl_python])
def test_pull(benchmark, pull_with):
    rng = np.random.default_rng(SEED)
    local, remote = (rng.permutation(NUM_BLOCKS)[:NUM_MOVED] for _ in range(2))
    tensors = make_pool()
    with pull_with(tensors, local, remote) as pull:
        descriptors = benchmark.pedantic(pull, rounds=15, warmup_rounds=1)
    for found, expected in zip(tensors, make_pool(SEED), strict=True):
        assert np.array_equal(found[:, local], expected[:, remote])
        assert not found[:, np.setdiff1d(np.arange(NUM_BLOCKS), local)].any()
    benchmark.extra_info |= {
        "bytes": NUM_BYTES, "descriptors": descriptors, "block_bytes": PAGE_BYTES,
        "layout": "KBHND",
    }  # fmt: skip
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = NUM_BYTES / benchmark.stats.stats.median / 1e9
