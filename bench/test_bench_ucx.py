"""Read scattered blocks of another process, as far as that is from copying them in this one.

The same transfers as in `pynixlkv bench`, one at a time.
"""

import os

import pytest

from pynixlkv.cli.bench.cases import Case, Series
from pynixlkv.cli.bench.transfers import BenchWorker
from pynixlkv.testing.process import ChildProcess

TOTAL_BYTES = 64 << 20


@pytest.fixture
def initiator(series, block):
    """Return the end that reads, connected to a target in a process of its own."""
    case = Case("cma", "get", "scattered", block, TOTAL_BYTES // block, 64, (series,))
    with ChildProcess("target") as target:
        target.call(BenchWorker, keep=True)
        worker = BenchWorker()
        worker.open(case, target.call("offer", case))
        yield worker
        worker.close()


@pytest.mark.parametrize("block", [4 << 10, 16 << 10, 1 << 20], ids=["4 KiB", "16 KiB", "1 MiB"])
@pytest.mark.parametrize(
    "series",
    [Series.memcpy, Series.ucx_allocated, Series.ucx, Series.nixl],
    ids=lambda series: series.name,
)
def test_scattered_blocks(benchmark, initiator, series, block):
    benchmark.pedantic(lambda: initiator.run(series, compare=False), rounds=15, warmup_rounds=2)
    assert initiator.run(series, compare=True)[1:] == (0, "")
    benchmark.group = f"scattered blocks of {block >> 10} KiB"
    benchmark.extra_info |= {
        "bytes": TOTAL_BYTES, "descriptors": TOTAL_BYTES // block, "block_bytes": block,
        "series": series.value, "transport": os.environ.get("UCX_TLS", "all"),
    }  # fmt: skip
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = TOTAL_BYTES / benchmark.stats.stats.median / 1e9
