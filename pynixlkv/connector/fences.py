"""Work on a device that the connector waits for without blocking."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DONE", "DeviceEvent", "has_completed"]


class DeviceEvent(Protocol):
    """Work on a device that is under way."""

    def query(self) -> bool:
        """Return whether it has ended; raise if it has failed. Does not block."""
        ...


class _Done:
    def query(self) -> bool:
        return True


DONE: DeviceEvent = _Done()
"""Of work that has ended when it is asked for."""


def has_completed(event: DeviceEvent) -> bool:
    """Return whether the work has ended, well or not; who needs it has been told a failure."""
    try:
        return event.query()
    except Exception:
        return True
