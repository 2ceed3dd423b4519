"""Move paged KV-cache blocks between LLM serving processes, any layout to any layout."""

from __future__ import annotations

__version__ = "0.1.0"
