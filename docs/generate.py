"""Write the parts of the pages that come from the code.

    python docs/generate.py [--check | --samples]

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. It is committed, because pages
are read in the repository too; `make lint` fails if it is stale. A part `<!-- sample: NAME -->` is
what a program printed on one machine: `--samples` writes it, and nothing compares it.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer.main
from numpydoc.docscrape import ClassDoc
from rich.console import Console

from pynixlkv.cli.app import app
from pynixlkv.cli.models import MODELS
from pynixlkv.cli.render import info_table
from pynixlkv.cli.size import SizeOptions, size_fleet
from pynixlkv.connector.stats import METRICS
from pynixlkv.vllm.caches import CACHE_KINDS
from pynixlkv.vllm.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCS = Path(__file__).parent
COLUMNS = 100
DEMO = ["demo", "--prefill-tp", "2", "--decode-tp", "1", "--blocks", "8"]
# The modules that users import from, by layer; a name is described under the first one that has it.
MODULES = (
    "pynixlkv.geometry",
    "pynixlkv.topology",
    "pynixlkv.plan",
    "pynixlkv.digest",
    "pynixlkv.agent",
    "pynixlkv.transfer",
    "pynixlkv.nixl",
    "pynixlkv.ucx",
    "pynixlkv.testing",
    "pynixlkv.testing.conformance",
    "pynixlkv.testing.remote",
    "pynixlkv.testing.fleet",
    "pynixlkv.handshake",
    "pynixlkv.connector",
    "pynixlkv.connector.staging",
    "pynixlkv.connector.stats",
    "pynixlkv.connector.spans",
    "pynixlkv.vllm.caches",
    "pynixlkv.types",
    "pynixlkv.errors",
)


def table(head: str, rows: list[list[str]]) -> str:
    """Return a table of Markdown; the head names the columns, separated by commas."""
    columns = head.split(", ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def one_line(text: str) -> str:
    """Return the first paragraph of a docstring as text of a table."""
    text = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return text.replace("``", "`").replace("|", "\\|")


def options() -> str:
    """Return the options of `PyNixlKVConnector`."""
    rows = []
    documented = {parameter.name: parameter for parameter in ClassDoc(Options)["Parameters"]}
    for field in msgspec.structs.fields(Options):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        shown = msgspec.json.encode(default).decode()
        parameter = documented[field.name]
        meaning = one_line(" ".join(parameter.desc))
        rows.append([f"`{field.name}`", parameter.type, f"`{shown}`", meaning])
    return table("option, type, default, meaning", rows)


def metrics() -> str:
    """Return what the connector exports to Prometheus."""
    rows = [
        [
            f"`vllm:pynixlkv_{metric.name}{'_total' if metric.kind == 'counter' else ''}`",
            metric.kind,
            f"`{metric.label}`" if metric.label else "",
            metric.meaning,
        ]
        for metric in METRICS
    ]
    return table("name, kind, label, meaning", rows)


def commands() -> str:
    """Return the commands of the command line and their options."""
    group = typer.main.get_command(app)
    parts = []
    for name, command in sorted(getattr(group, "commands", {}).items()):
        parts.append(f"## `pynixlkv {name}`\n\n{inspect.cleandoc(command.help)}\n")
        rows = []
        for option in command.params:
            if getattr(option, "hidden", False):
                continue
            default = option.show_default if isinstance(option.show_default, str) else ""
            if not default and option.default not in (None, False, ()):
                default = f"`{getattr(option.default, 'value', option.default)}`"
            names = ", ".join(f"`{each}`" for each in option.opts)
            rows.append([names, default, one_line(getattr(option, "help", None) or "")])
        if rows:
            parts.append(table("option, default, meaning", rows))
    return "\n".join(parts)


def documented_names() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each module, the names to describe under it, and those described elsewhere."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        here, elsewhere = [], []
        for name in module.__all__:
            thing = getattr(module, name)
            is_new = id(thing) not in seen and (inspect.isroutine(thing) or inspect.isclass(thing))
            (here if is_new else elsewhere).append(name)
            seen.add(id(thing))
        yield module_name, here, elsewhere


def modules() -> str:
    """Return what each module offers, a line a name."""
    parts = []
    for module_name, here, _ in documented_names():
        module = importlib.import_module(module_name)
        rows = [[f"`{name}`", one_line(getattr(module, name).__doc__ or "")] for name in here]
        parts.append(f"## {module_name}\n\n{one_line(module.__doc__ or '')}\n")
        parts.append(table("name, what it is", rows))
    return "\n".join(parts)


def cache_kinds() -> str:
    """Return what becomes of each class of vLLM's cache specs."""
    rows = [
        [f"`{name}`", kind.models, kind.moves or f"refused: {kind.refused}"]
        for name, kind in CACHE_KINDS.items()
    ]
    return table("class, models, what a hand-off moves", rows)


def example() -> str:
    """Return the connector for an imaginary engine."""
    code = (DOCS.parent / "examples" / "minimal_connector.py").read_text(encoding="utf-8")
    return f"```python\n{code}```\n"


def sizes() -> str:
    """Return what hand-offs of well-known models cost."""
    rows = []
    for model in MODELS:
        for prefill_tp, decode_tp in ((1, 1), (4, 4), (4, 8), (8, 4)):
            for axes in ("HND", "NHD") if model.kv_heads else ("BND",):
                report = size_fleet(
                    SizeOptions(model.name, prefill_tp, decode_tp, decode_axes=axes)
                )
                rows.append(
                    [
                        model.name,
                        f"{prefill_tp} → {decode_tp}",
                        f"HND → {axes}" if model.kv_heads else "MLA",
                        f"{report.request_bytes / 1e9:.2f} GB",
                        f"{report.descriptors:,}",
                        f"{report.shortest_run:,} bytes",
                        f"{report.transfer_s * 1e3:.1f} ms",
                    ]
                )
    head = "model, TP, layout, a request, descriptors at a rank, the shortest, time"
    return table(head, rows)


def run_cli(*arguments: str) -> str:
    """Return what the command line prints on a terminal of fixed width."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [Path(sys.executable).with_name("pynixlkv"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    return done.stdout


def info() -> str:
    """Return what ``pynixlkv info`` shows, without the path of this environment."""
    report = run_cli("info", "--json")
    for place in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        report = report.replace(place, "…/site-packages")
    console = Console(width=COLUMNS, file=io.StringIO(), record=True)
    console.print(info_table(json.loads(report)))
    return screen("pynixlkv info", console.export_text())


def demo() -> str:
    """Return what a small demo shows."""
    return screen(f"pynixlkv {' '.join(DEMO)}", run_cli(*DEMO))


def screen(command: str, output: str) -> str:
    """Return a command and what it printed as a block."""
    lines = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
    return f"```text\n$ {command}\n{lines}\n```\n"


GENERATED = {
    "options": options,
    "metrics": metrics,
    "cache_kinds": cache_kinds,
    "commands": commands,
    "modules": modules,
    "sizes": sizes,
    "minimal_connector.py": example,
}
SAMPLES = {"info": info, "demo": demo}


def fill(text: str, kind: str, parts: dict[str, Callable[[], str]]) -> str:
    """Return a page with its parts of this kind written anew."""
    return re.sub(
        rf"(<!-- {kind}: (\S+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{parts[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def api_pages() -> None:
    """Write the pages of the site that Sphinx fills from docstrings."""
    folder = DOCS / "_generated" / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for module_name, here, elsewhere in documented_names():
        lines = [f"# {module_name}", "", "```{eval-rst}", f".. automodule:: {module_name}", ""]
        for name in here:
            thing = getattr(importlib.import_module(module_name), name)
            kind = "autoclass" if inspect.isclass(thing) else "autofunction"
            if inspect.isclass(thing) and issubclass(thing, BaseException):
                kind = "autoexception"
            lines.append(f".. {kind}:: {module_name}.{name}")
            if inspect.isclass(thing):
                lines += ["   :members:", "   :show-inheritance:"]
            lines.append("")
        if elsewhere:
            lines += [f"Also here: {', '.join(f'``{name}``' for name in elsewhere)}.", ""]
        text = "\n".join([*lines, "```", ""])
        (folder / f"{module_name}.md").write_text(text, encoding="utf-8")


def main(*arguments: str) -> int:
    """Write the parts, or compare them, and return the exit status."""
    stale = []
    kind, parts = ("sample", SAMPLES) if "--samples" in arguments else ("generated", GENERATED)
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = fill(before, kind, parts)
        if after == before:
            continue
        if "--check" in arguments:
            stale.append(f"{page.relative_to(DOCS.parent)} is stale: run make pages")
        else:
            page.write_text(after, encoding="utf-8")
    print("\n".join(stale) or "the pages are up to date")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
