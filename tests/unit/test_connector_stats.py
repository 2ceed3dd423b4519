"""Counts, their sums, and what Prometheus sees of them."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import threading
import types

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pynixlkv.agent import TransferResult
from pynixlkv.connector.stats import (
    BUCKET_BOUNDS_BYTES,
    BUCKET_BOUNDS_S,
    ConnectorStats,
    PrometheusMetrics,
    StatsSnapshot,
    TimeHistogram,
)
from pynixlkv.errors import (
    ContentMismatch,
    HandshakeTimeout,
    KVCorruptError,
    LeaseExpired,
    NixlError,
    PeerLostError,
    PlanError,
    TransferError,
    TransferTimeout,
)
from pynixlkv.types import TransferState


def test_buckets_reach_from_the_smallest_to_the_largest_hand_off():
    assert (BUCKET_BOUNDS_S[0], BUCKET_BOUNDS_S[-1]) == (1e-6, pytest.approx(134.2, abs=0.1))
    assert (BUCKET_BOUNDS_BYTES[0], BUCKET_BOUNDS_BYTES[-1]) == (2**10, 2**37)


def result(num_bytes=4096, descriptors=2, plan_s=1e-5, post_s=2e-5, transfer_s=1e-3):
    return TransferResult(
        bytes=num_bytes, descriptors=descriptors, batches=1, prepared=False, queued_s=0.0,
        plan_s=plan_s, make_s=0.0, post_s=post_s, transfer_s=transfer_s,
    )  # fmt: skip


def ended_transfer(state):
    return types.SimpleNamespace(state=state)


def busy(transfers=3):
    stats = ConnectorStats()
    for i in range(transfers):
        stats.transfer_done(result(transfer_s=(i + 1) * 1e-3))
    stats.transfer_failed(ended_transfer(TransferState.TIMED_OUT))
    for _ in range(2):
        stats.ended("failed", PeerLostError("it is gone"))
    stats.ended("failed", HandshakeTimeout("nobody there"))
    stats.ended("expired", TransferError("too late"))
    stats.ended("received", None)
    stats.lease_ended("released")
    stats.lease_ended("expired")
    stats.lease_ended("expired")
    stats.lease_ended("the copy to the host failed")
    stats.count("late_notifications")
    stats.count("late_notifications")
    stats.count("duplicate_notifications")
    stats.set_gauges(live_leases=5, peers=2)
    return stats


def test_everything_is_counted():
    seen = busy().snapshot()
    assert (seen.transfers, seen.bytes, seen.descriptors) == (3, 3 * 4096, 6)
    assert (seen.plan.count, seen.post.count, seen.transfer.count) == (3, 3, 3)
    assert seen.transfer.total == pytest.approx(6e-3)
    assert seen.transfer_failures == {"timed_out": 1}
    assert seen.ends == {"failed": 3, "expired": 1, "received": 1}
    assert seen.failures == {"PeerLostError": 2, "HandshakeTimeout": 1}
    assert seen.leases == {"released": 1, "expired": 2, "failed": 1}
    assert seen.events == {"late_notifications": 2, "duplicate_notifications": 1}
    assert (seen.live_leases, seen.peers) == (5, 2)


def test_take_gives_each_count_once_and_leaves_the_totals():
    stats = busy()
    before = stats.snapshot()
    first = stats.take()
    assert first == before
    empty = stats.take()
    assert (empty.transfers, empty.ends, empty.transfer.count) == (0, {}, 0)
    assert (empty.live_leases, empty.peers) == (5, 2)  # they are what they are
    stats.transfer_done(result())
    assert stats.take().transfers == 1
    assert stats.snapshot().transfers == 4
    assert first == before  # nothing of a snapshot changes later


def test_snapshots_add_up_and_survive_the_wire():
    a, b = busy(3).take(), busy(1).take()
    b.failures["WireError"] = 1
    total = a + b
    assert (total.transfers, total.live_leases, total.peers) == (4, 10, 4)
    assert total.failures == {"PeerLostError": 4, "HandshakeTimeout": 2, "WireError": 1}
    assert total.transfer.count == 4
    assert total.transfer.total == pytest.approx(7e-3)
    assert a + StatsSnapshot() == a
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(total), type=StatsSnapshot) == total


def test_a_bound_is_in_its_own_bucket():
    for bucket, bound in enumerate(BUCKET_BOUNDS_S):
        histogram = TimeHistogram()
        histogram.add(bound)
        assert histogram.counts.index(1) == bucket


@given(st.floats(0, 1e4, allow_nan=False))
def test_a_value_is_in_the_first_bucket_that_holds_it(seconds):
    histogram = TimeHistogram()
    histogram.add(seconds)
    expected = next((i for i, bound in enumerate(BUCKET_BOUNDS_S) if seconds <= bound), 28)
    found = histogram.counts.index(1)
    # Microseconds are rounded once: only at a bound itself may that matter.
    at_bound = any(math.isclose(seconds, bound, rel_tol=1e-12) for bound in BUCKET_BOUNDS_S)
    assert found == expected or at_bound
    assert histogram.count == 1


def test_nothing_is_lost_between_threads():
    stats = ConnectorStats()
    taken = []
    finished = threading.Event()

    def write():
        for _ in range(2000):
            stats.transfer_done(result(num_bytes=7))

    def read():
        while not finished.is_set():
            taken.append(stats.take())

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(3)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    finished.set()
    reader.join()
    taken.append(stats.take())
    total = sum(taken, StatsSnapshot())
    assert (total.transfers, total.bytes, total.post.count) == (6000, 42000, 6000)
    assert stats.snapshot().transfers == 6000


def exporter(registry, **options):
    types = (functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram))
    return PrometheusMetrics(*types, **options)


def test_prometheus():
    registry, stats = CollectorRegistry(), busy()
    metrics = exporter(registry, labelnames=["engine"])

    def value(name, engine="p-0", **labels):
        return registry.get_sample_value(f"pynixlkv_{name}", {"engine": engine, **labels})

    metrics.observe(stats.take(), ["p-0"])
    metrics.observe(ConnectorStats().take(), ["p-1"])
    assert value("transfers_total") == 3
    assert value("transfers_failed_total", end="timed_out") == 1
    assert value("bytes_transferred_total") == 3 * 4096
    assert value("xfer_time_seconds_total") == pytest.approx(6e-3)
    assert value("requests_failed_total") == 3
    assert value("failures_total", cause="peer") == 3
    assert value("failures_total", cause="link") == 1
    assert value("leases_expired_total") == 2
    assert value("live_leases") == 5
    assert value("transfers_total", "p-1") == 0
    stats.transfer_done(result())
    for seconds, size in ((0.003, 5000), (0.001, 0), (0.0035, 1 << 20)):
        stats.handed_over(seconds, size)
    metrics.observe(stats.take(), ["p-0"])
    assert value("transfers_total") == 4
    assert value("live_leases") == 5
    assert value("hand_off_seconds_sum") == pytest.approx(0.0075)
    assert value("hand_off_seconds_bucket", le="0.001024") == 1
    assert value("hand_off_seconds_bucket", le="0.004096") == 3
    assert (value("hand_off_bytes_count"), value("hand_off_bytes_sum")) == (2, (1 << 20) + 5000)
    assert value("hand_off_bytes_bucket", le="8192.0") == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KVCorruptError("wrong bytes"), "corrupt"),
        (LeaseExpired("too late"), "lease"),
        (TransferTimeout("too slow"), "link"),
        (NixlError("backend", library="nixl", status=1, call="post", detail=""), "link"),
        (HandshakeTimeout("nobody there"), "peer"),
        (ContentMismatch("another prompt"), "refused"),
        (PlanError("too few blocks"), "refused"),
    ],
)
def test_a_failure_has_a_cause(error, cause):
    stats = ConnectorStats()
    stats.ended("failed", error)
    assert stats.take().causes == {cause: 1}


def test_prometheus_without_labels():
    registry = CollectorRegistry()
    exporter(registry).observe(busy().take())
    assert registry.get_sample_value("pynixlkv_peers") == 2


def test_importing_needs_no_prometheus():
    probe = "import pynixlkv.connector.stats, sys; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=300)
