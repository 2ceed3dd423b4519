"""UCX's own measurement, ``ucx_perftest``: what the library reaches without us."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pynixlkv._loader import find_ucx
from pynixlkv.cli.bench.cases import TRANSPORTS
from pynixlkv.errors import LibraryNotFoundError
from pynixlkv.testing.process import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pynixlkv.cli.bench.cases import Case

__all__ = ["HOW_TO_GET", "Perftest"]

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
        environment = {**os.environ, **transport.environment, **self._environment}
        with ExitStack() as stack:

            def start(*arguments: str) -> subprocess.Popen[str]:
                output = stack.enter_context(tempfile.TemporaryFile("w+"))
                process = subprocess.Popen(
                    [str(self.program), *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
                process.stdout = output
                stack.callback(process.wait)
                stack.callback(process.send_signal, signal.SIGKILL)
                return process

            deadline = time.monotonic() + _TIMEOUT_S
            if transport.one_process:
                where: tuple[str, ...] = ("-l",)
            else:
                server = start("-p", "0")  # the system chooses a port
                while (port := _listening_port(server.pid)) is None:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise RunError(f"ucx_perftest does not listen: {_output(server)}")
                    time.sleep(_LOOK_S)
                where = ("-p", str(port), "127.0.0.1")
            client = start(
                *where,
                *("-t", _TESTS[case.direction], "-s", str(case.piece_bytes)),
                *("-n", str(case.count), "-w", str(max(1, case.count // 10))),
                *("-O", str(case.window), "-z", "-f", "-v"),
                *(("-e",) if transport.error_handling else ()),
            )
            try:
                status = client.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RunError(f"ucx_perftest has not ended within {_TIMEOUT_S:g} s") from None
            output = _output(client)
            if status:
                raise RunError(f"ucx_perftest ended with {status}: {output}")
        column = _MEDIAN if case.is_latency else _MEAN
        return read_microseconds(output, column) * 1e-6 * case.count


def read_microseconds(output: str, column: str) -> float:
    """Return the time of a piece in a column of the CSV that ucx_perftest prints."""
    lines = [line.split(",") for line in output.splitlines()]
    for header, values in pairwise(lines):
        if column in header and len(values) == len(header):
            return float(values[header.index(column)])
    raise RunError(f"ucx_perftest has not printed {column}: {output}")


def _output(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    process.stdout.seek(0)
    return process.stdout.read().strip()


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
