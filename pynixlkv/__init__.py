"""Move paged KV-cache blocks between LLM serving processes, any layout to any layout.

This module has what describes and plans. The agents that move bytes are in modules of their own,
`pynixlkv.nixl` and `pynixlkv.testing`, so that importing this one stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pynixlkv import _kernels, _native  # noqa: F401, TID251
except ImportError as error:
    raise ImportError(
        f"the native modules of {__path__[0]} cannot be imported ({error}). If that is a checkout, "
        "it hides any pynixlkv that is installed: build it with `make build`, or run Python in "
        "another folder"
    ) from error

from pynixlkv.geometry import Geometry, KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.types import AgentName, MemorySpan, MemoryType, Operation, TransferState

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
    "TransferState",
    "native_report",
]
__version__ = "0.1.0"

# Public names whose modules are imported on first use, to keep `import pynixlkv` light.
_LAZY = {"native_report": "pynixlkv._loader"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
