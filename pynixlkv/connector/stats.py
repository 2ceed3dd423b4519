"""What a connector counts: transfers, bytes, times, failures, leases, peers, odd notifications.

Each worker has a `ConnectorStats`. A `StatsSnapshot` of it is plain data: it can be sent to another
process, added to those of other workers, or exported by `PrometheusMetrics`.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

from pynixlkv.errors import (
    HandshakeTimeout,
    KVCorruptError,
    LeaseExpired,
    NativeError,
    PeerLostError,
    TransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from pynixlkv.agent import Transfer, TransferResult

__all__ = [
    "BUCKET_BOUNDS_BYTES",
    "BUCKET_BOUNDS_S",
    "ConnectorStats",
    "EventName",
    "PrometheusMetrics",
    "SizeHistogram",
    "StatsSnapshot",
    "TimeHistogram",
]

BUCKET_BOUNDS_S: tuple[float, ...] = tuple(2.0**i * 1e-6 for i in range(28))
"""Upper bounds of the buckets of a histogram of times: powers of two from 1 µs to 134 s."""

BUCKET_BOUNDS_BYTES: tuple[float, ...] = tuple(2.0 ** (i + 10) for i in range(28))
"""The same of a histogram of sizes: powers of two from 1 KiB to 128 GiB."""

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

FailureCause: TypeAlias = Literal["corrupt", "lease", "link", "peer", "refused"]
"""Wrong bytes; a lease that ended; a transfer that failed or took too long; a producer that died;
engines or a hand-off that do not fit."""

_CAUSES: tuple[tuple[tuple[type[Exception], ...], FailureCause], ...] = (
    ((KVCorruptError,), "corrupt"),
    ((LeaseExpired,), "lease"),
    ((PeerLostError, HandshakeTimeout), "peer"),
    ((TransferError, NativeError), "link"),
)
"""The cause of an error is that of its first class here, or else ``"refused"``."""

_NUM_BUCKETS = len(BUCKET_BOUNDS_S) + 1


class TimeHistogram(msgspec.Struct):
    """A histogram of durations in seconds."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * _NUM_BUCKETS)
    """Values by bucket. A value is at most the bound of its bucket in `BUCKET_BOUNDS_S`; one more
    bucket takes the values above the last bound."""
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * _NUM_BUCKETS)
    """Sum of the values of each bucket."""

    BOUNDS: ClassVar[tuple[float, ...]] = BUCKET_BOUNDS_S

    def add(self, value: float) -> None:
        """Count a value; a negative one counts as 0."""
        value = max(value, 0.0)
        # frexp gives the exponent of the next power of two; exact powers belong to the one below.
        mantissa, exponent = math.frexp(value / self.BOUNDS[0])
        bucket = min(max(exponent - (mantissa == 0.5), 0), _NUM_BUCKETS - 1)
        self.counts[bucket] += 1
        self.sums[bucket] += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def total(self) -> float:
        """Sum of all values."""
        return sum(self.sums)

    def __add__(self, other: Self) -> Self:
        pairs = ((self.counts, other.counts), (self.sums, other.sums))
        return type(self)(*([a + b for a, b in zip(*pair, strict=True)] for pair in pairs))


class SizeHistogram(TimeHistogram):
    """A histogram of sizes in bytes, with the bounds of `BUCKET_BOUNDS_BYTES`."""

    BOUNDS: ClassVar[tuple[float, ...]] = BUCKET_BOUNDS_BYTES


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
    hand_off: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    """Time from the command to receive a request until it was received."""
    hand_off_bytes: SizeHistogram = msgspec.field(default_factory=SizeHistogram)
    """Bytes that were read for a request; a push is not among them."""
    digest: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    """Time to compute the digests of a request, as its consumer or its producer."""
    transfer_failures: dict[str, int] = {}
    """Other transfers, by their end: ``"timed_out"``, ``"peer_lost"``, …."""
    ends: dict[str, int] = {}
    """Requests that were to be received, by their end: ``"received"``, ``"failed"``, …."""
    failures: dict[str, int] = {}
    """Failed requests, by the class of the error."""
    causes: dict[str, int] = {}
    """Requests that were not received, by `FailureCause`."""
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
            if state not in ("received", "aborted"):
                cause = next(
                    (name for types, name in _CAUSES if isinstance(error, types)), "refused"
                )
                _increment(self._recent.causes, cause)

    def handed_over(self, seconds: float, num_bytes: int) -> None:
        """Count the time and the bytes of a request that was received."""
        with self._lock:
            self._recent.hand_off.add(seconds)
            if num_bytes:
                self._recent.hand_off_bytes.add(num_bytes)

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


class Metric(NamedTuple):
    """How a field of a `StatsSnapshot` is exported."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    value: Callable[[StatsSnapshot], Any]
    """A number; a histogram; or a number for each value of `label`."""
    label: str | None = None


METRICS: tuple[Metric, ...] = (
    Metric("transfers", "counter", "Successful transfers", lambda s: s.transfers),
    Metric(
        "transfers_failed",
        "counter",
        "Other transfers, by their end",
        lambda s: s.transfer_failures,
        "end",
    ),
    Metric("bytes_transferred", "counter", "Bytes of successful transfers", lambda s: s.bytes),
    Metric(
        "descriptors",
        "counter",
        "Descriptors of successful transfers",
        lambda s: s.descriptors,
    ),
    Metric(
        "plan_time_seconds",
        "counter",
        "Time to turn block tables into descriptors",
        lambda s: s.plan.total,
    ),
    Metric(
        "post_time_seconds",
        "counter",
        "Time inside the library's post calls",
        lambda s: s.post.total,
    ),
    Metric(
        "xfer_time_seconds",
        "counter",
        "Time from call to end of transfers",
        lambda s: s.transfer.total,
    ),
    Metric(
        "digest_time_seconds",
        "counter",
        "Time to compute digests",
        lambda s: s.digest.total,
    ),
    Metric(
        "hand_off_seconds",
        "histogram",
        "Time from the command to fetch a request until its blocks have arrived and are checked",
        lambda s: s.hand_off,
    ),
    Metric(
        "hand_off_bytes",
        "histogram",
        "Bytes that were read for a request",
        lambda s: s.hand_off_bytes,
    ),
    Metric(
        "requests_received",
        "counter",
        "Requests received",
        lambda s: s.ends.get("received", 0),
    ),
    Metric(
        "requests_failed",
        "counter",
        "Requests that failed",
        lambda s: s.ends.get("failed", 0),
    ),
    Metric(
        "requests_expired",
        "counter",
        "Requests whose lease ended before their bytes had moved",
        lambda s: s.ends.get("expired", 0),
    ),
    Metric(
        "requests_corrupt",
        "counter",
        "Requests with wrong bytes",
        lambda s: s.ends.get("corrupt", 0),
    ),
    Metric(
        "failures",
        "counter",
        "Requests that were not received, by cause: corrupt, lease, link, peer or refused",
        lambda s: s.causes,
        "cause",
    ),
    Metric(
        "leases_expired",
        "counter",
        "Leases that expired",
        lambda s: s.leases.get("expired", 0),
    ),
    Metric(
        "leases_unread",
        "counter",
        "Finished turns that no next turn has fetched",
        lambda s: s.leases.get("unread", 0),
    ),
    Metric(
        "peers_lost",
        "counter",
        "Producers that died while requests needed them",
        lambda s: s.events.get("peers_lost", 0),
    ),
    Metric(
        "live_leases",
        "gauge",
        "Requests that are held for consumers",
        lambda s: s.live_leases,
    ),
    Metric("peers", "gauge", "Producers that are connected", lambda s: s.peers),
)
"""What `PrometheusMetrics` exports. The counts of an engine's ranks are added: a request counts
twice if two ranks fetch a part of it each."""


class PrometheusMetrics:
    """Counters, gauges and histograms that export what `ConnectorStats.take` returns.

    Parameters
    ----------
    counter, gauge, histogram : callable
        ``prometheus_client.Counter``, ``Gauge`` and ``Histogram``, or what a serving engine has in
        their place.
    prefix : str
        Beginning of every metric's name.
    labelnames : sequence of str
        Labels of every metric.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        histogram: Callable[..., Any],
        *,
        prefix: str = "pynixlkv_",
        labelnames: Sequence[str] = (),
    ) -> None:
        make = {"counter": counter, "gauge": gauge, "histogram": histogram}
        none = StatsSnapshot()
        self._metrics = []
        for metric in METRICS:
            options: dict[str, Any] = {}
            if metric.kind == "histogram":
                options["buckets"] = metric.value(none).BOUNDS
            made = make[metric.kind](
                name=prefix + metric.name,
                documentation=metric.meaning,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
                **options,
            )
            self._metrics.append((metric, made))

    def observe(self, taken: StatsSnapshot, labelvalues: Sequence[object] = ()) -> None:
        """Add what `ConnectorStats.take` has returned; `labelvalues` are those of `labelnames`."""
        for metric, made in self._metrics:
            value = metric.value(taken)
            if metric.label is not None:
                for label, number in value.items():
                    made.labels(*labelvalues, label).inc(number)
                continue
            exported = made.labels(*labelvalues) if labelvalues else made
            if metric.kind == "gauge":
                exported.set(value)
            elif metric.kind == "counter":
                exported.inc(value)
            else:
                # The mean of a bucket's values is in the bucket, and keeps the sum.
                for count, total in zip(value.counts, value.sums, strict=True):
                    for _ in range(count):
                        exported.observe(total / count)


def _increment(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _add(mine: Any, theirs: Any) -> Any:  # noqa: ANN401
    if not isinstance(mine, dict):
        return mine + theirs
    return {key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}}
