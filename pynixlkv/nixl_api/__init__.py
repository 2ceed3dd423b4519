"""NIXL's own Python API on pynixlkv: for programs that are written for the package ``nixl``.

Either import from here what they import from ``nixl``, or call `install` before they do. Names,
argument forms and return values are those of NIXL 1.5. Where NIXL's package crashes, hangs or
reads stray memory (a handle used after its release, memory deregistered twice, an index beyond a
list, a pickle from a peer), this raises.
"""

from __future__ import annotations

from pynixlkv.nixl_api._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)
from pynixlkv.nixl_api._switch import install, install_if_asked

__all__ = [
    "DEFAULT_COMM_PORT",
    "install",
    "install_if_asked",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
