"""Reports as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from pynixlkv.cli.bench.run import BenchReport
    from pynixlkv.cli.demo import DemoReport, OperationReport
    from pynixlkv.cli.size import SizeReport


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def show_demo(report: DemoReport, console: Console) -> None:
    """Print the demo's results, one column for each operation."""
    roles = ", ".join(
        f"{role} {report.axes[role]} on {size} rank{'s' * (size > 1)}"
        for role, size in report.sizes.items()
    )
    table = Table(
        title=f"{report.model}, {report.block_tokens}-token blocks\n{roles}\nseed {report.seed}",
        title_justify="left",
    )
    table.add_column()
    for operation in report.operations:
        table.add_column(operation.operation, justify="right")
    rows: dict[str, Callable[[OperationReport], str]] = {
        "bytes": lambda moved: f"{moved.bytes:,}",
        "blocks": lambda moved: f"{moved.blocks:,}",
        "descriptors": lambda moved: f"{moved.descriptors_unmerged:,}",
        "descriptors, merged": lambda moved: f"{moved.descriptors:,}",
        "plan": lambda moved: _milliseconds(moved.plan_s),
        "post": lambda moved: _milliseconds(moved.post_s),
        "transfer": lambda moved: _milliseconds(moved.transfer_s),
        "GB/s": lambda moved: f"{moved.gb_per_s:.2f}",
        "transport": lambda moved: moved.transport,
    }
    for heading, write in rows.items():
        table.add_row(heading, *(write(operation) for operation in report.operations))
    console.print(table)
    for difference in report.differences:
        console.print(difference, style="red", highlight=False)
    verdict = (
        f"verified {report.verified_bytes:,} bytes: all equal; "
        f"{report.guard_bytes:,} guard bytes: all untouched"
        if report.ok
        else f"FAILED: {report.wrong_bytes:,} bytes differ"
    )
    console.print(verdict, highlight=False, soft_wrap=True)


def info_table(report: Mapping[str, Any]) -> Table:
    """Return a report on the installation as a table."""
    table = Table(show_header=False, show_lines=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for field, value in report.items():
        table.add_row(field.replace("_", " "), escape(_lines(value)) or "none")
    return table


def _lines(value: object) -> str:
    """Return a value of a report as text, nested values one to a line."""
    if isinstance(value, dict):
        parts = (f"{key} {_lines(part)}" for key, part in value.items() if part)
        return ", ".join(parts).replace("\n", " ")
    if isinstance(value, (list, tuple)):
        return "\n".join(_lines(part) for part in value)
    return "" if value is None else str(value)


def show_bench(report: BenchReport, console: Console) -> None:
    """Print measurements, the limit of each case first."""
    before, after = report.load_average
    table = Table(
        title=f"medians of {report.rounds} rounds, load {before:.1f} to {after:.1f}",
        title_justify="left",
    )
    table.add_column("moved by", no_wrap=True)
    for heading in ("µs/piece", "GB/s", "of limit"):
        table.add_column(heading, justify="right")
    for case in report.cases:
        table.add_row(case.name, style="bold")
        for series in case.series:
            table.add_row(
                f"  {series.series}",
                f"{series.us_per_piece:,.2f}",
                f"{series.gb_per_s:.2f}",
                "" if series.ratio is None else f"{series.ratio:.2f}",
            )
        table.add_section()
    console.print(table)
    for name, reason in report.absent.items():
        console.print(f"not measured: {name}: {reason}", highlight=False, markup=False)
    for line in bench_verdict(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def bench_verdict(report: BenchReport) -> list[str]:
    """Return the last lines of the bench: a line for each failed series, or one if none failed."""
    lines = [
        f"FAILED: {case.name} by {series.series}: {series.failures} runs failed, "
        f"{series.wrong_bytes:,} bytes differ" + f"; first: {series.error}" * bool(series.error)
        for case in report.cases
        for series in case.series
        if series.failures or series.wrong_bytes
    ]
    return lines or [f"{len(report.cases)} cases: no run failed, all bytes that arrived are equal"]


def show_size(report: SizeReport, console: Console) -> None:
    """Print what hand-offs cost."""
    options = report.options
    table = Table(
        title=f"{options.model}, TP {options.prefill_tp} to TP {options.decode_tp}, "
        f"prompts of {options.prompt:,} tokens, {options.link:g} Gb/s for each rank",
        title_justify="left",
        show_header=False,
    )
    rows = {
        "bytes of a token": f"{report.bytes_per_token:,}",
        "bytes of a request": f"{report.request_bytes:,}",
        "  at a rank of decode": f"{report.rank_bytes:,} from {report.sources} ranks",
        "  descriptors there": f"{report.descriptors:,} of {report.shortest_run:,} bytes or more",
        "  time on the link": _milliseconds(report.transfer_s),
        f"load of {options.rate:g} requests/s": f"{report.load_gb_per_s:,.2f} GB/s",
        "  links of prefill, of decode": f"{report.prefill_links:,}, {report.decode_links:,}",
        "leases held by prefill": f"{report.leases:,.1f}",
        "  blocks held": f"{report.held_blocks:,.0f}",
        "peers of a rank of prefill": f"{report.prefill_peers:,}, {report.prefill_fds:,} files",
        "peers of a rank of decode": f"{report.decode_peers:,}, {report.decode_fds:,} files",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
