"""A drawing of the results; the only part that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pynixlkv.cli.bench.run import BenchReport, CaseReport

_KIB = 1024
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Check before a measurement that its results can be drawn."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "--plot needs the package matplotlib, which is not installed; install it with: "
            'pip install "pynixlkv[bench]"'
        ) from None
    if path.suffix not in _SUFFIXES or not path.parent.is_dir():
        raise ConfigError(
            f"--plot {path}: expected a name that ends with one of {', '.join(_SUFFIXES)}, in a "
            "folder that exists"
        )


def draw(report: BenchReport, path: Path) -> None:
    """Draw bandwidth by size, one panel for each transport, operation and pattern."""
    from matplotlib.figure import Figure

    panels: dict[str, list[CaseReport]] = {}
    for case in report.cases:
        name = f"{case.transport}, {case.operation}, {case.pattern}"
        if case.pattern == "repeated":
            name += f", window {case.window}"
        panels.setdefault(name, []).append(case)
    columns = min(3, max(1, len(panels)))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained")
    for place, (name, cases) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        sizes = [case.piece_bytes // _KIB for case in cases]
        for number, series in enumerate(cases[0].series):
            rates = [case.series[number].gb_per_s for case in cases]
            style = "--" if series.series == cases[0].limit else "-"
            axes.plot(sizes, rates, f"{style}o", label=series.series, ms=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("KiB of a piece", fontsize=8)
        axes.set_ylabel("GB/s", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
    before, after = report.load_average
    figure.suptitle(
        f"{report.machine['cores']} cores, load {before:.1f} to {after:.1f}, medians of "
        f"{report.rounds} rounds",
        fontsize=9,
    )
    figure.savefig(path, dpi=72)
