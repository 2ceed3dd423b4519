"""Say at the end of a failed run what failed: a test run that is aborted leaves only threads.

Reads the output of ``make test``, and the core that the test runner left in the current folder, if
it was killed by a signal and there is a gdb.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

MAX_LINES = 12
MAX_WIDTH = 160
MAX_FRAMES = 16
INTERESTING = re.compile(r"^(FAILED|ERROR|E  |Fatal Python error)|error:|\*\*\*|^=+ .* in .*s .*=")
TEST_FILE = re.compile(r"^(?:tests|bench)/\S+\.py ")
PYTHONS_OWN = ("_Py", "Py", "cfunction", "method_", "pybind11::")
FRAME = re.compile(r"^#\d+ +(?:0x[0-9a-f]+ in )?(?P<function>[^(]+)")


def said(log: Path) -> list[str]:
    """Return the lines of the output that name failures, and the last file that was begun."""
    lines = log.read_text(errors="replace").splitlines()
    found = [line for line in lines if INTERESTING.search(line)][-MAX_LINES:]
    begun = [line for line in lines if TEST_FILE.match(line)]
    return [f"last: {line}" for line in begun[-1:]] + found


def stack(core: Path) -> list[str]:
    """Return the native functions, innermost first, that the core's thread was in."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return [f"{core.name}: no gdb here to read it with"]
    read = subprocess.run(
        [gdb, "-batch", "-ex", "print (char*)__abort_msg->msg", "-ex", "bt", sys.executable, core],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = read.stdout.splitlines()
    frames = [match["function"].strip() for line in lines if (match := FRAME.match(line))]
    told = [line for line in lines if line.startswith(("Core was", "Program terminated", "$1"))]
    native = [name[:50] for name in frames if not name.startswith(PYTHONS_OWN)]
    return [*told, " < ".join(native[:MAX_FRAMES])]


def main(log: Path) -> None:
    """Print what is known of the failure."""
    print("--- what failed")
    found = said(log)
    for line in found:
        print(line[:MAX_WIDTH])
    if any(line.startswith("Fatal") for line in found):  # a test may leave a core on purpose
        for core in filter(Path.is_file, sorted(Path().glob("core*"))):
            print(*stack(core), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
