"""UCX's own measurement, ``ucx_perftest``: what the library reaches without us."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pynixlkv._loader import find_ucx
from pynixlkv.cli.bench.cases import TRANSPORTS
from pynixlkv.errors import LibraryNotFoundError
from pynixlkv.testing.process import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pynixlkv.cli.bench.cases import Case

HOW_TO_GET = (
    "ucx_perftest was not found beside the UCX in use, nor in PATH; the distribution libucx-cu12 "
    '(pip install "pynixlkv[ucx]") has it, as does ucx-utils of Linux distributions'
)
_TIMEOUT_S = 60.0
_LOOK_S = 0.002
_TESTS = {"get": "ucp_get", "put": "ucp_put_bw"}
_MEDIAN, _MEAN = "50.0_percentile_lat", "overall_lat"
_LISTEN = "0A"  # state of a socket in /proc/net/tcp


class Perftest:
    """The program, for the UCX that pynixlkv uses if that has one."""

    def __init__(self, program: Path, environment: Mapping[str, str]) -> None:
        self.program = program
        self._environment = environment

    @classmethod
    def find(cls) -> Perftest | None:
        """Return the program, None if there is none."""
        try:
            library = Path(find_ucx().path)
        except LibraryNotFoundError:
            return None
        beside = library.parent.parent / "bin" / "ucx_perftest"
        if beside.is_file():
            return cls(beside, {"LD_LIBRARY_PATH": str(library.parent)})
        found = shutil.which("ucx_perftest")
        return cls(Path(found), {}) if found else None

    def run(self, case: Case) -> float:
        """Measure a repeated case and return the seconds for all pieces.

        Where each piece waits for the one before it, they are the median time of a piece by their
        number. Neither of its two processes outlives the call.
        """
        transport = TRANSPORTS[case.transport]
        options: dict[str, Any] = {
            "env": {**os.environ, **transport.environment, **self._environment},
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }
        arguments = [
            *("-t", _TESTS[case.direction], "-s", str(case.piece_bytes)),
            *("-n", str(case.count), "-w", str(max(1, case.count // 10))),
            *("-O", str(case.window), "-z", "-f", "-v"),
            *(("-e",) if transport.error_handling else ()),
        ]
        with contextlib.ExitStack() as stack:
            if transport.one_process:
                arguments.append("-l")
            else:
                # The system chooses a port.
                server = subprocess.Popen([str(self.program), "-p", "0"], **options)
                stack.callback(server.communicate)
                stack.callback(server.kill)
                arguments += ["-p", str(_wait_for_port(server)), "127.0.0.1"]
            try:
                done = subprocess.run(
                    [str(self.program), *arguments], check=False, timeout=_TIMEOUT_S, **options
                )
            except subprocess.TimeoutExpired:
                raise RunError(f"ucx_perftest has not ended within {_TIMEOUT_S:g} s") from None
        if done.returncode:
            raise RunError(f"ucx_perftest ended with {done.returncode}: {done.stdout.strip()}")
        column = _MEDIAN if case.is_latency else _MEAN
        return read_microseconds(done.stdout, column) * 1e-6 * case.count


def read_microseconds(output: str, column: str) -> float:
    """Return the time of a piece in a column of the CSV that ucx_perftest prints."""
    lines = [line.split(",") for line in output.splitlines()]
    for header, values in pairwise(lines):
        if column in header and len(values) == len(header):
            return float(values[header.index(column)])
    raise RunError(f"ucx_perftest has not printed {column}: {output}")


def _wait_for_port(server: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + _TIMEOUT_S
    while (port := _listening_port(server.pid)) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise RunError(f"ucx_perftest does not listen: {server.communicate()[0].strip()}")
        time.sleep(_LOOK_S)
    return port


def _listening_port(pid: int) -> int | None:
    """Look without connecting: ucx_perftest serves the first connection only."""
    process = Path("/proc") / str(pid)
    mine = set()
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            mine.add(str(link.readlink()))
    for name in ("tcp", "tcp6"):
        table = process / "net" / name
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in mine:
                return int(fields[1].rpartition(":")[2], 16)
    return None
