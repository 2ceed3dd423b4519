"""Print the release checklist and fail if anything on it is not done."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from check_wheel import ROOT, package_version
from check_wheel import main as check_wheels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DIST = ROOT / "dist"
PYTHONS = ("310", "311", "312", "313")


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def tree() -> Iterator[str]:
    """Yield files that are not committed."""
    yield from (f"not committed: {line}" for line in git("status", "--porcelain"))


def version() -> Iterator[str]:
    """Yield problems of the version and the changelog."""
    number = package_version()
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", number):
        yield f"{number!r} is not the version of a release"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = next(iter(re.findall(r"^## (.*)$", changelog, re.MULTILINE)), "nothing")
    if not re.fullmatch(rf"\[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d", first):
        yield f"CHANGELOG.md begins with {first!r}; expected '[{number}] - <date>'"


def tag() -> Iterator[str]:
    """Yield a missing tag."""
    if f"v{package_version()}" not in git("tag", "--points-at", "HEAD"):
        yield f"no tag v{package_version()} on this commit"


def newer_than_sources(path: Path) -> bool:
    """Tell whether a file was made after the last commit."""
    return path.stat().st_mtime >= int(git("log", "-1", "--format=%ct")[0])


def wheels() -> Iterator[str]:
    """Yield missing, old or wrong files of dist/."""
    files = sorted(DIST.glob("*"))
    for python in PYTHONS:
        if not any(f"-cp{python}-" in file.name for file in files):
            yield f"no wheel for cp{python} in dist/: make wheel"
    if not any(file.name.endswith(".tar.gz") for file in files):
        yield "no sdist in dist/: make wheel"
    yield from (f"{f.name} is older than the commit" for f in files if not newer_than_sources(f))
    if files and check_wheels(*map(str, files)) != 0:
        yield "the files in dist/ are not right, see above"


def documentation() -> Iterator[str]:
    """Yield problems of the site and the table of tested versions."""
    index = ROOT / "build" / "docs" / "html" / "index.html"
    if not index.is_file() or not newer_than_sources(index):
        yield "the site is not built, or older than the commit: make docs"
    support = (ROOT / "docs" / "reference" / "support.md").read_text(encoding="utf-8")
    if "| passed" not in support or "failed" in support:
        yield "docs/reference/support.md has no table, or failures in it: make matrix"


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "nothing is left uncommitted": tree,
    "the version is a release's, and the changelog begins with it and a date": version,
    "this commit has the version's tag": tag,
    "an sdist and a wheel for each Python are there, newer than the commit, and right": wheels,
    "the site is built from this commit, and the table of versions is filled in": documentation,
}


def main() -> int:
    """Print the checklist and return the exit status."""
    problems = 0
    for goal, check in CHECKS.items():
        found = list(check())
        problems += len(found)
        print(f"[{' ' if found else 'x'}] {goal}")
        for problem in found:
            print(f"      {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
