"""Check the docstrings of everything public: each ``__all__`` of the package and its members.

Ruff sees missing docstrings and malformed sections; this imports the package and compares what is
documented with the signatures that are really there, dataclasses included. An argument names the
part of the package to look at. Modules that import vLLM are left out where that is not installed.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from typing import TYPE_CHECKING

from numpydoc.docscrape import get_doc_object
from numpydoc.validate import Validator, validate

import pynixlkv

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


def public_modules(part: str) -> Iterator[str]:
    """Name each module in a part of the package that has no underscore in its path."""
    names = [info.name for info in pkgutil.walk_packages(pynixlkv.__path__, "pynixlkv.")]
    for name in ["pynixlkv", *names]:
        if f"{name}.".startswith(f"{part}.") and "._" not in name:
            yield name


def public_names(module_name: str) -> Iterator[str]:
    """Name the functions and classes a module exports, and the public methods written in them."""
    module = importlib.import_module(module_name)
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if getattr(thing, "__module__", None) != module_name:
            continue  # documented where it is defined, or a plain value
        if inspect.isroutine(thing) or inspect.isclass(thing):
            yield f"{module_name}.{name}"
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (
                    inspect.isroutine(value) or isinstance(value, (property, classmethod))
                ):
                    yield f"{module_name}.{name}.{member}"


def applies(code: str, name: str) -> bool:
    """Tell whether a check is one for this name.

    Where a line says everything, or says which other docstring does, there is no section of
    parameters; where there is one, it must be whole. The name of a test says what it does.
    """
    if code == "PR01":
        return bool(Validator(get_doc_object(Validator._load_obj(name))).doc_parameters)
    return not (code == "GL08" and name.startswith("pynixlkv.testing.conformance."))


def main() -> int:
    """Print each finding and return the exit status."""
    seen, findings = 0, 0
    for module_name in public_modules(sys.argv[1] if len(sys.argv) > 1 else "pynixlkv"):
        try:
            names = list(public_names(module_name))
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            print(f"{module_name}: not checked, vLLM is not installed (make test-vllm checks it)")
            continue
        for name in names:
            seen += 1
            for code, message in validate(name)["errors"]:
                if code in CHECKS and applies(code, name):
                    findings += 1
                    print(f"{name}: {code} {message}")
    print(f"{seen} public names checked, {findings} findings")
    return 1 if findings or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
