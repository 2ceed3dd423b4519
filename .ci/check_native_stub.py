"""Compare the checked-in ``_native.pyi`` with what the built module says of itself.

pybind11 signatures are invisible to stubtest, so a stub is generated afresh and both are reduced to
the same plain form: names, parameters, defaults, types. The checked-in stub may be more precise
where the binding only knows ``object``, and is otherwise the same.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = "pynixlkv._native"
CHECKED_IN = Path("pynixlkv/_native.pyi")

# How pybind11 writes a type, and how a person does: it takes any sequence for a list, any mapping
# for a dict, and bytes for what it calls a str.
SPELLINGS = [
    (r"\bnumpy\.typing\.", ""),
    (r"\b(?:typing|collections\.abc|pynixlkv\._native|pynixlkv\.types|pynixlkv)\.", ""),
    (r"\bnumpy\b", "np"),
    (r"\bAnnotated\[ArrayLike, (np\.\w+)\]", r"NDArray[\1]"),
    (r"\bSupportsInt \| SupportsIndex\b", "int"),
    (r"\bSupportsFloat \| SupportsIndex\b", "float"),
    (r"\bOptional\[(\w+)\]", r"\1 | None"),
    (r"\bSequence\b", "list"),
    (r"\bMapping\b", "dict"),
]
UNKNOWN = {"object", "Any", "Callable", "tuple", "list", "dict"}


def plain_type(node: ast.expr | None) -> str:
    """Write an annotation without the ways in which spellings differ."""
    if node is None:
        return ""
    text = node.value if isinstance(node, ast.Constant) and node.value else ast.unparse(node)
    text = str(text)
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text


def signature(function: ast.FunctionDef, *, in_class: bool) -> dict[str, str]:
    """Reduce a function to its parameters in order, with kind and default, and their types."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    is_static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    if in_class and not is_static:
        positional = positional[1:]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    defaults += args.defaults
    found = {}
    for arg, default in zip(positional, defaults, strict=True):
        found[arg.arg + ("=" if default is not None else "")] = plain_type(arg.annotation)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found["*" + arg.arg + ("=" if default is not None else "")] = plain_type(arg.annotation)
    found["return"] = plain_type(function.returns)
    return found


def describe(body: list[ast.stmt], prefix: str = "") -> dict[str, list[dict[str, str]]]:
    """List every public name of a stub: a value has one empty form, an overload one form each."""
    found: dict[str, list[dict[str, str]]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[f"{prefix}{node.name}"] = [{"bases": ", ".join(map(plain_type, node.bases))}]
            found.update(describe(node.body, f"{prefix}{node.name}."))
        elif isinstance(node, ast.FunctionDef):
            forms = found.setdefault(f"{prefix}{node.name}", [])
            forms.append(signature(node, in_class=bool(prefix)))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[f"{prefix}{node.target.id}"] = [{}]
    hidden = re.compile(r"(^|\.)(__(?!init__|enter__|exit__|len__)\w+__|_[a-zA-Z]\w*(\..*)?)$")
    return {name: forms for name, forms in found.items() if not hidden.search(name)}


def differences(ours: dict[str, str], built: dict[str, str]) -> str:
    """Say how one signature differs, or return an empty text."""
    if len(ours) == len(built):
        pairs = zip(ours, built, strict=True)
        # The binding need not name a parameter that is never passed by name.
        same_names = all(mine == theirs or re.match(r"arg\d+$", theirs) for mine, theirs in pairs)
    else:
        same_names = False
    if not same_names:
        return f"takes ({', '.join(ours)}) in the stub, ({', '.join(built)}) in the module"
    for name, mine, theirs in zip(ours, ours.values(), built.values(), strict=True):
        if mine.replace("bytes", "str") != theirs.replace("bytes", "str") and theirs not in UNKNOWN:
            return f"{name} is {mine or 'untyped'} in the stub, {theirs} in the module"
    return ""


def main() -> int:
    """Print each difference and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pybind11_stubgen",
                MODULE,
                "-o",
                folder,
                "--numpy-array-use-type-var",
            ],
            check=True,
        )
        fresh = next(Path(folder).rglob("_native.pyi"))
        built = describe(ast.parse(fresh.read_text()).body)
    ours = describe(ast.parse(CHECKED_IN.read_text()).body)
    findings = [f"{name} is in the module only" for name in sorted(built.keys() - ours.keys())]
    findings += [f"{name} is in the stub only" for name in sorted(ours.keys() - built.keys())]
    for name in sorted(ours.keys() & built.keys()):
        if len(ours[name]) != len(built[name]):
            findings.append(
                f"{name} has {len(ours[name])} overloads in the stub, "
                f"{len(built[name])} in the module"
            )
            continue
        findings += [
            f"{name} {difference}"
            for mine, theirs in zip(ours[name], built[name], strict=True)
            if (difference := differences(mine, theirs))
        ]
    for finding in findings:
        print(f"{CHECKED_IN}: {finding}")
    print(f"{CHECKED_IN}: {len(built)} names compared, {len(findings)} differences")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
