"""Run the conformance suites over the supported versions and write the table of results.

    python .ci/matrix.py

Installs the wheels of dist/ into an environment for each row. The rows cover every version, the
oldest ones together and the newest ones together, but not all combinations. The table goes into
docs/reference/support.md and README.md.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build_wheels import find_interpreter, pip

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "matrix"
NIXL, UCX = "nixl-cu12", "libucx-cu12"
# A package without a version is the newest for this Python.
ROWS = (
    ("3.10", "numpy==1.26.*", f"{NIXL}==1.0.1", f"{UCX}==1.18.*"),
    ("3.10", "numpy==1.26.*", NIXL, f"{UCX}==1.20.*"),
    ("3.10", "numpy", f"{NIXL}==1.4.1", UCX),
    ("3.13", "numpy", f"{NIXL}==1.0.1", f"{UCX}==1.20.*"),
    ("3.13", "numpy", f"{NIXL}==1.3.2", f"{UCX}==1.18.*"),
    ("3.13", "numpy", NIXL, UCX),
)
SUITES: dict[str, tuple[str, ...]] = {
    "NixlAgent": ("tests/native/test_conformance.py::TestNixlByDefault",),
    "UcxAgent": (
        "tests/native/test_conformance.py::TestUcxByDefault",
        # Depends on what a version's requests look like.
        "tests/integration/test_ucx_kills.py::test_an_owner_outlives_readers_that_it_owes_bytes",
    ),
}
TOOLS = (
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-benchmark>=5",
    "hypothesis>=6.100",
    "psutil>=5.9",
)


@dataclass(frozen=True)
class Result:
    """How a suite ended."""

    passed: int
    other: int

    def __str__(self) -> str:
        if self.other:
            return f"{self.other} of {self.passed + self.other} failed"
        return f"passed ({self.passed} tests)" if self.passed else "failed: no test ran"


def run(
    *command: str | Path, check: bool = True, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> str:
    """Run a command, with `env` added to the environment, and return what it printed."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True, check=False
    )
    if check and done.returncode != 0:
        words = " ".join(map(str, command))
        raise SystemExit(f"error: status {done.returncode} of: {words}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def unpack(requirement: str, folder: Path, *others: str) -> str:
    """Unpack the Python of a release, and files like `others`; return its version."""
    wheels = folder / "wheels"
    pip("download", "--no-deps", "--only-binary=:all:", "-d", wheels, requirement)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for pattern in ("*.py", "*/METADATA", *others):
            archive.extractall(folder, fnmatch.filter(archive.namelist(), pattern))
    shutil.rmtree(wheels)
    return wheel.name.split("-")[1]


def make_environment(folder: Path, row: tuple[str, str, str, str]) -> Path:
    """Make the environment of a row and return its interpreter."""
    python, numpy, nixl, ucx = row
    found = sorted((ROOT / "dist").glob(f"*-cp{python.replace('.', '')}-*.whl"))
    if not found:
        raise SystemExit(f"error: no wheel for Python {python} in dist/; run make wheel")
    run(find_interpreter(python), "-m", "venv", "--without-pip", folder)
    interpreter = folder / "bin" / "python"
    pip("--python", interpreter, "install", found[0], numpy, ucx, *TOOLS)
    pip(
        "--python", interpreter, "install", "--no-deps", nixl
    )  # its dependency on torch is not needed
    return interpreter


def versions(interpreter: Path) -> list[str]:
    """Return the installed versions; fails if the source tree is imported instead of the wheel."""
    code = (
        "import platform, importlib.metadata as m, pynixlkv; "
        "assert 'site-packages' in pynixlkv.__file__, pynixlkv.__file__; "
        f"print(platform.python_version(), *(m.version(n) for n in ('numpy', '{NIXL}', '{UCX}')))"
    )
    return run(interpreter, "-I", "-c", code).split()


def read_report(report: Path) -> dict[str, str]:
    """Return how each test ended: ``passed``, or the report's word for another end."""
    ends = {}
    for case in ET.parse(report).iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        ends[f"{case.get('classname')}::{case.get('name')}"] = bad[0] if bad else "passed"
    return ends


def run_suite(
    interpreter: Path, suite: tuple[str, ...], report: Path, env: dict[str, str] | None = None
) -> Result:
    """Run some tests and count."""
    output = run(
        interpreter.with_name("pytest"),
        *suite,
        *(f"--junitxml={report}", "-q"),
        *("-o", "addopts=--benchmark-disable --import-mode=importlib"),
        check=False,
        env=env,
    )
    ends = list(read_report(report).values()) if report.is_file() else []
    passed = ends.count("passed")
    if not ends or passed < len(ends):
        print(output)
    return Result(passed, len(ends) - passed)


def fill(page: Path, mark: str, lines: list[str]) -> None:
    """Write lines between a mark and the next end mark of a page."""
    text = re.sub(
        rf"(<!-- {mark} -->\n).*?(<!-- end -->)",
        lambda match: match[1] + "\n".join(lines) + "\n" + match[2],
        page.read_text(encoding="utf-8"),
        count=1,
        flags=re.DOTALL,
    )
    page.write_text(text, encoding="utf-8")


def main() -> int:
    """Run all rows, write the table, and return the exit status."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    lines = [f"| Python | numpy | NIXL | UCX | {' | '.join(SUITES)} |", "| --- " * 6 + "|"]
    failed = False
    for number, row in enumerate(ROWS):
        folder = WORK / f"row{number}"
        interpreter = make_environment(folder, row)
        results = [
            run_suite(interpreter, suite, WORK / f"row{number}-{name}.xml")
            for name, suite in SUITES.items()
        ]
        failed |= any(result.other or not result.passed for result in results)
        lines.append(f"| {' | '.join([*versions(interpreter), *map(str, results)])} |")
        print(lines[-1], flush=True)
        shutil.rmtree(folder)
    for page in (ROOT / "docs" / "reference" / "support.md", ROOT / "README.md"):
        fill(page, "support", lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
