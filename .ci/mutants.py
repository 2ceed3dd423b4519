"""Test the tests: change the code at random places, and look whether a test fails.

``MUTANTS`` sets how many changes are sampled, ``MUTANTS_SEED`` repeats a choice. Survivors that are
listed in `mutants-explained.txt`, as ``file: line -> changed line``, are not counted. The exit
status is 1 if fewer than 92 % of the others are found.
"""

from __future__ import annotations

import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cosmic_ray.mutating
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from parso.python.tree import Name

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is changed, and the tests that should notice. A transfer backend is needed by none of them.
# Those that find most come first.
CONNECTOR = [
    "connector_checks", "readers", "pauses", "tp_faults", "content", "lifecycle_*", "self_test",
    "turns", "connector_st*", "connector_shapes", "connector_checksums", "connector_model", "spans",
]  # fmt: skip
TESTS = {
    "geometry.py": ["geometry", "plan*", "topology", "connector_staging"],
    "topology.py": ["topology", "geometry", "plan*", "connector_shapes"],
    "plan.py": ["plan*", "geometry", "tp_faults", "content"],
    "connector": CONNECTOR,
    "handshake": ["handshake", "wire"],
}
REQUIRED = 0.92
DEADLINE_S = 900
ROOT = Path(__file__).parent.parent
EXPLAINED = ROOT / ".ci" / "mutants-explained.txt"


def _replaced(node: Any, text: str) -> Any:  # noqa: ANN401
    return Name(text, node.start_pos, prefix=node.get_first_leaf().prefix)


class DropCall:
    """Leaves out a call whose result is not used; not one that only logs."""

    def mutation_positions(self, node: Any) -> Iterator[object]:  # noqa: ANN401
        """Yield the call's position."""
        is_statement = node.parent is not None and node.parent.type == "simple_stmt"
        if (
            node.type == "atom_expr"
            and is_statement
            and not node.get_code(False).startswith("_log")
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, _: int) -> Any:  # noqa: ANN401
        """Replace the call."""
        return _replaced(node, "None")


class ForceBranch:
    """Makes an ``if`` always, or never, true."""

    def mutation_positions(self, node: Any) -> Iterator[object]:  # noqa: ANN401
        """Yield the condition's position, for each of both."""
        if node.type == "if_stmt":
            yield from [(node.children[1].start_pos, node.children[1].end_pos)] * 2

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ANN401
        """Replace the condition."""
        node.children[1] = _replaced(node.children[1], ("True", "False")[index])
        return node


COMPARISONS = (
    "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "Gt_LtE", "Is_IsNot",
    "IsNot_Is",
)  # fmt: skip
ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Mod_FloorDiv")
LOGIC = (
    "AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue",
    "ZeroIterationForLoop",
)  # fmt: skip
KINDS: dict[str, list[Any]] = {
    "comparison": [
        plugins.get_operator(f"core/ReplaceComparisonOperator_{n}") for n in COMPARISONS
    ],
    "arithmetic": [plugins.get_operator(f"core/ReplaceBinaryOperator_{n}") for n in ARITHMETIC],
    "logic": [plugins.get_operator(f"core/{name}") for name in LOGIC],
    "dropped call": [DropCall],
    "forced branch": [ForceBranch],
}


@dataclass(frozen=True)
class Mutant:
    """A change of one file."""

    path: Path
    tests: tuple[str, ...]
    code: str

    def __str__(self) -> str:
        old, new = self.path.read_text().splitlines(), self.code.splitlines()
        changes = [line[1:].strip() for line in difflib.ndiff(old, new) if line[0] in "+-"]
        return f"{self.path.relative_to(ROOT)}: {' -> '.join(changes)}"


def sample(rng: random.Random, count: int) -> list[Mutant]:
    """Choose changes, of each kind alike."""
    places: dict[str, list[Any]] = defaultdict(list)
    for part, tests in TESTS.items():
        top = ROOT / "pynixlkv" / part
        for path in [top] if top.is_file() else sorted(top.glob("*.py")):
            nodes = list(ast_nodes(get_ast(path.read_text())))
            for kind, operators in KINDS.items():
                for operator in (make() for make in operators):
                    total = sum(len(list(operator.mutation_positions(node))) for node in nodes)
                    places[kind] += [(path, tests, operator, i) for i in range(total)]
    mutants: dict[str, Mutant] = {}
    while len(mutants) < count:
        path, tests, operator, occurrence = rng.choice(places[rng.choice([*KINDS])])
        code = cosmic_ray.mutating.mutate_code(path.read_text(), operator, occurrence)
        if code is not None:
            mutant = Mutant(path, tuple(tests), code)
            if "TYPE_CHECKING" not in str(mutant):
                mutants[str(mutant)] = mutant
    return list(mutants.values())


def is_found(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails with the change, in a copy of the package."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "pynixlkv", folder / "pynixlkv")
    installed = Path(sys.prefix, "lib", f"python3.{sys.version_info[1]}", "site-packages")
    for module in (installed / "pynixlkv").glob("*.so"):
        (folder / "pynixlkv" / module.name).symlink_to(module)
    # Instead of the finder of the editable install, which takes precedence over any path.
    (folder / "_editable_skbc_pynixlkv.py").touch()
    (folder / mutant.path.relative_to(ROOT)).write_text(mutant.code)
    files = [str(file) for name in mutant.tests for file in ROOT.glob(f"tests/unit/test_{name}.py")]
    tests = subprocess.Popen(
        [f"{sys.prefix}/bin/pytest", "-xq", "-p", "no:cacheprovider", "--timeout=200", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return tests.wait(DEADLINE_S) != 0
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        return True


def main() -> int:
    """Run the tests with each change."""
    seed = int(os.environ.get("MUTANTS_SEED", str(time.time_ns() % 2**32)))
    folder = ROOT / "build" / "mutants"
    explained = EXPLAINED.read_text()
    found, alive = 0, []
    for mutant in sample(random.Random(seed), int(os.environ.get("MUTANTS", "60"))):
        if is_found(mutant, folder):
            found += 1
            print(f"found: {mutant}", flush=True)
        elif str(mutant) in explained:
            print(f"explained: {mutant}", flush=True)
        else:
            alive.append(mutant)
            print(f"alive: {mutant}", flush=True)
    share = found / max(1, found + len(alive))
    print(f"{found} of {found + len(alive)} mutants were found, {share:.0%}; MUTANTS_SEED={seed}")
    return int(share < REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
