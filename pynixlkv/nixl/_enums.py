"""Enumerations of NIXL that native functions take and return."""

from __future__ import annotations

import enum


class ThreadSync(enum.IntEnum):
    """Locking inside NIXL. An agent may be used from several threads with each of them."""

    NONE = 0
    """NIXL has no locks; the agent lets one call run at a time."""
    STRICT = 1
    """NIXL lets one call run at a time."""
    RW = 2
    """NIXL lets posts and polls of different requests run side by side."""


class XferState(enum.IntEnum):
    """State of a request."""

    NOT_POSTED = 0
    PENDING = 1
    DONE = 2
    FAILED = 3
    RELEASED = 4
