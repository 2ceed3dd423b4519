"""What a connector counts: transfers, bytes, times, failures, leases, peers, odd notifications.

Each worker has a `ConnectorStats` and tells it what happens. A `StatsSnapshot` of it is plain data:
it can be sent to another process, added to those of other workers, described to people, or exported
to Prometheus by a `StatsCollector`.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

    from pynixlkv.agent import Transfer, TransferResult
else:
    Collector = object  # Prometheus asks for nothing but the method

__all__ = [
    "BUCKET_BOUNDS_S",
    "ConnectorStats",
    "Event",
    "StatsCollector",
    "StatsSnapshot",
    "TimeHistogram",
]

BUCKET_BOUNDS_S: tuple[float, ...] = tuple(2.0**i * 1e-6 for i in range(28))
"""Upper ends of the buckets of every histogram: powers of two from 1 µs to 134 s."""

Event: TypeAlias = Literal[
    "attach_failures",
    "duplicate_notifications",
    "early_notifications",
    "errors",
    "foreign_notifications",
    "late_notifications",
    "pauses",
    "peers_lost",
    "releases_lost",
    "unanswered_notifications",
]
"""What is counted by name. Notifications: of something seen before, of a request that is not known
yet, of nothing that a connector sends, of a request that is over, and those that could not be
answered. Pauses are those of this process, as when its host is too busy. Errors are defects: what was not expected to fail did."""

_NUM_BUCKETS = len(BUCKET_BOUNDS_S) + 1


class TimeHistogram(msgspec.Struct):
    """How often something took how long.

    Parameters
    ----------
    counts : list of int
        By bucket: the bucket's values are at most its `BUCKET_BOUNDS_S`, and above the one before;
        one more bucket at the end for all above.
    sum_s : float
        Sum of the values in seconds.
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * _NUM_BUCKETS)
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a value in seconds; below 0 counts as 0."""
        seconds = max(seconds, 0.0)
        # frexp is the exponent of the power of two that is above; exact powers belong below.
        mantissa, exponent = math.frexp(seconds * 1e6)
        bucket = exponent - 1 if mantissa == 0.5 else exponent
        self.counts[min(max(bucket, 0), _NUM_BUCKETS - 1)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return an upper bound of a quantile.

        Parameters
        ----------
        share : float
            Share of the values that lie at or below it, 0 to 1.

        Returns
        -------
        float
            Seconds, at most twice the true quantile above 1 µs; ``inf`` above the last bound, 0.0
            without values.
        """
        if not self.count:
            return 0.0
        needed, seen = share * self.count, 0
        for bound, count in zip(BUCKET_BOUNDS_S, self.counts, strict=False):
            seen += count
            if seen >= needed and seen:
                return bound
        return math.inf

    def __add__(self, other: TimeHistogram) -> TimeHistogram:
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return TimeHistogram(counts, self.sum_s + other.sum_s)


class StatsSnapshot(msgspec.Struct):
    """Counts of one or several connectors; ``a + b`` adds those of different workers.

    Parameters
    ----------
    transfers, bytes, descriptors : int
        Transfers that ended well, and what they moved.
    plan, post, transfer : TimeHistogram
        Time that they spent on turning block tables into rows, in the library's post calls, and
        from the call to the end.
    transfer_failures : dict of str to int
        Transfers that did not end well, by their end: ``"timed_out"``, ``"peer_lost"``, ….
    ends : dict of str to int
        Requests that were to be received, by their end: ``"received"``, ``"failed"``, ….
    failures : dict of str to int
        Those that failed, by the class of the error.
    leases : dict of str to int
        Leases that are over, by reason: ``"released"``, ``"expired"`` or ``"failed"``.
    events : dict of str to int
        What else happened, by `Event`.
    live_leases, peers : int
        Leases and peers at the moment of the snapshot.
    """

    transfers: int = 0
    bytes: int = 0
    descriptors: int = 0
    plan: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    post: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    transfer: TimeHistogram = msgspec.field(default_factory=TimeHistogram)
    transfer_failures: dict[str, int] = {}
    ends: dict[str, int] = {}
    failures: dict[str, int] = {}
    leases: dict[str, int] = {}
    events: dict[str, int] = {}
    live_leases: int = 0
    peers: int = 0

    def __add__(self, other: StatsSnapshot) -> StatsSnapshot:
        return StatsSnapshot(
            transfers=self.transfers + other.transfers,
            bytes=self.bytes + other.bytes,
            descriptors=self.descriptors + other.descriptors,
            plan=self.plan + other.plan,
            post=self.post + other.post,
            transfer=self.transfer + other.transfer,
            transfer_failures=_add(self.transfer_failures, other.transfer_failures),
            ends=_add(self.ends, other.ends),
            failures=_add(self.failures, other.failures),
            leases=_add(self.leases, other.leases),
            events=_add(self.events, other.events),
            live_leases=self.live_leases + other.live_leases,
            peers=self.peers + other.peers,
        )

    def describe(self) -> str:
        """Return some lines for people; quantiles are the upper ends of their buckets."""
        mib = self.bytes / 2**20
        lines = [
            f"{self.transfers:,} transfers, {mib:,.1f} MiB in {self.descriptors:,} descriptors"
            + (f" of {self.bytes / self.descriptors / 1024:,.1f} KiB" if self.descriptors else "")
        ]
        for what, times in (("plan", self.plan), ("post", self.post), ("transfer", self.transfer)):
            if times.count:
                half, most = (f"{times.quantile(q) * 1e3:,.3g} ms" for q in (0.5, 0.99))
                mean = times.sum_s / times.count * 1e3
                lines.append(f"{what}: mean {mean:,.3g} ms, half within {half}, 99 % within {most}")
        lines.append(f"transfers that failed: {_listed(self.transfer_failures)}")
        lines.append(f"requests: {_listed(self.ends)}; causes of failure: {_listed(self.failures)}")
        lines.append(f"leases: {self.live_leases:,} live; over: {_listed(self.leases)}")
        lines.append(f"peers: {self.peers:,}; events: {_listed(self.events)}")
        return "\n".join(lines)


class ConnectorStats:
    """Counts what one worker does. Thread-safe; no method takes longer for more blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = StatsSnapshot()  # what `take` has given away
        self._recent = StatsSnapshot()
        self._live_leases = 0
        self._peers = 0

    def count(self, event: Event) -> None:
        """Count one event."""
        with self._lock:
            _increment(self._recent.events, event)

    def transfer_done(self, result: TransferResult) -> None:
        """Count a transfer that ended well.

        Parameters
        ----------
        result : TransferResult
            What `pynixlkv.agent.Transfer.result` is.
        """
        with self._lock:
            recent = self._recent
            recent.transfers += 1
            recent.bytes += result.bytes
            recent.descriptors += result.descriptors
            recent.plan.add(result.plan_s)
            recent.post.add(result.post_s)
            recent.transfer.add(result.transfer_s)

    def transfer_failed(self, transfer: Transfer) -> None:
        """Count a transfer that did not, by the state that it ended in."""
        with self._lock:
            _increment(self._recent.transfer_failures, transfer.state.name.lower())

    def ended(self, state: str, error: Exception | None) -> None:
        """Count the end of a request that was to be received.

        Parameters
        ----------
        state : str
            Value of its `pynixlkv.connector.metadata.EndState`.
        error : Exception or None
            Why, unless it was received; where it failed, its class is counted as the cause.
        """
        with self._lock:
            _increment(self._recent.ends, state)
            if state == "failed":
                _increment(self._recent.failures, type(error).__name__)

    def lease_ended(self, why: str) -> None:
        """Count the end of a lease: ``"released"``, ``"expired"``, or a message, a failure."""
        with self._lock:
            _increment(self._recent.leases, why if why in ("released", "expired") else "failed")

    def set_gauges(self, *, live_leases: int, peers: int) -> None:
        """Set what is there now.

        Parameters
        ----------
        live_leases, peers : int
            Leases that are kept, and engines that are connected.
        """
        self._live_leases, self._peers = live_leases, peers

    def snapshot(self) -> StatsSnapshot:
        """Return all that was counted since the start; never falls."""
        with self._lock:
            return self._with_gauges(self._taken + self._recent)

    def take(self) -> StatsSnapshot:
        """Return what was counted since the last `take`; does not change `snapshot`."""
        with self._lock:
            recent, self._recent = self._recent, StatsSnapshot()
            self._taken = self._taken + recent
            return self._with_gauges(recent)

    def describe(self) -> str:
        """Return `StatsSnapshot.describe` of all that was counted."""
        return self.snapshot().describe()

    def _with_gauges(self, snapshot: StatsSnapshot) -> StatsSnapshot:
        snapshot.live_leases, snapshot.peers = self._live_leases, self._peers
        return snapshot


_COUNTERS = {
    "transfers": "Transfers that ended well.",
    "bytes": "Bytes that they moved.",
    "descriptors": "Descriptors that they were posted as.",
}
_GAUGES = {"live_leases": "Leases that are live.", "peers": "Engines that are connected."}
_BY_LABEL = {
    "transfer_failures": ("state", "Transfers that did not end well."),
    "ends": ("state", "Requests that were to be received, by their end."),
    "failures": ("cause", "Those that failed, by cause."),
    "leases": ("reason", "Leases that are over."),
    "events": ("event", "Odd notifications, lost peers, errors."),
}
_TIMES = {
    "plan": "Seconds spent on turning block tables into rows.",
    "post": "Seconds spent in the library's post calls.",
    "transfer": "Seconds from the call to the end of a transfer.",
}


class StatsCollector(Collector):
    """Exports snapshots to Prometheus; ``prometheus_client.REGISTRY.register`` takes it.

    Parameters
    ----------
    sources : mapping of str to callable
        By engine id, which becomes the label ``engine``: what returns its snapshot, such as
        `ConnectorStats.snapshot`. One collector serves all engines of a process.
    """

    def __init__(self, sources: Mapping[str, Callable[[], StatsSnapshot]]) -> None:
        self._sources = dict(sources)

    def collect(self) -> Iterator[Metric]:
        """Make the metrics; called by Prometheus.

        Yields
        ------
        prometheus_client.Metric
            ``pynixlkv_transfers_total`` and so on.
        """
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        found = {engine: source() for engine, source in self._sources.items()}
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"pynixlkv_{name}", text, labels=["engine"])
            for engine, stats in found.items():
                counter.add_metric([engine], getattr(stats, name))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"pynixlkv_{name}", text, labels=["engine"])
            for engine, stats in found.items():
                gauge.add_metric([engine], getattr(stats, name))
            yield gauge
        for name, (label, text) in _BY_LABEL.items():
            counter = CounterMetricFamily(f"pynixlkv_{name}", text, labels=["engine", label])
            for engine, stats in found.items():
                for value, count in getattr(stats, name).items():
                    counter.add_metric([engine, value], count)
            yield counter
        for name, text in _TIMES.items():
            times = HistogramMetricFamily(f"pynixlkv_{name}_seconds", text, labels=["engine"])
            for engine, stats in found.items():
                histogram: TimeHistogram = getattr(stats, name)
                times.add_metric([engine], list(_cumulate(histogram)), histogram.sum_s)
            yield times


def _cumulate(histogram: TimeHistogram) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip((*BUCKET_BOUNDS_S, math.inf), histogram.counts, strict=True):
        total += count
        yield ("+Inf" if bound == math.inf else f"{bound:.6f}"), total


def _increment(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _add(mine: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    return {key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}}


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())) or "none"
