"""Move paged KV-cache blocks between LLM serving processes, any layout to any layout.

This module has what describes and plans. The agents that move bytes are in modules of their own,
`pynixlkv.nixl` and `pynixlkv.testing`, so that importing this one stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pynixlkv.geometry import Geometry, KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.types import AgentName, MemorySpan, MemoryType, Operation

if TYPE_CHECKING:
    from pynixlkv._loader import native_report

__all__ = [
    "AgentName",
    "Geometry",
    "KVCache",
    "MemorySpan",
    "MemoryType",
    "Operation",
    "TransferPlan",
    "native_report",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "native_report":
        # Looking for libraries takes modules that nothing else needs.
        from pynixlkv._loader import native_report

        return native_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
