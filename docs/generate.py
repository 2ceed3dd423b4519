"""Write what pages include and nobody should copy by hand, into docs/_generated (not committed).

The options of the vLLM connector come from its struct, the API pages from the modules, and the
screens from the command line, run here and now.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
from numpydoc.docscrape import ClassDoc

from pynixlkv.vllm.options import Options

DOCS = Path(__file__).parent
OUT = DOCS / "_generated"
COLUMNS = 100
# The modules that users import from, by layer; a name is described on the first page that has it.
MODULES = (
    "pynixlkv.geometry",
    "pynixlkv.topology",
    "pynixlkv.plan",
    "pynixlkv.agent",
    "pynixlkv.transfer",
    "pynixlkv.nixl",
    "pynixlkv.ucx",
    "pynixlkv.testing",
    "pynixlkv.testing.conformance",
    "pynixlkv.testing.remote",
    "pynixlkv.handshake",
    "pynixlkv.connector",
    "pynixlkv.connector.staging",
    "pynixlkv.connector.stats",
    "pynixlkv.types",
    "pynixlkv.errors",
)


def write(name: str, text: str) -> None:
    """Write a file if it changes."""
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def options_table() -> str:
    """Return the options of `PyNixlKVConnector` as a table."""
    words = {p.name: " ".join(p.desc) for p in ClassDoc(Options)["Parameters"]}
    kinds = {p.name: p.type for p in ClassDoc(Options)["Parameters"]}
    rows = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in msgspec.structs.fields(Options):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        shown = msgspec.json.encode(default).decode()
        meaning = words[field.name].replace("``", "`")
        rows.append(f"| `{field.name}` | {kinds[field.name]} | `{shown}` | {meaning} |")
    return "\n".join(rows) + "\n"


def directive(module: str, name: str) -> list[str]:
    """Return what describes one public name."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.isroutine(thing):
        return [f".. autofunction:: {module}.{name}", ""]
    if not inspect.isclass(thing):
        return []
    kind = "autoexception" if issubclass(thing, BaseException) else "autoclass"
    return [f".. {kind}:: {module}.{name}", "   :members:", "   :show-inheritance:", ""]


def api_pages() -> dict[str, str]:
    """Return a page for each module, and the list of them."""
    pages, seen = {}, {}
    for module in MODULES:
        lines = [f"# {module}", "", "```{eval-rst}", f".. automodule:: {module}", ""]
        elsewhere = []
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            described = directive(module, name) if id(thing) not in seen else []
            lines += described
            if described:
                seen[id(thing)] = module
            else:
                elsewhere.append(f"``{name}``")
        if elsewhere:
            lines += [f"Also here: {', '.join(elsewhere)}.", ""]
        pages[f"api/{module}.md"] = "\n".join([*lines, "```", ""])
    entries = "\n".join(f"../_generated/{page.removesuffix('.md')}" for page in pages)
    pages["api.md"] = f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    return pages


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
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n") + "\n"


def info_screen() -> str:
    """Return what ``pynixlkv info`` shows, without the place where this environment is."""
    from rich.console import Console

    from pynixlkv.cli.render import info_table

    report = run_cli("info", "--json")
    for place in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        report = report.replace(place, "…/site-packages")
    console = Console(width=COLUMNS, file=io.StringIO(), record=True)
    console.print(info_table(json.loads(report)))
    return console.export_text()


def commands() -> list[str]:
    """Name the commands that there are."""
    from typer.main import get_command

    from pynixlkv.cli.app import app

    return sorted(getattr(get_command(app), "commands", {}))


def screens() -> dict[str, str]:
    """Return each screen by file name, and the page that shows them."""
    shown = {"help": ("pynixlkv --help", run_cli("--help"))}
    for name in commands():
        shown[f"{name}-help"] = (f"pynixlkv {name} --help", run_cli(name, "--help"))
    shown["info"] = ("pynixlkv info", info_screen())
    demo = ["demo", "--prefill-tp", "2", "--decode-tp", "1", "--blocks", "8"]
    shown["demo"] = ("pynixlkv " + " ".join(demo), run_cli(*demo))
    page = "".join(
        f"## `{command}`\n\n```{{literalinclude}} ../_generated/screens/{name}.txt\n"
        ":language: text\n```\n\n"
        for name, (command, _) in shown.items()
    )
    return {f"screens/{name}.txt": text for name, (_, text) in shown.items()} | {"cli.md": page}


def generate() -> None:
    """Write everything."""
    files = {"options.md": options_table()} | api_pages() | screens()
    for stale in [
        p for p in OUT.rglob("*") if p.is_file() and str(p.relative_to(OUT)) not in files
    ]:
        stale.unlink()
    for name, text in files.items():
        write(name, text)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    generate()
