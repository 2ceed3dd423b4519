"""Leads a measurement: every case in rounds, in which everything that is compared has its turn."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv import _loader
from pynixlkv.cli.bench.cases import TRANSPORTS, Case, Fault, Series, make_cases
from pynixlkv.cli.bench.memory import small_pages
from pynixlkv.cli.bench.messages import (
    Close,
    Done,
    Finish,
    Offer,
    Offered,
    Open,
    Ran,
    Rest,
    Rested,
    Run,
    Serve,
    SideSpec,
    decode,
)
from pynixlkv.cli.bench.movers import find_nixl_python, has_target
from pynixlkv.cli.bench.perftest import HOW_TO_GET, Perftest
from pynixlkv.cli.group import ProcessGroup
from pynixlkv.cli.messages import RunError
from pynixlkv.errors import LibraryNotFoundError, PynixlkvError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BenchOptions", "BenchReport", "CaseReport", "SeriesReport", "run_bench", "run_cases"]

_ROUNDS, _QUICK_ROUNDS = 7, 3
_TARGET, _INITIATOR = "target", "initiator"
_ON_UCX = ("pynixlkv.ucx", "UcxAgent", Series.memcpy_mapped.value)
# Reported where they are installed.
_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13", "libucx-cu12", "libucx-cu13", "torch")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Parameters
    ----------
    transports : tuple of str, optional
        Names; by default all that work here.
    quick : bool
        A few cases that take seconds.
    timeout_s : float
        Seconds after which everything is given up.
    fault : Fault, optional
        What to spoil on purpose, to see that it is noticed.
    """

    transports: tuple[str, ...] | None = None
    quick: bool = False
    timeout_s: float = 1800.0
    fault: Fault | None = None


@dataclass(frozen=True)
class SeriesReport:
    """What one series of a case took.

    Parameters
    ----------
    series : str
        What moved the bytes.
    seconds : list of float
        Each run, in order; runs that failed are not among them.
    median_s, iqr_s : float
        Median and interquartile range of the runs; 0 if all failed.
    gb_per_s : float
        Bytes by the median, in 10⁹ bytes per second.
    us_per_piece : float
        Median by the number of pieces, in microseconds: the latency where the window is 1.
    ratio : float or None
        Median over the rounds of the limit's time by this one's; None without a limit.
    failures : int
        Runs that failed.
    wrong_bytes : int
        Bytes that differ from what they must be, in the runs that were compared.
    error : str
        The first failure.
    """

    series: str
    seconds: list[float]
    median_s: float
    iqr_s: float
    gb_per_s: float
    us_per_piece: float
    ratio: float | None
    failures: int
    wrong_bytes: int
    error: str


@dataclass(frozen=True)
class CaseReport:
    """One case and what each of its series took."""

    name: str
    transport: str
    operation: str
    pattern: str
    piece_bytes: int
    count: int
    window: int
    initiator_device: str
    target_device: str
    limit: str
    series: list[SeriesReport]


@dataclass(frozen=True)
class BenchReport:
    """All that was measured, and where.

    Parameters
    ----------
    machine, versions : dict
        The machine and the libraries.
    load_average : list of float
        That of the last minute, before and after.
    processors : list of int
        Where the target and the initiator stayed; empty if there was no choice.
    rounds : int
        Turns that everything compared had in each case.
    absent : dict of str to str
        Transports and series that were not measured, and why.
    cases : list of CaseReport
        The results.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    load_average: list[float]
    processors: list[int]
    rounds: int
    absent: dict[str, str]
    cases: list[CaseReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every run succeeded and every byte that was compared is right."""
        return all(not s.failures and not s.wrong_bytes for c in self.cases for s in c.series)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values.

        Returns
        -------
        dict
            Field names and values, and ``ok``.
        """
        return {"ok": self.ok, **asdict(self)}


def run_bench(options: BenchOptions, on_progress: Callable[[str, int, int], None]) -> BenchReport:
    """Measure.

    Parameters
    ----------
    options : BenchOptions
        What.
    on_progress : callable
        Called with what is being measured, and how much of how much is done.

    Returns
    -------
    BenchReport
        Runs that failed and bytes that differ are in it, not an exception.

    Raises
    ------
    ConfigError
        If a transport is unknown or cannot be measured here.
    RunError
        If a process ends or the time is up. No process is left behind.

    Notes
    -----
    Blocks until the end, for at most ``timeout_s``.
    """
    absent = _absent_series(quick=options.quick)
    series = [s for s in Series if s.value not in absent]
    names = options.transports
    if names is None:
        reasons = {name: TRANSPORTS[name].absent or _problem(name) for name in TRANSPORTS}
        absent |= {name: reason for name, reason in reasons.items() if reason}
    cases = [
        case
        for case in make_cases(names, quick=options.quick, series=series, fault=options.fault)
        if names is not None or case.transport not in absent
    ]
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    return run_cases(cases, rounds, options.timeout_s, on_progress, absent)


def run_cases(
    cases: Sequence[Case],
    rounds: int,
    timeout_s: float,
    on_progress: Callable[[str, int, int], None],
    absent: dict[str, str] | None = None,
) -> BenchReport:
    """Measure some cases; as `run_bench`.

    Parameters
    ----------
    cases : sequence of Case
        Those of one transport next to each other.
    rounds : int
        Turns that everything compared gets, at least 2.
    timeout_s : float
        Seconds after which everything is given up.
    on_progress : callable
        As for `run_bench`.
    absent : dict of str to str, optional
        For the report.

    Returns
    -------
    BenchReport
        The results.
    """
    before = os.getloadavg()[0]
    processors = choose_processors()
    where = dict(zip((_TARGET, _INITIATOR), processors or (), strict=False))
    reports: list[CaseReport] = []
    for transport, group in groupby(cases, key=lambda case: case.transport):
        names = dict.fromkeys((_target_of(transport), _INITIATOR))
        specs = [SideSpec(name, transport, timeout_s, where.get(name)) for name in names]
        with (
            small_pages(),
            ProcessGroup(
                "pynixlkv.cli.bench.side", decode, specs, timeout_s, lambda *_: None
            ) as sides,
        ):
            for case in group:
                on_progress(case.describe(), len(reports), len(cases))
                reports.append(_Measurement(sides, case, rounds, processors).report())
            sides.ask("finish", dict.fromkeys(names, Finish()), Done)
            sides.join()
    on_progress("done", len(cases), len(cases))
    return BenchReport(
        machine=_machine(),
        versions=_versions(),
        load_average=[before, os.getloadavg()[0]],
        processors=list(processors or ()),
        rounds=rounds,
        absent=absent or {},
        cases=reports,
    )


def choose_processors() -> tuple[int, int] | None:
    """Return a processor each for the target and the initiator, not threads of one core.

    On the same two throughout, what is compared does not depend on who got the better one.

    Returns
    -------
    tuple of (int, int) or None
        Numbers of processors; None if this process may use only one.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return None
    topology = Path(f"/sys/devices/system/cpu/cpu{first}/topology/core_cpus_list")
    siblings: set[int] = set()
    if topology.exists():
        for part in topology.read_text().strip().split(","):
            begin, _, end = part.partition("-")
            siblings |= set(range(int(begin), int(end or begin) + 1))
    return first, next((other for other in others if other not in siblings), others[0])


def _target_of(transport: str) -> str:
    """Name the process whose memory is read and written."""
    return _INITIATOR if TRANSPORTS[transport].one_process else _TARGET


class _Measurement:
    """One case between two sides."""

    def __init__(
        self, sides: ProcessGroup, case: Case, rounds: int, processors: tuple[int, int] | None
    ) -> None:
        self._sides = sides
        self._processors = processors
        self._case = case
        self._target = _target_of(case.transport)
        self._perftest = Perftest.find() if Series.perftest in case.series else None
        self._times: dict[Series, list[float | None]] = {s: [] for s in case.series}
        self._wrong = dict.fromkeys(case.series, 0)
        self._errors: dict[Series, list[str]] = {s: [] for s in case.series}
        offered = sides.ask("offer", {self._target: Offer(case)}, Offered)[self._target]
        sides.ask("open", {_INITIATOR: Open(case, offered.offers)}, Done)
        # The first round warms up and is not counted; it and the last one are compared.
        for number in range(rounds + 1):
            # Back and forth, so that none always follows the same other.
            order = case.series if number % 2 else case.series[::-1]
            for series in order:
                self._run(series, compare=number in (0, rounds), counts=number > 0)
        sides.ask("close", {_INITIATOR: Close()}, Done)
        sides.ask("close", {self._target: Close()}, Done)

    def _run(self, series: Series, *, compare: bool, counts: bool) -> None:
        if series is Series.perftest:
            if counts:
                self._times[series].append(self._run_perftest())
            return
        is_put = self._case.operation == "put" and has_target(series)
        if has_target(series):
            command = Serve(series.value, clear=compare and is_put)
            self._sides.ask("serve", {self._target: command}, Done)
        run = Run(series.value, compare=compare and not is_put)
        ran = self._sides.ask("run", {_INITIATOR: run}, Ran)[_INITIATOR]
        wrong_bytes = ran.wrong_bytes
        if has_target(series):
            rest = Rest(compare=compare and is_put)
            rested = self._sides.ask("rest", {self._target: rest}, Rested)[self._target]
            wrong_bytes += rested.wrong_bytes
        if ran.error:
            self._errors[series].append(ran.error)
        else:
            self._wrong[series] += wrong_bytes
        if counts:
            self._times[series].append(None if ran.error else ran.seconds)

    def _run_perftest(self) -> float | None:
        assert self._perftest is not None
        try:
            return self._perftest.run(self._case, self._processors)
        except RunError as error:
            self._errors[Series.perftest].append(str(error))
            return None

    def report(self) -> CaseReport:
        """Return what was found."""
        case = self._case
        limit = case.series[0]
        return CaseReport(
            name=case.describe(),
            transport=case.transport,
            operation=case.operation,
            pattern=case.pattern,
            piece_bytes=case.piece_bytes,
            count=case.count,
            window=case.window,
            initiator_device=case.initiator_device,
            target_device=case.target_device,
            limit=limit.value,
            series=[self._summarise(series, limit) for series in case.series],
        )

    def _summarise(self, series: Series, limit: Series) -> SeriesReport:
        times = [seconds for seconds in self._times[series] if seconds is not None]
        rounds = zip(self._times[limit], self._times[series], strict=True)
        ratios = [best / own for best, own in rounds if best is not None and own is not None]
        errors = self._errors[series]
        middle = median(times) if times else 0.0
        quarters = quantiles(times, n=4, method="inclusive") if len(times) > 1 else [0.0, 0.0, 0.0]
        return SeriesReport(
            series=series.value,
            seconds=times,
            median_s=middle,
            iqr_s=quarters[2] - quarters[0],
            gb_per_s=self._case.num_bytes / middle / 1e9 if middle else 0.0,
            us_per_piece=middle / self._case.count * 1e6,
            ratio=median(ratios) if ratios and series is not limit else None,
            failures=len(errors),
            wrong_bytes=self._wrong[series],
            error=errors[0] if errors else "",
        )


def _absent_series(*, quick: bool) -> dict[str, str]:
    """Return the series that cannot take part, and why."""
    absent = {}
    if Perftest.find() is None:
        absent[Series.perftest.value] = HOW_TO_GET
    try:
        _loader.find_ucx()
    except LibraryNotFoundError as error:
        absent |= {s.value: str(error) for s in Series if s.value.startswith(_ON_UCX)}
    try:
        _loader.find_nixl()
    except LibraryNotFoundError as error:
        absent[Series.nixl.value] = str(error)
    if quick:
        absent[Series.nixl_python.value] = "not with --quick: importing torch takes too long"
    elif find_nixl_python() is None:
        absent[Series.nixl_python.value] = "needs the Python package of NIXL, and torch"
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
    return {
        "processor": _processor() or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    lines = cpuinfo.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _versions() -> dict[str, str]:
    from pynixlkv import __version__

    versions = {
        "pynixlkv": __version__, "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip
    try:
        ucx = _loader.load_ucx()
        versions |= {"ucx": ucx.version}
    except LibraryNotFoundError:
        pass
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
