"""Runs the cases in interleaved rounds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv import _loader
from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Series, make_cases
from pynixlkv.cli.bench.perftest import HOW_TO_GET, Perftest
from pynixlkv.cli.bench.transfers import BenchWorker, has_target
from pynixlkv.errors import LibraryNotFoundError, PynixlkvError
from pynixlkv.testing.process import ProcessGroup, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ROUNDS, _QUICK_ROUNDS = 7, 3
_TARGET, _INITIATOR = "target", "initiator"
_ON_UCX = (Series.binding, Series.ucx, Series.ucx_allocated)
# Reported where they are installed.
_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13", "libucx-cu12", "libucx-cu13", "torch")


@dataclass(frozen=True)
class SeriesReport:
    """The times of one series of a case.

    `seconds` has those of the runs that did not fail, in order; `us_per_piece` is the latency where
    the window is 1. `ratio` is the median over the rounds of the limit's time by this one's. Bytes
    are compared in the first round and the last. `error` is that of the first failure.
    """

    series: str
    seconds: list[float]
    median_s: float
    gb_per_s: float
    us_per_piece: float
    ratio: float | None
    failures: int
    wrong_bytes: int
    error: str


@dataclass(frozen=True)
class CaseReport:
    """One case and the times of each of its series."""

    name: str
    transport: str
    operation: str
    pattern: str
    piece_bytes: int
    count: int
    window: int
    limit: str
    series: list[SeriesReport]


@dataclass(frozen=True)
class BenchReport:
    """All results, and where they were measured; `absent` says what was not measured and why."""

    machine: dict[str, Any]
    versions: dict[str, str]
    load_average: list[float]
    rounds: int
    absent: dict[str, str]
    cases: list[CaseReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every run succeeded and every compared byte is right."""
        return all(not s.failures and not s.wrong_bytes for c in self.cases for s in c.series)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and ``ok`` as plain values."""
        return {"ok": self.ok, **asdict(self)}


def run_bench(
    transports: Sequence[str] | None,
    *,
    quick: bool,
    timeout_s: float,
    on_progress: Callable[[str, int, int], None],
) -> BenchReport:
    """Measure on some transports, by default on all that work here.

    `on_progress` is called with a label, and how much of how much is done. Runs that failed and
    bytes that differ are in the report. `ConfigError` is raised for a transport that cannot be
    measured here, `RunError` if a process ends or the time is up; no process is left behind.
    """
    absent = _absent_series()
    series = [s for s in Series if s.value not in absent]
    if transports is None:
        reasons = {name: TRANSPORTS[name].absent or _problem(name) for name in TRANSPORTS}
        absent |= {name: reason for name, reason in reasons.items() if reason}
    cases = [
        case
        for case in make_cases(transports, quick=quick, series=series)
        if transports is not None or case.transport not in absent
    ]
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    return run_cases(cases, rounds, timeout_s, on_progress, absent)


def run_cases(
    cases: Sequence[Case],
    rounds: int,
    timeout_s: float,
    on_progress: Callable[[str, int, int], None],
    absent: dict[str, str] | None = None,
    worker: type[BenchWorker] = BenchWorker,
) -> BenchReport:
    """Measure cases, grouped by transport, in at least two rounds; as `run_bench`."""
    before = os.getloadavg()[0]
    reports: list[CaseReport] = []
    for transport, group in groupby(cases, key=lambda case: case.transport):
        names = {_target_of(transport), _INITIATOR}
        environment = TRANSPORTS[transport].environment
        with ProcessGroup(dict.fromkeys(names, environment), timeout_s) as workers:
            workers.call("start", names, worker, keep=True)
            for case in group:
                on_progress(case.describe(), len(reports), len(cases))
                reports.append(_measure(workers, case, rounds))
            workers.join()
    on_progress("done", len(cases), len(cases))
    return BenchReport(
        machine=_machine(),
        versions=_versions(),
        load_average=[before, os.getloadavg()[0]],
        rounds=rounds,
        absent=absent or {},
        cases=reports,
    )


def _target_of(transport: str) -> str:
    """Name the process whose memory is read and written."""
    return _INITIATOR if TRANSPORTS[transport].one_process else _TARGET


@dataclass
class _Tally:
    """The runs of one series: seconds (None for one that failed), wrong bytes, errors."""

    times: list[float | None] = field(default_factory=list)
    wrong_bytes: int = 0
    errors: list[str] = field(default_factory=list)

    def report(self, series: Series, case: Case, limit: _Tally) -> SeriesReport:
        times = [seconds for seconds in self.times if seconds is not None]
        rounds = zip(limit.times, self.times, strict=True)
        ratios = [best / own for best, own in rounds if best is not None and own is not None]
        middle = median(times) if times else 0.0
        return SeriesReport(
            series=series.value,
            seconds=times,
            median_s=middle,
            gb_per_s=case.num_bytes / middle / 1e9 if middle else 0.0,
            us_per_piece=middle / case.count * 1e6,
            ratio=median(ratios) if ratios and self is not limit else None,
            failures=len(self.errors),
            wrong_bytes=self.wrong_bytes,
            error=self.errors[0] if self.errors else "",
        )


def _measure(workers: ProcessGroup, case: Case, rounds: int) -> CaseReport:
    def ask(worker: str, method: str, *args: object, **kwargs: bool) -> Any:  # noqa: ANN401
        return workers.call(method, [worker], method, *args, **kwargs)[worker]

    def run(series: Series, *, compare: bool) -> tuple[float, int, str]:
        if series is Series.perftest:
            assert perftest is not None
            try:
                return perftest.run(case), 0, ""
            except RunError as failure:
                return 0.0, 0, str(failure)
        if not has_target(series):
            return tuple(ask(_INITIATOR, "run", series, compare=compare))
        compares_target = compare and case.direction == "put"
        ask(target, "serve", series, clear=compares_target)
        compares_initiator = compare and case.direction == "get"
        seconds, wrong_bytes, error = ask(_INITIATOR, "run", series, compare=compares_initiator)
        return seconds, wrong_bytes + ask(target, "rest", compare=compares_target), error

    target = _target_of(case.transport)
    perftest = Perftest.find() if Series.perftest in case.series else None
    tallies = {series: _Tally() for series in case.series}
    ask(_INITIATOR, "open", case, ask(target, "offer", case))
    # The first round warms up and is not timed.
    for number in range(rounds + 1):
        # Alternate the order, so that no series always follows the same other one.
        for series in case.series if number % 2 else case.series[::-1]:
            if series is Series.perftest and number == 0:
                continue
            seconds, wrong_bytes, error = run(series, compare=number in (0, rounds))
            tally = tallies[series]
            if error:
                tally.errors.append(error)
            else:
                tally.wrong_bytes += wrong_bytes
            if number > 0:
                tally.times.append(None if error else seconds)
    ask(_INITIATOR, "close")
    ask(target, "close")
    limit = case.series[0]
    return CaseReport(
        name=case.describe(),
        transport=case.transport,
        operation=case.direction,
        pattern=case.pattern,
        piece_bytes=case.piece_bytes,
        count=case.count,
        window=case.window,
        limit=limit.value,
        series=[tally.report(each, case, tallies[limit]) for each, tally in tallies.items()],
    )


def _absent_series() -> dict[str, str]:
    absent = {}
    if Perftest.find() is None:
        absent[Series.perftest.value] = HOW_TO_GET
    try:
        _loader.find_ucx()
    except LibraryNotFoundError as error:
        absent |= {series.value: str(error) for series in _ON_UCX}
    try:
        _loader.find_nixl()
    except LibraryNotFoundError as error:
        absent[Series.nixl.value] = str(error)
    return absent


def _problem(transport: str) -> str:
    """Return why UCX cannot use a transport here; empty if it can."""
    from pynixlkv.ucx import Context, Worker

    name = TRANSPORTS[transport].ucx_tls.split(",")[0]
    try:
        Worker(Context({"TLS": name, "LOG_LEVEL": "fatal"}))
    except PynixlkvError as error:
        return str(error)
    return ""


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return {
        "processor": next(models, platform.processor() or platform.machine()),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _versions() -> dict[str, str]:
    from pynixlkv import __version__

    versions = {
        "pynixlkv": __version__, "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip
    with contextlib.suppress(LibraryNotFoundError):
        versions["ucx"] = _loader.load_ucx().version
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
