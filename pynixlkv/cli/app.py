"""The commands and their options; `demo`, `bench`, `size` and `native_report` implement them."""

from __future__ import annotations

import json
import signal
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pynixlkv.cli.bench.cases import TRANSPORTS
from pynixlkv.cli.models import MODELS
from pynixlkv.cli.rank import Role
from pynixlkv.cli.render import info_table, show_bench, show_demo, show_size
from pynixlkv.errors import PynixlkvError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

    from pynixlkv.cli.bench.run import BenchReport
    from pynixlkv.cli.demo import DemoReport
    from pynixlkv.cli.size import SizeReport

    Report = TypeVar("Report", DemoReport, BenchReport, SizeReport)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Move paged KV-cache blocks between LLM serving processes.",
)


class TransferBackend(str, Enum):
    """The library that moves the bytes."""

    nixl = "nixl"
    ucx = "ucx"


def _exit_on_terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _run(
    run: Callable[[Callable[[str, int, int], None]], Report],
    show: Callable[[Report, Console], None],
    *,
    as_json: bool,
) -> None:
    """Run under a progress bar and report the results or the failure, which is exit status 1."""
    signal.signal(signal.SIGTERM, _exit_on_terminate)
    failure: PynixlkvError | None = None
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("start", total=1)

        def on_progress(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        try:
            report = run(on_progress)
        except PynixlkvError as error:
            failure = error
    if failure is not None:
        if as_json:
            kind = type(failure).__name__
            typer.echo(json.dumps({"ok": False, "error": str(failure), "kind": kind}))
        else:
            typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        show(report, Console())
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="One of " + ", ".join(model.name for model in MODELS) + ".")
    ] = MODELS[0].name,
    axes: Annotated[
        str | None,
        typer.Option(
            help="Order of the dimensions of each layer's tensor on both sides: KBHND (or HND), "
            "KBNHD (or NHD), BKNHD, BHNC, BND (or MLA), …; L for one tensor of all layers."
        ),
    ] = None,
    prefill_axes: Annotated[
        str | None, typer.Option(help="The same for prefill alone.", show_default="as --axes")
    ] = None,
    decode_axes: Annotated[
        str | None, typer.Option(help="The same for decode alone.", show_default="as --axes")
    ] = None,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Prefill processes.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Decode processes.")] = 1,
    blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks to move each way.", show_default="what fits the memory"),
    ] = None,
    transfer_backend: Annotated[
        TransferBackend, typer.Option(help="The library that moves the bytes.")
    ] = TransferBackend.nixl,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until giving up.")] = 300.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeat a run.", show_default="random")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Move a real KV cache between prefill and decode processes here, and compare every byte.

    Decode reads scattered blocks from prefill, and prefill writes others to decode. Exit status is
    0 only if every byte that was moved is right and every other byte untouched.
    """
    from pynixlkv.cli.demo import run_demo
    from pynixlkv.cli.rank import DemoOptions

    chosen: dict[Role, str | None] = {
        "prefill": prefill_axes or axes,
        "decode": decode_axes or axes,
    }
    options = DemoOptions(
        model=model,
        axes={role: text for role, text in chosen.items() if text is not None},
        sizes={"prefill": prefill_tp, "decode": decode_tp},
        blocks=blocks,
        transfer_backend=transfer_backend.value,
        timeout_s=timeout,
        seed=seed,
    )
    _run(partial(run_demo, options), show_demo, as_json=as_json)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which libraries, transports and kinds of memory work here, and what is missing."""
    from pynixlkv import __version__, native_report
    from pynixlkv.nixl_api._switch import NAMES, is_asked

    stands_in_for = list(NAMES) if is_asked() else []
    report = {"pynixlkv": __version__, **native_report().to_dict(), "nixl_api": stands_in_for}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print(info_table(report))


@app.command()
def bench(
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="One of " + ", ".join(TRANSPORTS) + "; several times for several.",
            show_default="all that work here",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, in seconds.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the results in a .png, .svg or .pdf file.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until giving up.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how fast bytes move between two processes of this machine.

    The thin binding and the agents take turns with ucx_perftest and a copy inside one process. Exit
    status is 0 only if no run failed and every compared byte is right.
    """
    from pynixlkv.cli.bench.plot import check_plot, draw
    from pynixlkv.cli.bench.run import run_bench

    def run(on_progress: Callable[[str, int, int], None]) -> BenchReport:
        if plot is not None:
            check_plot(plot)
        report = run_bench(
            transport or None, quick=quick, timeout_s=timeout, on_progress=on_progress
        )
        if plot is not None:
            draw(report, plot)
        return report

    _run(run, show_bench, as_json=as_json)


@app.command()
def size(
    model: Annotated[
        str, typer.Option(help="One of " + ", ".join(model.name for model in MODELS) + ".")
    ] = MODELS[0].name,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Ranks of a prefill engine.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Ranks of a decode engine.")] = 1,
    prefill_axes: Annotated[
        str | None, typer.Option(help="Layout of prefill, as for demo.", show_default="HND")
    ] = None,
    decode_axes: Annotated[
        str | None, typer.Option(help="Layout of decode, as for demo.", show_default="HND")
    ] = None,
    prefill_block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block.", show_default="16")
    ] = None,
    decode_block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block.", show_default="16")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 8192,
    link: Annotated[
        str, typer.Option(help="Speed of the link of one rank in Gb/s, such as 100Gb.")
    ] = "100Gb",
    rate: Annotated[float, typer.Option(help="Requests a second, of the whole fleet.")] = 1.0,
    prefill_engines: Annotated[int, typer.Option(min=1, help="Engines of prefill.")] = 1,
    decode_engines: Annotated[int, typer.Option(min=1, help="Engines of decode.")] = 1,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds from the end of a prefill to its transfer.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute what hand-offs cost: bytes, descriptors, time, held blocks, links, connections.

    Nothing is measured: bytes and descriptors come from the planner, times from the link's speed.
    """
    from pynixlkv.cli.size import SizeOptions, link_speed, size_fleet

    def run(_: object) -> SizeReport:
        options = SizeOptions(
            model=model,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            prefill_axes=prefill_axes,
            decode_axes=decode_axes,
            prefill_block_size=prefill_block_size,
            decode_block_size=decode_block_size,
            prompt=prompt,
            link=link_speed(link),
            rate=rate,
            prefill_engines=prefill_engines,
            decode_engines=decode_engines,
            wait=wait,
        )
        return size_fleet(options)

    _run(run, show_size, as_json=as_json)
