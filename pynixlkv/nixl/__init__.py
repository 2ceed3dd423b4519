"""NIXL: the thin binding of its native verbs."""

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

__all__ = [
    "Agent",
    "AgentConfig",
    "Backend",
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
