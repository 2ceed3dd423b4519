"""``python -m pynixlkv.testing.fleet``: run a fleet, and print what it costs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pynixlkv.errors import ConfigError
from pynixlkv.testing.fleet.checks import Violation
from pynixlkv.testing.fleet.report import check_plot, draw, make_report, render
from pynixlkv.testing.fleet.simulation import SCENARIOS, Fleet, FleetOptions
from pynixlkv.testing.fleet.trace import read_mooncake

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pynixlkv.testing.fleet",
        description="Run a fleet of engines on the connector's real code, in virtual time. Ends "
        "with 1 if an invariant breaks.",
    )
    for each in fields(FleetOptions):
        if each.default is MISSING or isinstance(each.default, tuple):
            continue
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=type(each.default),
            default=each.default,
            help=f"default {each.default}",
        )
    parser.add_argument(
        "--scenario",
        action="append",
        choices=SCENARIOS,
        default=[],
        help="something that goes wrong; may be repeated",
    )
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format (JSON lines)")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--plot", type=Path, help="draw the run to a file (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    return parser


def _show(fleet: Fleet) -> None:
    now = fleet.events.now
    if int(now) % 5 == 0:
        seconds = time.perf_counter() - fleet.began_at
        done = sum(fleet.counts.ends.values())
        sys.stderr.write(
            f"\r{now:6.0f} s simulated in {seconds:5.0f} s, {done} requests have ended, "
            f"{fleet.num_held_blocks} blocks are held "
        )
        sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    given = vars(_parser().parse_args(arguments))
    names = {each.name for each in fields(FleetOptions)}
    began, fleet = time.process_time(), None
    try:
        options = FleetOptions(
            **{name: value for name, value in given.items() if name in names},
            scenarios=tuple(given["scenario"]),
        )
        if given["plot"] is not None:
            check_plot()
        trace = None if given["trace"] is None else read_mooncake(given["trace"], given["speed"])
        fleet = Fleet(options, trace, None if given["quiet"] else _show)
        fleet.run()
        report = make_report(fleet, time.process_time() - began)
        if given["plot"] is not None:
            draw(fleet, given["plot"])
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except Violation as broken:
        sys.stderr.write(f"\nbroken: {broken}\n")
        return 1
    finally:
        if fleet is not None:
            fleet.close()
        if not given["quiet"]:
            sys.stderr.write("\n")
    text = json.dumps(report.as_dict(), indent=2, default=list) if given["json"] else render(report)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
