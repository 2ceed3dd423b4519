"""NIXL: `NixlAgent`, and under it the thin binding of the native verbs."""

from __future__ import annotations

from pynixlkv._native.nixl import (
    Backend,
    PluginParams,
    PreparedList,
    Registration,
    TransferCost,
    TransferTelemetry,
    XferRequest,
)
from pynixlkv.nixl._enums import ThreadSync, XferState
from pynixlkv.nixl.agent import NixlAgent
from pynixlkv.nixl.files import BlockFile, FileTransfer
from pynixlkv.nixl.verbs import Agent, AgentConfig, Notification

__all__ = [
    "Agent",
    "AgentConfig",
    "Backend",
    "BlockFile",
    "FileTransfer",
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
