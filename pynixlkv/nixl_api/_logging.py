"""What ``nixl.logging`` offers."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """Return a logger below "nixl"; levels and handlers are the application's business."""
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
