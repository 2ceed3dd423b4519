"""UCX without NIXL: `UcxAgent`."""

from __future__ import annotations

from pynixlkv.ucx.engine import UcxAgent

__all__ = ["UcxAgent"]
