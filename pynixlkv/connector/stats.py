"""What a worker counts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pynixlkv.agent import Transfer, TransferResult

__all__ = ["ConnectorStats"]


class ConnectorStats:
    """Counts what happens in a worker."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """Count one event."""
        self._counts[name] += 1

    def transfer_done(self, result: TransferResult) -> None:
        """Count a transfer that ended well."""
        self._counts["transfers"] += 1
        self._counts["bytes"] += result.bytes

    def transfer_failed(self, transfer: Transfer) -> None:  # noqa: ARG002
        """Count a transfer that did not."""
        self._counts["transfers_failed"] += 1

    def ended(self, state: str, error: Exception | None) -> None:  # noqa: ARG002
        """Count the end of a request."""
        self._counts[state] += 1

    def lease_ended(self, why: str) -> None:
        """Count the end of a lease."""
        self._counts[f"lease {why}"] += 1

    def set_gauges(self, *, live_leases: int, peers: int) -> None:
        """Set what is there now."""

    def describe(self) -> str:
        """Return the counts in a line."""
        return str(dict(self._counts))
