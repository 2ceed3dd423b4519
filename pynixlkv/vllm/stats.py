"""What the connector counts, in the types of vLLM's log and Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pynixlkv.connector.stats import PrometheusMetrics, StatsSnapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


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
        counted = (counts.transfers, counts.transfer_failures, counts.ends, counts.leases)
        return not (any(counted) or counts.events or counts.digest.count)

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs once in a while."""
        counts = self.snapshot
        times = counts.transfer
        return {
            "transfers": counts.transfers,
            "MB": round(counts.bytes / 1e6, 3),
            "descriptors": counts.descriptors,
            "mean transfer ms": round(times.total / times.count * 1e3, 3) if times.count else 0,
            **{f"transfers {end}": count for end, count in counts.transfer_failures.items()},
            **{f"requests {end}": count for end, count in counts.ends.items()},
            **{f"failures ({cause})": count for cause, count in counts.causes.items()},
            **{f"leases {why}": count for why, count in counts.leases.items()},
            **{event.replace("_", " "): count for event, count in counts.events.items()},
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
        self._metrics = PrometheusMetrics(
            metric_types[Counter],
            metric_types[Gauge],
            metric_types[Histogram],
            prefix="vllm:pynixlkv_",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts since the last call."""
        counts = msgspec.convert(transfer_stats_data, StatsSnapshot)
        self._metrics.observe(counts, self.per_engine_labelvalues[engine_idx])
