"""Check the docstrings of the modules on the API pages (`MODULES` in docs/generate.py).

Ruff finds missing docstrings and malformed sections; this script compares docstrings with
signatures, dataclasses included.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from numpydoc.docscrape import get_doc_object
from numpydoc.validate import Validator, validate

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = {
    "GL06": "unknown section",
    "GL07": "sections in the wrong order",
    "GL08": "no docstring",
    "PR01": "parameter not documented",
    "PR02": "documented parameter does not exist",
    "PR03": "parameters in the wrong order",
    "PR10": "no space before the colon of a parameter",
    "SS01": "no summary",
}


def documented_modules() -> tuple[str, ...]:
    """Return the modules of the API pages."""
    tree = ast.parse((Path(__file__).parents[1] / "docs/generate.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES":
            return tuple(ast.literal_eval(node.value))
    raise SystemExit("docs/generate.py has no MODULES")


def public_names(module_name: str) -> Iterator[str]:
    """Yield the functions and classes that a module exports, and their public methods."""
    module = importlib.import_module(module_name)
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if getattr(thing, "__module__", None) != module_name:
            continue  # documented in its own module, or a plain value
        if inspect.isroutine(thing) or inspect.isclass(thing):
            yield f"{module_name}.{name}"
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (
                    inspect.isroutine(value) or isinstance(value, (property, classmethod))
                ):
                    yield f"{module_name}.{name}.{member}"


def applies(code: str, name: str) -> bool:
    """Tell whether a check applies to a name.

    A docstring of one line needs no section of parameters, but a section must be complete. Tests of
    the conformance suite are described by their names.
    """
    if code == "PR01":
        return bool(Validator(get_doc_object(Validator._load_obj(name))).doc_parameters)
    return not (code == "GL08" and name.startswith("pynixlkv.testing.conformance."))


def main() -> int:
    """Print each finding and return the exit status."""
    seen, findings = 0, 0
    for module_name in documented_modules():
        for name in public_names(module_name):
            seen += 1
            for code, message in validate(name)["errors"]:
                if code in CHECKS and applies(code, name):
                    findings += 1
                    print(f"{name}: {code} {message}")
    print(f"{seen} public names checked, {findings} findings")
    return 1 if findings or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
