"""What type checkers must accept, and the types they must see; checked, never run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

from pynixlkv import AgentName, Geometry, KVCache, TransferPlan
from pynixlkv.agent import Agent, Notification, Peer, Transfer, TransferResult
from pynixlkv.errors import PeerLostError, TransferError
from pynixlkv.topology import Source, read_sources


def plans(local: KVCache, remote: Geometry, tensor: NDArray[np.float16]) -> None:
    cache = KVCache.from_tensors({"layer.0": tensor}, axes="HND", kv_heads=8, tp=(0, 2))
    assert_type(cache, KVCache)
    assert_type(Geometry.from_bytes(cache.geometry.to_bytes()), Geometry)
    (source,) = read_sources(8, local=(0, 1), remote_size=1)
    assert_type(source, Source)
    plan = TransferPlan(local.geometry, remote, heads=source.heads)
    plan.descriptors([1, 2], np.array([3, 4]))


async def transfers(make: Callable[[str], Agent], cache: KVCache, plan: TransferPlan) -> None:
    with make("decode-0") as agent:
        agent.register(cache)
        peer = agent.connect(agent.hello(cache))
        assert_type(peer, Peer)
        assert_type(peer.name, AgentName)
        with agent.read(peer, plan, [1, 2], [3, 4], notify=b"req-7", timeout=30.0) as transfer:
            assert_type(transfer, Transfer)
            assert_type(transfer.wait(timeout=5.0), TransferResult)
            assert_type(await transfer, TransferResult)
            assert_type(transfer.error, TransferError | None)
        assert_type(agent.notifications(timeout=1.0), list[Notification])
        assert_type(agent.close(), bool)
        agent.write(peer, plan, (1,), (2,))


def failures(error: TransferError) -> None:
    if isinstance(error, PeerLostError):
        assert_type(error.peer, str)
    connection: ConnectionError = PeerLostError("gone")
    raise connection
