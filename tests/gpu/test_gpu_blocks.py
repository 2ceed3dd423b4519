"""GPU memory between two processes, every byte compared; `make gpu` runs these."""

import pytest

from bench.gpu import make_cases
from bench.gpu_report import STUB_DEVICE, has_stub
from bench.peers.device import DeviceWorker
from pynixlkv.cli.bench.cases import Series
from pynixlkv.cli.bench.run import run_cases
from pynixlkv.cli.render import bench_verdict

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def device():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if has_stub():
        return STUB_DEVICE
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return "cuda:0"


@pytest.mark.parametrize("series", [Series.binding, Series.ucx, Series.nixl], ids=lambda s: s.name)
def test_scattered_blocks_of_one_card_and_of_the_host_arrive_whole(device, series):
    cases = make_cases(device, (series,), total_bytes=8 << 20, sizes=[16 << 10])
    report = run_cases(cases, 2, 60, lambda *_: None, worker=DeviceWorker)
    assert report.ok, bench_verdict(report)
    assert len(report.cases) == 4
    assert all(case.series[0].seconds for case in report.cases)
