"""UCX without NIXL: `UcxAgent`, and under it the thin binding of the native verbs."""

from __future__ import annotations

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
from pynixlkv.ucx.engine import UcxAgent

__all__ = [
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
    "get_nbx",
    "put_nbx",
]
