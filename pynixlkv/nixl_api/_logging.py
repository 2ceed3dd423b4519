"""What ``nixl.logging`` offers."""

from __future__ import annotations

import functools
import logging
import os
import sys

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


@functools.cache
def _root() -> logging.Logger:
    """Set the logger "nixl" up, as NIXL does, unless the application has done so."""
    root = logging.getLogger("nixl")
    asked = os.environ.get("NIXL_LOG_LEVEL", "INFO").upper()
    if root.level == logging.NOTSET:
        root.setLevel(_LEVELS.get(asked, logging.INFO))
    if not root.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    return root


def get_logger(name: str) -> logging.Logger:
    """Return a logger below "nixl", whose level is that of ``NIXL_LOG_LEVEL``."""
    return _root().getChild(name.lstrip("_"))
