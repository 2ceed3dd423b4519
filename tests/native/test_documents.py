"""Every block of code in the pages runs as written, or the page says why it does not.

Blocks of a page run in order, in an empty directory: those of Python share their names; one whose
first line is ``# file.py`` becomes that file; those of the shell run in bash. A line
``*Not run by the tests: reason.*`` before a block is the only way out, and readers see it; so is
``*Run by `make …`.*``, for blocks that other tests run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "bench/*.md")
    for path in ROOT.glob(pattern)
    if "_generated" not in path.parts
)
_NOT_RUN = re.compile(r"\*(?:Not run by the tests: |(?=Run by `make ))(.+)\.\*")
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A block of code in a page; `reason` says why it does not run."""

    language: str
    code: str
    line: int
    reason: str | None


def all_blocks(page: Path) -> list[Block]:
    """Return everything between fences."""
    blocks: list[Block] = []
    before, language, start, lines = "", None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if language is None and line.startswith("```"):
            language, start, lines = line.removeprefix("```"), number + 1, []
        elif line == "```" and language is not None:
            reason = _NOT_RUN.fullmatch(before)
            code = "\n".join(lines) + "\n"
            blocks.append(Block(language, code, start, reason[1] if reason else None))
            before, language = "", None
        elif language is not None:
            lines.append(line)
        elif line:
            before = line
    assert language is None, f"{page}: the block of line {start} has no end"
    return blocks


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of Python and of the shell."""
    return [block for block in all_blocks(page) if block.language in ("python", "sh")]


def run_shell(code: str, where: Path) -> None:
    """Run a block of the shell with this environment's programs; a failure shows its output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=where,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.reason is None for block in blocks_of(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.reason is not None:
            continue
        if block.language == "sh":
            run_shell(block.code, tmp_path)
        elif file := _FILE.match(block.code):
            (tmp_path / file[1]).write_text(block.code, encoding="utf-8")
        else:
            # Padded, so that a failure names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)


def test_blocks_have_a_language_that_says_whether_they_run():
    """A block without a language, or with an unknown one, would not run."""
    for page in PAGES:
        for block in all_blocks(page):
            known = block.language in ("python", "sh", "text") or block.language.startswith("{")
            assert known, f"{page.relative_to(ROOT)}:{block.line}: {block.language!r}"


def test_the_example_of_the_readme_prints_what_it_moved(capsys):
    (example,) = (b for b in blocks_of(ROOT / "README.md") if b.language == "python")
    exec(compile(example.code, "README.md", "exec"), {})
    result, notifications = capsys.readouterr().out.splitlines()
    assert f"bytes={2 * 3 * 8 * 16 * 128 * 2}" in result
    assert "decode-0" in notifications
    assert "b'req-7'" in notifications


def test_the_geometry_page_prints_its_runs(capsys):
    page = ROOT / "docs" / "concepts" / "geometry.md"
    blocks = [block.code for block in blocks_of(page)]
    exec("\n".join(blocks), {})
    assert "runs of 256 to 256 bytes" in capsys.readouterr().out
