"""Work on a device that the connector waits for without blocking."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DONE", "Fence", "has_ended"]


class Fence(Protocol):
    """Work on a device that is under way."""

    def done(self) -> bool:
        """Return whether it has ended; raise if it has failed. Does not block."""
        ...


class _Done:
    def done(self) -> bool:
        return True


DONE: Fence = _Done()
"""Of work that has ended when it is asked for."""


def has_ended(fence: Fence) -> bool:
    """Return whether the work has ended, well or not; who needs it has been told a failure."""
    try:
        return fence.done()
    except Exception:
        return True
