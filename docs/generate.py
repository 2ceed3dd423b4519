"""Write what pages include and nobody should copy by hand, into docs/_generated (not committed).

The options of the vLLM connector come from its struct, the API pages from the modules there are, and
the screens from the command line, run here and now.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
from numpydoc.docscrape import ClassDoc

import pynixlkv
from pynixlkv.vllm.options import Options

DOCS = Path(__file__).parent
OUT = DOCS / "_generated"
COLUMNS = 100
# Modules that need vLLM itself; what users say about them is the table of options.
LEFT_OUT = ("pynixlkv.vllm", "pynixlkv.cli", "pynixlkv.nixl_api")


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


def public_modules() -> list[str]:
    """Name the modules that users import from, in the order of the layers."""
    names = [pynixlkv.__name__]
    for info in pkgutil.walk_packages(pynixlkv.__path__, "pynixlkv."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            names.append(info.name)
    return [name for name in names if not name.startswith(LEFT_OUT)]


def api_pages() -> dict[str, str]:
    """Return a page for each module, and the list of them."""
    pages = {}
    for name in public_modules():
        module = importlib.import_module(name)
        own = [n for n in getattr(module, "__all__", ()) if is_defined_in(module, n)]
        again = [n for n in getattr(module, "__all__", ()) if n not in own]
        if not own and not again:
            continue
        lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}"]
        lines += [f"   :members: {', '.join(own)}" if own else "   :no-members:", "```", ""]
        if again:
            lines += ["Also here: " + ", ".join(f"`{n}`" for n in again) + ".", ""]
        pages[f"api/{name}.md"] = "\n".join(lines)
    entries = "\n".join(f"../_generated/{page.removesuffix('.md')}" for page in pages)
    pages["api.md"] = f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    return pages


def is_defined_in(module: object, name: str) -> bool:
    """Tell whether a public name is documented in this module and not where it comes from."""
    thing = getattr(module, name)
    home = getattr(thing, "__module__", None)
    return isinstance(home, str) and home == getattr(module, "__name__", None)


def run_cli(*arguments: str) -> str:
    """Return what the command line prints on a terminal of fixed width."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "pynixlkv", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    # Where it is installed here is nobody's business; the shape of the screen stays.
    screen = done.stdout
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(DOCS.parent)}:
        screen = re.sub(re.escape(place), "…", screen)
    return "\n".join(line.rstrip() for line in screen.splitlines()).strip("\n") + "\n"


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
    shown["info"] = ("pynixlkv info", run_cli("info"))
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
    for stale in [p for p in OUT.rglob("*") if p.is_file() and str(p.relative_to(OUT)) not in files]:
        stale.unlink()
    for name, text in files.items():
        write(name, text)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    generate()
