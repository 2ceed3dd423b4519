"""What a connector counts: transfers, bytes, times, failures, leases, peers, odd notifications.

Each worker has a `ConnectorStats`. A `StatsSnapshot` of it is plain data: it can be sent to another
process, added to those of other workers, or exported by `PrometheusMetrics`.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pynixlkv.agent import Transfer, TransferResult

__all__ = [
    "BUCKET_BOUNDS_S",
    "ConnectorStats",
    "EventName",
    "PrometheusMetrics",
    "StatsSnapshot",
    "TimeHistogram",
]

BUCKET_BOUNDS_S: tuple[float, ...] = tuple(2.0**i * 1e-6 for i in range(28))
"""Upper bounds of the buckets of every histogram: powers of two from 1 µs to 134 s."""

EventName: TypeAlias = Literal[
    "attach_failures",  # consumers that could not be connected
    "duplicate_notifications",  # repeated messages
    "early_notifications",  # messages about requests that are not known yet
    "errors",  # defects: a command of the connector raised
    "foreign_notifications",  # bytes that no connector sends
    "late_notifications",  # messages about requests that are over
    "pauses",  # times that this process was stopped or starved
    "peers_lost",  # producers that died while requests needed them
    "refused_readers",  # more than a lease can have; they are served while it lasts
    "releases_lost",  # releases that could not be sent; the lease expires
    "unanswered_notifications",  # messages that could not be answered
]
"""What is counted by name."""

_NUM_BUCKETS = len(BUCKET_BOUNDS_S) + 1


class TimeHistogram(msgspec.Struct):
    """A histogram of durations."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * _NUM_BUCKETS)
    """Values by bucket. A value is at most the bound of its bucket in `BUCKET_BOUNDS_S`; one more
    bucket takes the values above the last bound."""
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a value in seconds; a negative one counts as 0."""
        seconds = max(seconds, 0.0)
        # frexp gives the exponent of the next power of two; exact powers belong to the one below.
        mantissa, exponent = math.frexp(seconds * 1e6)
        bucket = exponent - 1 if mantissa == 0.5 else exponent
        self.counts[min(max(bucket, 0), _NUM_BUCKETS - 1)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def __add__(self, other: TimeHistogram) -> TimeHistogram:
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return TimeHistogram(counts, self.sum_s + other.sum_s)


class StatsSnapshot(msgspec.Struct):
    """Counts of one or several connectors; ``a + b`` adds those of different workers."""

    transfers: int = 0
    """Successful transfers."""
    bytes: int = 0
    descriptors: int = 0
    plan: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    """Time that successful transfers spent on turning block tables into descriptors."""
    post: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    """Time that they spent in the library's post calls."""
    transfer: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    """Time from the call to the end."""
    digest: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    """Time to compute the digests of a request, as its consumer or its producer."""
    transfer_failures: dict[str, int] = {}
    """Other transfers, by their end: ``"timed_out"``, ``"peer_lost"``, …."""
    ends: dict[str, int] = {}
    """Requests that were to be received, by their end: ``"received"``, ``"failed"``, …."""
    failures: dict[str, int] = {}
    """Failed requests, by the class of the error."""
    leases: dict[str, int] = {}
    """Leases that are over, by reason: ``"released"``, ``"expired"``, ``"failed"``, or
    ``"unread"``, of a finished turn that no next turn has fetched."""
    events: dict[str, int] = {}
    """Other events, by `EventName`."""
    live_leases: int = 0
    """Like the following: at the moment of the snapshot."""
    peers: int = 0
    """Connected producers."""
    receiving: int = 0
    """Requests that are being received."""
    lease_checks: int = 0
    """Lease words that are being read."""
    pushes: int = 0
    """Pushes that are not answered."""
    consumers: int = 0
    """Connected ranks of consumers."""

    def __add__(self, other: StatsSnapshot) -> StatsSnapshot:
        names = self.__struct_fields__
        return StatsSnapshot(*(_add(getattr(self, n), getattr(other, n)) for n in names))


class ConnectorStats:
    """Counts what one worker does. Thread-safe; every method takes constant time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = StatsSnapshot()  # the sum of what `take` has returned
        self._recent = StatsSnapshot()
        self._gauges: dict[str, int] = {}

    def count(self, event: EventName) -> None:
        """Count one event."""
        with self._lock:
            _increment(self._recent.events, event)

    def transfer_done(self, result: TransferResult) -> None:
        """Count a successful transfer."""
        with self._lock:
            recent = self._recent
            recent.transfers += 1
            recent.bytes += result.bytes
            recent.descriptors += result.descriptors
            recent.plan.add(result.plan_s)
            recent.post.add(result.post_s)
            recent.transfer.add(result.transfer_s)

    def digested(self, seconds: float) -> None:
        """Count the digests of one request."""
        with self._lock:
            self._recent.digest.add(seconds)

    def transfer_failed(self, transfer: Transfer) -> None:
        """Count any other transfer, by its state."""
        with self._lock:
            _increment(self._recent.transfer_failures, transfer.state.name.lower())

    def ended(self, state: str, error: Exception | None) -> None:
        """Count the end of a request by the value of its `EndState`, and a failure by its class."""
        with self._lock:
            _increment(self._recent.ends, state)
            if state == "failed":
                _increment(self._recent.failures, type(error).__name__)

    def lease_ended(self, why: str) -> None:
        """Count the end of a lease: a reason that `StatsSnapshot.leases` has, or why it failed."""
        with self._lock:
            is_usual = why in ("released", "expired", "unread")
            _increment(self._recent.leases, why if is_usual else "failed")

    def set_gauges(self, **gauges: int) -> None:
        """Set the fields of later snapshots that are not counted but observed."""
        self._gauges = gauges

    def snapshot(self) -> StatsSnapshot:
        """Return all counts since the start."""
        with self._lock:
            return self._with_gauges(self._taken + self._recent)

    def take(self) -> StatsSnapshot:
        """Return the counts since the last `take`; `snapshot` is not affected."""
        with self._lock:
            recent, self._recent = self._recent, StatsSnapshot()
            self._taken = self._taken + recent
            return self._with_gauges(recent)

    def _with_gauges(self, snapshot: StatsSnapshot) -> StatsSnapshot:
        for name, value in self._gauges.items():
            setattr(snapshot, name, value)
        return snapshot


_COUNTERS: dict[str, tuple[str, Callable[[StatsSnapshot], float]]] = {
    "transfers": ("Successful transfers", lambda s: s.transfers),
    "transfers_failed": ("Other transfers", lambda s: sum(s.transfer_failures.values())),
    "bytes_transferred": ("Bytes that they moved", lambda s: s.bytes),
    "descriptors": ("Descriptors that they were posted as", lambda s: s.descriptors),
    "plan_time_seconds": ("Time to turn block tables into descriptors", lambda s: s.plan.sum_s),
    "post_time_seconds": ("Time inside the library's post calls", lambda s: s.post.sum_s),
    "xfer_time_seconds": ("Time from call to end of transfers", lambda s: s.transfer.sum_s),
    "requests_received": ("Requests received", lambda s: s.ends.get("received", 0)),
    "requests_failed": ("Requests that failed", lambda s: s.ends.get("failed", 0)),
    "requests_expired": ("Requests that came too late", lambda s: s.ends.get("expired", 0)),
    "requests_corrupt": ("Requests with wrong bytes", lambda s: s.ends.get("corrupt", 0)),
    "digest_time_seconds": ("Time to compute digests", lambda s: s.digest.sum_s),
    "leases_expired": ("Leases that expired", lambda s: s.leases.get("expired", 0)),
    "leases_unread": ("Finished turns not fetched again", lambda s: s.leases.get("unread", 0)),
    "peers_lost": ("Producers that died", lambda s: s.events.get("peers_lost", 0)),
}
_GAUGES: dict[str, tuple[str, Callable[[StatsSnapshot], float]]] = {
    "live_leases": ("Requests that are held for consumers", lambda s: s.live_leases),
    "peers": ("Producers that are connected", lambda s: s.peers),
}


class PrometheusMetrics:
    """Counters and gauges that export what `ConnectorStats.take` returns.

    Parameters
    ----------
    counter, gauge : callable
        ``prometheus_client.Counter`` and ``Gauge``, or what a serving engine has in their place.
    prefix : str
        Beginning of every metric's name.
    labelnames : sequence of str
        Labels of every metric.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        *,
        prefix: str = "pynixlkv_",
        labelnames: Sequence[str] = (),
    ) -> None:
        self._counters, self._gauges = (
            {
                name: make(name=prefix + name, documentation=text, labelnames=labelnames)
                for name, (text, _) in metrics.items()
            }
            for make, metrics in ((counter, _COUNTERS), (gauge, _GAUGES))
        )

    def observe(self, taken: StatsSnapshot, labelvalues: Sequence[object] = ()) -> None:
        """Add what `ConnectorStats.take` has returned; `labelvalues` are those of `labelnames`."""
        for name, metric in self._counters.items():
            _with_labels(metric, labelvalues).inc(_COUNTERS[name][1](taken))
        for name, metric in self._gauges.items():
            _with_labels(metric, labelvalues).set(_GAUGES[name][1](taken))


def _with_labels(metric: Any, values: Sequence[object]) -> Any:  # noqa: ANN401
    return metric.labels(*values) if values else metric


def _increment(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _add(mine: Any, theirs: Any) -> Any:  # noqa: ANN401
    if not isinstance(mine, dict):
        return mine + theirs
    return {key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}}
