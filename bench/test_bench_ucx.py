"""Read scattered blocks of another process, as far as that is from copying them in this one.

The same movers as in `pynixlkv bench`, one at a time.
"""

import os

import pytest

from pynixlkv.cli.bench.cases import Case, Series
from pynixlkv.cli.bench.messages import Done, Finish, Offer, Offered, SideSpec, decode
from pynixlkv.cli.bench.movers import InitiatorHalf, has_target
from pynixlkv.cli.group import ProcessGroup

TOTAL_BYTES = 64 << 20
TIMEOUT_S = 100.0


@pytest.fixture
def initiator(series, block):
    """Return the reading half, connected to an owner in a process of its own."""
    case = Case("cma", "get", "scattered", block, TOTAL_BYTES // block, 64, (series,))
    if not has_target(series):
        yield InitiatorHalf(series, case, b"")
        return
    specs = [SideSpec("target", "all", TIMEOUT_S)]
    with ProcessGroup(
        "pynixlkv.cli.bench.side", decode, specs, TIMEOUT_S, lambda *_: None
    ) as sides:
        offers = sides.ask("offer", {"target": Offer(case)}, Offered)["target"].offers
        half = InitiatorHalf(series, case, offers[series.value])
        yield half
        half.close()
        sides.ask("finish", {"target": Finish()}, Done)
        sides.join()


@pytest.mark.parametrize("block", [4 << 10, 16 << 10, 1 << 20], ids=["4 KiB", "16 KiB", "1 MiB"])
@pytest.mark.parametrize(
    "series",
    [Series.memcpy, Series.ucx_allocated, Series.ucx, Series.nixl],
    ids=lambda series: series.name,
)
def test_scattered_blocks(benchmark, initiator, series, block):
    benchmark.pedantic(lambda: initiator.run(compare=False), rounds=15, warmup_rounds=2)
    _, wrong_bytes = initiator.run(compare=True)
    assert wrong_bytes == 0
    benchmark.group = f"scattered blocks of {block >> 10} KiB"
    benchmark.extra_info |= {
        "bytes": TOTAL_BYTES, "descriptors": TOTAL_BYTES // block, "block_bytes": block,
        "series": series.value, "transport": os.environ.get("UCX_TLS", "all"),
    }  # fmt: skip
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = TOTAL_BYTES / benchmark.stats.stats.median / 1e9
