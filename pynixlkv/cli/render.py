"""Reports as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from pynixlkv.cli.demo import DemoReport

__all__ = ["demo_table", "verdict"]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def demo_table(report: DemoReport) -> Table:
    """Return the demo's results as a table.

    Parameters
    ----------
    report : DemoReport
        What happened.

    Returns
    -------
    Table
        One row for each operation.
    """
    sides = ", ".join(
        f"{side} {report.axes[side]} TP {size}" for side, size in report.sizes.items()
    )
    table = Table(
        title=f"{report.model}, {report.block_tokens}-token blocks, {sides}, seed {report.seed}",
        title_justify="left",
    )
    for heading in ("operation", "transport"):
        table.add_column(heading)
    for heading in ("bytes", "blocks", "descriptors", "merged", "plan", "post", "transfer", "GB/s"):
        table.add_column(heading, justify="right")
    for row in report.operations:
        table.add_row(
            row.operation,
            report.transport,
            f"{row.bytes:,}",
            f"{row.blocks:,}",
            f"{row.descriptors_unmerged:,}",
            f"{row.descriptors:,}",
            _milliseconds(row.plan_s),
            _milliseconds(row.post_s),
            _milliseconds(row.transfer_s),
            f"{row.gb_per_s:.2f}",
        )
    return table


def verdict(report: DemoReport) -> str:
    """Return the last line: how many bytes were compared, and with what result.

    Parameters
    ----------
    report : DemoReport
        What happened.

    Returns
    -------
    str
        One line.
    """
    if not report.ok:
        return f"FAILED: {report.wrong_bytes:,} bytes differ"
    return (
        f"verified {report.verified_bytes:,} bytes moved, every one equal, and "
        f"{report.guard_bytes:,} bytes of guard blocks, every one untouched"
    )
