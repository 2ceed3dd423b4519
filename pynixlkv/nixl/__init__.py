"""NIXL: `NixlAgent`, and under it the thin binding of the native verbs."""

from __future__ import annotations

from pynixlkv.nixl.agent import NixlAgent
from pynixlkv.nixl.verbs import (
    Agent,
    AgentConfig,
    Backend,
    Notification,
    PluginParams,
    PreparedList,
    Registration,
    ThreadSync,
    TransferCost,
    TransferTelemetry,
    XferRequest,
    XferState,
)

__all__ = [
    "Agent",
    "AgentConfig",
    "Backend",
    "NixlAgent",
    "Notification",
    "PluginParams",
    "PreparedList",
    "Registration",
    "ThreadSync",
    "TransferCost",
    "TransferTelemetry",
    "XferRequest",
    "XferState",
]
