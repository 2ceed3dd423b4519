"""What type checkers must reject. Each wrong line names its error; mypy complains where none is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pynixlkv import AgentName, KVCache, TransferPlan
from pynixlkv.agent import Agent, Notification, Peer, Transfer, TransferResult
from pynixlkv.topology import read_sources


def swapped(agent: Agent, peer: Peer, plan: TransferPlan) -> None:
    agent.read(plan, peer, [1], [2])  # type: ignore[arg-type]
    agent.read(peer, plan, [1], [2], b"req-7")  # type: ignore[misc]


def text_for_bytes(agent: Agent, peer: Peer, plan: TransferPlan) -> None:
    agent.write(peer, plan, [1], [2], notify="req-7")  # type: ignore[arg-type]
    agent.notify(peer, "req-7")  # type: ignore[arg-type]
    agent.connect("hello")  # type: ignore[arg-type]


def a_name_is_not_any_text() -> None:
    Notification("decode-0", b"")  # type: ignore[arg-type]
    Notification(AgentName("decode-0"), b"")


def a_cache_is_not_a_geometry(cache: KVCache) -> None:
    TransferPlan(cache, cache)  # type: ignore[arg-type]


def what_must_be_said(tensor: NDArray[np.float16]) -> None:
    KVCache.from_tensors({"layer.0": tensor})  # type: ignore[call-arg]
    KVCache.from_tensors({"layer.0": tensor}, axes="HND")  # type: ignore[call-arg]
    read_sources(8, (0, 1), remote_size=1)  # type: ignore[misc]


def a_transfer_is_not_its_result(transfer: Transfer) -> TransferResult:
    return transfer  # type: ignore[return-value]
