"""Fail if a class name is defined in three places of the product, C++ and Python counted apart."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

MOST = 2
CPP_CLASS = re.compile(
    r"^[ \t]*(?:class|struct)\s+(\w+)(?:\s+final)?\s*(?::[^:;][^;{]*)?\{", re.MULTILINE
)


def classes(path: Path) -> list[str]:
    """Name the classes that a file defines, nested ones included."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return CPP_CLASS.findall(text)


def main() -> int:
    """Print the names that are defined too often and return the exit status."""
    status = 0
    for pattern in ("pynixlkv/**/*.py", "csrc/**/*.?pp"):
        places = defaultdict(list)
        for path in sorted(Path().glob(pattern)):
            for name in classes(path):
                places[name].append(str(path))
        for name, paths in sorted(places.items()):
            if len(paths) > MOST:
                status = 1
                print(f"{name} is defined {len(paths)} times: {', '.join(paths)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
