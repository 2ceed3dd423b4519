"""NIXL: `NixlAgent`, and under it the thin binding of the native verbs."""

from __future__ import annotations

from pynixlkv.nixl.binding import (
    Agent,
    AgentConfig,
    Backend,
    Notification,
    PluginParams,
    PreparedList,
    Registration,
    Request,
    RequestState,
    ThreadSync,
    TransferCost,
    TransferTelemetry,
)
from pynixlkv.nixl.engine import NixlAgent

__all__ = [
    "Agent",
    "AgentConfig",
    "Backend",
    "NixlAgent",
    "Notification",
    "PluginParams",
    "PreparedList",
    "Registration",
    "Request",
    "RequestState",
    "ThreadSync",
    "TransferCost",
    "TransferTelemetry",
]
