"""The bench as a program: every byte compared, every failure reported."""

import dataclasses
import functools
import itertools
import json
import signal
import subprocess
import sys

import pytest
from peers import interrupt
from typer.testing import CliRunner

from bench.gpu import make_cases as make_gpu_cases
from bench.peers.device import DeviceWorker
from pynixlkv.cli.app import app
from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series
from pynixlkv.cli.bench.run import run_cases
from pynixlkv.cli.bench.transfers import BenchWorker
from pynixlkv.cli.render import bench_verdict
from pynixlkv.testing.process import RunError

BENCH = [sys.executable, "-m", "pynixlkv", "bench"]
KIB = 1 << 10


def run(*options):
    return subprocess.run(
        [*BENCH, *options], check=False, capture_output=True, text=True, timeout=300
    )


def invoke(*options):
    """Run the command in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(app, ["bench", *options])
    finally:
        signal.signal(signal.SIGTERM, handler)


def measure(*cases, rounds=2, worker=BenchWorker):
    return run_cases(cases, rounds, 100, lambda *_: None, worker=worker)


class FailingWorker(BenchWorker):
    """Fails one run in ten."""

    def open(self, case, offers):
        super().open(case, offers)
        (end,) = self._initiators.values()
        end.move = functools.partial(self.move, end.move, itertools.count(1))

    def move(self, move, turns):
        if next(turns) % 10 == 0:
            raise RunError("this run fails on purpose")
        return move()


class SpoilingWorker(BenchWorker):
    """Flips a bit of what has arrived."""

    def open(self, case, offers):
        super().open(case, offers)
        for end in self._initiators.values():
            end.count_wrong = functools.partial(self.spoil, end)

    def spoil(self, end):
        end.memory.buffer[-1] ^= 1
        return end.memory.count_wrong(end._expected)


def test_every_series_moves_the_right_bytes():
    series = (Series.memcpy, Series.binding, Series.ucx, Series.nixl)
    report = measure(
        Case("cma", "get", "scattered", 4 * KIB, 64, 8, series),
        Case("tcp", "put", "scattered", 4 * KIB, 64, 8, series),
    )
    assert report.ok, bench_verdict(report)
    assert len(report.cases) == 2
    for case in report.cases:
        assert [each.series for each in case.series] == [each.value for each in series]
        for each in case.series:
            assert len(each.seconds) == 2
            assert each.gb_per_s > 0
        assert case.series[0].ratio is None
        assert all(each.ratio > 0 for each in case.series[1:])


def test_repeated_pieces_are_measured_beside_ucx_perftest():
    series = (Series.perftest, Series.binding)
    report = measure(
        Case("cma", "get", "repeated", 64 * KIB, 16, 1, series),
        Case("cma", "put", "repeated", 64 * KIB, 16, 4, series),
    )
    assert report.ok, bench_verdict(report)
    assert [case.limit for case in report.cases] == ["ucx_perftest", "ucx_perftest"]


@pytest.mark.parametrize(
    ("transport", "repeated", "scattered"),
    [("posix", "get", "put"), ("sysv", "put", "get"), ("self", "get", "put")],
)
def test_transports_without_error_handling_are_measured(transport, repeated, scattered):
    series = TRANSPORTS[transport].scattered
    report = measure(
        Case(transport, repeated, "repeated", 16 * KIB, 16, 4, (Series.perftest, Series.binding)),
        Case(transport, scattered, "scattered", 16 * KIB, 64, 8, series),
    )
    assert report.ok, bench_verdict(report)
    assert [len(case.series) for case in report.cases] == [2, len(series)]


def test_the_gpu_cases_run_on_the_host():
    series = (Series.memcpy, Series.binding, Series.ucx)
    cases = make_gpu_cases("cpu", series, total_bytes=KIB << 8, sizes=[16 * KIB])
    # NIXL's agents take long to start.
    with_nixl = dataclasses.replace(cases[-1], series=(Series.memcpy, Series.nixl))
    report = measure(*cases, with_nixl, worker=DeviceWorker)
    assert report.ok, bench_verdict(report)
    assert len(report.cases) == 5


def test_a_run_that_fails_is_counted_and_not_timed():
    case = Case("cma", "get", "scattered", 4 * KIB, 16, 8, (Series.binding,))
    report = measure(case, rounds=10, worker=FailingWorker)
    (series,) = report.cases[0].series
    assert (len(series.seconds), series.failures) == (9, 1)
    assert "on purpose" in series.error
    assert not report.ok


def test_a_flipped_bit_fails_the_command(monkeypatch):
    series = (Series.memcpy, Series.binding)
    case = Case("self", "get", "scattered", 4 * KIB, 16, 8, series)
    report = measure(case, worker=SpoilingWorker)
    assert [each.wrong_bytes for each in report.cases[0].series] == [2, 2]  # first and last round
    monkeypatch.setattr("pynixlkv.cli.bench.run.run_bench", lambda *_, **options: report)
    done = invoke()
    assert done.exit_code == 1
    assert "FAILED: self" in done.stdout
    assert "2 bytes differ" in done.stdout


def test_the_json_says_where_it_was_measured_and_the_plot_is_drawn(tmp_path):
    plot = tmp_path / "plot.png"
    done = run("--quick", "--transport", "self", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["ucx"]
    assert len(report["load_average"]) == 2
    assert report["cases"][0]["transport"] == "self"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--transport", "carrier-pigeon"], ["carrier-pigeon", "posix"]),
        (["--transport", "cuda_ipc"], ["cuda_ipc", "bench/gpu.py"]),
        (["--plot", "plot.doc"], ["plot.doc", ".png"]),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(options, words):
    done = invoke("--json", *options)
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert all(word in error for word in words)


def test_a_plot_without_matplotlib_is_refused_with_the_remedy():
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv = ['pynixlkv', 'bench', "
        "'--plot', 'p.png']; import pynixlkv.cli as c; c.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert 'pip install "pynixlkv[bench]"' in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_behind(number, status):
    # Both workers and both processes of ucx_perftest run.
    command = [*BENCH, "--transport", "cma", "--json"]
    assert interrupt(number, lambda children: len(children) >= 4, args=command) == status


def test_the_paths_of_one_host_are_compared_byte_by_byte():
    options = ["--path", "tcp", "--direction", "put", "--size", "16", "--mib", "1", "--rounds", "1"]
    command = [sys.executable, "-m", "bench.paths", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("one plain socket", "NIXL's Python API", "NixlAgent", "UcxAgent"):
        assert f"  {name} " in done.stdout
