"""UCX without NIXL: `UcxAgent`, and under it the thin binding of the native verbs."""

from __future__ import annotations

from pynixlkv.ucx.agent import UcxAgent
from pynixlkv.ucx.batch import Batch, get_batch, put_batch
from pynixlkv.ucx.binding import (
    Context,
    Endpoint,
    Listener,
    MemoryHandle,
    RemoteKey,
    Request,
    Worker,
    am_send_nbx,
    flush_nbx,
    get_nbx,
    put_nbx,
)

__all__ = [
    "Batch",
    "Context",
    "Endpoint",
    "Listener",
    "MemoryHandle",
    "RemoteKey",
    "Request",
    "UcxAgent",
    "Worker",
    "am_send_nbx",
    "flush_nbx",
    "get_batch",
    "get_nbx",
    "put_batch",
    "put_nbx",
]
