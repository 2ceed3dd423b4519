"""What the connector counts, in the types of vLLM's log and Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pynixlkv.connector.stats import StatsSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

__all__ = ["PyNixlKVPromMetrics", "PyNixlKVStats"]


class PyNixlKVStats(KVConnectorStats):  # type: ignore[misc]
    """A `StatsSnapshot` on its way from the workers to vLLM's log."""

    @classmethod
    def of(cls, snapshot: StatsSnapshot) -> PyNixlKVStats:
        """Return a snapshot in vLLM's type."""
        return cls(data=msgspec.to_builtins(snapshot))

    @property
    def snapshot(self) -> StatsSnapshot:
        """The counts."""
        return msgspec.convert(self.data, StatsSnapshot)

    def reset(self) -> None:
        """Forget all counts."""
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> PyNixlKVStats:
        """Return the sum with the counts of another worker, or of a later time."""
        return PyNixlKVStats.of(self.snapshot + msgspec.convert(other.data, StatsSnapshot))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        counts = self.snapshot
        return not (counts.transfers or counts.ends or counts.leases or counts.events)

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs once in a while."""
        counts = self.snapshot
        times = counts.transfer
        return {
            "transfers": counts.transfers,
            "MB": round(counts.bytes / 1e6, 3),
            "descriptors": counts.descriptors,
            "mean transfer ms": round(times.sum_s / times.count * 1e3, 3) if times.count else 0,
            **{f"requests {end}": count for end, count in counts.ends.items()},
            **{f"leases {why}": count for why, count in counts.leases.items()},
            **{event.replace("_", " "): count for event, count in counts.events.items()},
        }


_COUNTERS: dict[str, tuple[str, Callable[[StatsSnapshot], float]]] = {
    "transfers": ("Transfers that ended well", lambda s: s.transfers),
    "bytes_transferred": ("Bytes that they moved", lambda s: s.bytes),
    "descriptors": ("Descriptors that they were posted as", lambda s: s.descriptors),
    "post_time_seconds": ("Time inside the library's post calls", lambda s: s.post.sum_s),
    "xfer_time_seconds": ("Time from call to end of transfers", lambda s: s.transfer.sum_s),
    "requests_received": ("Requests received", lambda s: s.ends.get("received", 0)),
    "requests_failed": ("Requests that failed", lambda s: s.ends.get("failed", 0)),
    "requests_expired": ("Requests that came too late", lambda s: s.ends.get("expired", 0)),
    "leases_expired": ("Leases that ran out", lambda s: s.leases.get("expired", 0)),
}
_GAUGES: dict[str, tuple[str, Callable[[StatsSnapshot], float]]] = {
    "live_leases": ("Requests that are kept for consumers", lambda s: s.live_leases),
    "peers": ("Producer engines that are connected", lambda s: s.peers),
}


class PyNixlKVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters and gauges named ``vllm:pynixlkv_…``, one of each for each engine of a process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[kind](
                name=f"vllm:pynixlkv_{name}", documentation=text, labelnames=labelnames
            )
            for kind, metrics in ((Counter, _COUNTERS), (Gauge, _GAUGES))
            for name, (text, _) in metrics.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last time."""
        counts = msgspec.convert(transfer_stats_data, StatsSnapshot)
        labels = self.per_engine_labelvalues[engine_idx]
        for name, (_, value) in _COUNTERS.items():
            self._metrics[name].labels(*labels).inc(value(counts))
        for name, (_, value) in _GAUGES.items():
            self._metrics[name].labels(*labels).set(value(counts))
