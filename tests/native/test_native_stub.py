"""The checked-in stub of the native module names what the built module has, and nothing else."""

import ast
from pathlib import Path

from pynixlkv import _native

STUB = Path(__file__).parents[2] / "pynixlkv" / "_native.pyi"


def names_of(body):
    """Name -> names of its members, for the statements of a stub."""
    names = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = set(names_of(node.body))
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = set()
    return names


def test_the_stub_lists_exactly_what_there_is():
    stub = names_of(ast.parse(STUB.read_text()).body)
    built = {name: value for name, value in vars(_native).items() if not name.startswith("__")}
    assert set(stub) == set(built)
    for name, value in built.items():
        if isinstance(value, type):
            members = {m for m in vars(value) if not m.startswith("_")}
            assert {m for m in stub[name] if not m.startswith("_")} == members, name
            has_length = "__len__" in vars(value)
            assert ("__len__" in stub[name]) == has_length
