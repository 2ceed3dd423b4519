"""What a worker tells a tracer of each request: when which part of a hand-off took place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["HandOffSpan", "Phase", "Tracer"]

Phase: TypeAlias = Literal["queued", "handshake", "read", "verified", "staged", "released"]
"""Of a consumer: waiting for blocks of its own engine; for the producer's metadata, its connection
and its lease; for the bytes; for digests; for the copy to the device. Of a producer: from the
last reader's release until the blocks are free."""


@dataclass(frozen=True)
class HandOffSpan:
    """One rank's part in the hand-off of one request, which has just ended."""

    side: Literal["consumer", "producer"]
    request_id: str
    traceparent: str | None
    """The parent, in the form of W3C's header of this name."""
    end: str
    """A value of `EndState` for a consumer; why the lease ended for a producer."""
    seconds: float
    """From the beginning until now."""
    phases: tuple[tuple[Phase, float, float], ...]
    """Each with its beginning and its end, in seconds before now."""
    error: Exception | None = None
    attributes: dict[str, str | int] = field(default_factory=dict)


Tracer: TypeAlias = Callable[[HandOffSpan], None]
"""Takes spans on the connector's thread; must neither wait nor raise."""
