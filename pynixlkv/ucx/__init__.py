"""UCX without NIXL: `UcxAgent`, and the thin binding of UCX's own verbs."""

from __future__ import annotations

from pynixlkv._native.ucx import Batch, Request
from pynixlkv.ucx.agent import UcxAgent
from pynixlkv.ucx.batch import get_batch, put_batch
from pynixlkv.ucx.binding import (
    Context,
    Endpoint,
    MemoryHandle,
    RemoteKey,
    Worker,
    flush_nbx,
    get_nbx,
    put_nbx,
)

__all__ = [
    "Batch",
    "Context",
    "Endpoint",
    "MemoryHandle",
    "RemoteKey",
    "Request",
    "UcxAgent",
    "Worker",
    "flush_nbx",
    "get_batch",
    "get_nbx",
    "put_batch",
    "put_nbx",
]
