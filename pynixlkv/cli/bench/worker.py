"""One end of a measurement, in a process of its own."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pynixlkv.cli.bench.cases import Fault, Series
from pynixlkv.cli.bench.transfers import Initiator, Target, has_target
from pynixlkv.errors import PynixlkvError
from pynixlkv.testing.process import RunError

if TYPE_CHECKING:
    from pynixlkv.cli.bench.cases import Case
    from pynixlkv.cli.bench.transfers import Offer

__all__ = ["BenchWorker"]

_SPOILED_RUN = 10


class BenchWorker:
    """The targets or the initiators of a case; both where a worker reaches only itself."""

    def __init__(self) -> None:
        self._targets: dict[Series, Target] = {}
        self._initiators: dict[Series, Initiator] = {}
        self._serving: Target | None = None
        self._fault: Fault | None = None
        self._num_runs: Counter[Series] = Counter()

    def offer(self, case: Case) -> dict[Series, Offer]:
        """Make the targets of a case; return what the initiators need to reach them."""
        for series in filter(has_target, case.series):
            self._targets[series] = Target(series, case)
        return {series: target.offer() for series, target in self._targets.items()}

    def open(self, case: Case, offers: dict[Series, Offer]) -> None:
        """Make the initiators of a case."""
        self._fault = case.fault
        for series in case.series:
            if series is not Series.perftest:
                self._initiators[series] = Initiator(series, case, offers.get(series))

    def serve(self, series: Series, *, clear: bool) -> None:
        """Progress the target of a series until `rest`; with `clear`, clear its memory before."""
        self._serving = self._targets[series]
        if clear:
            self._serving.clear()

    def idle(self) -> float | None:
        """Progress the target that is served."""
        return 0.0 if self._serving is not None and self._serving.progress() else None

    def rest(self, *, compare: bool) -> int:
        """End `serve`; return how many bytes are wrong at the target."""
        serving, self._serving = self._serving, None
        return serving.count_wrong() if serving is not None and compare else 0

    def run(self, series: Series, *, compare: bool) -> tuple[float, int, str]:
        """Move everything once; return the seconds, the wrong bytes, and the error if it failed."""
        self._num_runs[series] += 1
        try:
            if self._fault is Fault.run and self._num_runs[series] % _SPOILED_RUN == 0:
                raise RunError("this run fails on purpose")
            spoil = compare and self._fault is Fault.byte
            return *self._initiators[series].run(compare=compare, spoil=spoil), ""
        except PynixlkvError as error:
            return 0.0, 0, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the ends of the case."""
        for initiator in self._initiators.values():
            initiator.close()
        for target in self._targets.values():
            target.close()
        self._initiators, self._targets = {}, {}
