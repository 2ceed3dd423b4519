"""The rank processes as their parent sees them: start, talk, end, whatever happens."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pynixlkv.cli.messages import DemoError, Failed, Progress, RankSpec, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["RankGroup"]

M = TypeVar("M", bound=msgspec.Struct)

_GRACE_S = 5.0
_SHOWN_LINES = 15


class _RankProcess:
    """One rank process, the socket to it, and the file that takes what it writes."""

    def __init__(self, spec: RankSpec, folder: Path) -> None:
        self.name = spec.name
        self._output = folder / spec.name
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        # A session of its own, so that an interrupt from the keyboard reaches the parent alone.
        with theirs, self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pynixlkv.cli.rank", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # UCX says at its end which transports it used.
                env={"UCX_PROTO_INFO": "used", **os.environ},
            )
        self.send(spec)

    def send(self, message: msgspec.Struct) -> None:
        # A process that is gone is reported where its reply is missed.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(encode(message))

    def output(self) -> str:
        """Return what the process has written to its standard output and error."""
        return self._output.read_text(errors="replace")

    def fail(self, reason: str) -> DemoError:
        """Make the error for a process that failed, with the end of what it wrote."""
        lines = self.output().splitlines()[-_SHOWN_LINES:]
        return DemoError("\n    ".join([f"{self.name} {reason}", *lines]))


class RankGroup:
    """Rank processes that live no longer than the ``with`` block they are used in.

    Parameters
    ----------
    specs : sequence of RankSpec
        The ranks.
    timeout_s : float
        Seconds from now until `gather` gives up, whatever is being waited for.
    on_progress : callable
        Called with a label, and how much of how much is done.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        timeout_s: float,
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self._specs = specs
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_progress = on_progress
        self._ranks: dict[str, _RankProcess] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="pynixlkv-demo-")

    def __enter__(self) -> Self:
        try:
            for spec in self._specs:
                self._ranks[spec.name] = _RankProcess(spec, Path(self._folder.name))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for rank in self._ranks.values():
            rank.process.kill()
        for rank in self._ranks.values():
            rank.process.wait()
            rank.connection.close()
        self._folder.cleanup()

    def ask(
        self, label: str, commands: Mapping[str, msgspec.Struct], reply: type[M]
    ) -> dict[str, M]:
        """Send a command to each named rank and wait for all the replies.

        Parameters
        ----------
        label : str
            What is being done, for people.
        commands : mapping of str to msgspec.Struct
            Command for each rank.
        reply : type
            Class of the replies.

        Returns
        -------
        dict of str to reply
            Reply of each rank.

        Raises
        ------
        DemoError
            If a rank fails, ends, says something else, or the deadline passes.
        """
        self.send(commands)
        return self.gather(label, dict.fromkeys(commands, reply))

    def send(self, commands: Mapping[str, msgspec.Struct]) -> None:
        """Send a command to each named rank, whose reply is to be gathered later.

        Parameters
        ----------
        commands : mapping of str to msgspec.Struct
            Command for each rank.
        """
        for name, command in commands.items():
            self._ranks[name].send(command)

    def gather(self, label: str, expected: Mapping[str, type[M]]) -> dict[str, M]:
        """Wait for one reply from each named rank.

        Parameters
        ----------
        label : str
            What is being done, for people.
        expected : mapping of str to type
            Class of each rank's reply.

        Returns
        -------
        dict of str to reply
            Reply of each rank.

        Raises
        ------
        DemoError
            As for `ask`.
        """
        replies: dict[str, M] = {}
        progress: dict[str, tuple[int, int]] = {}
        waiting = {self._ranks[name].connection: name for name in expected}
        self._on_progress(label, 0, 1)
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                late = ", ".join(sorted(waiting.values()))
                raise DemoError(f"{label}: no answer from {late} within {self._timeout_s:g} s")
            for connection in ready:
                name = next(name for c, name in waiting.items() if c is connection)
                message = self._receive(name)
                if isinstance(message, Progress):
                    progress[name] = (message.done, message.total)
                    done = sum(done for done, _ in progress.values())
                    total = progress[name][1] * len(expected)
                    self._on_progress(label, done, total)
                elif isinstance(message, expected[name]):
                    replies[name] = message
                    del waiting[self._ranks[name].connection]
                else:
                    raise DemoError(f"{name} answered {message!r} to {label!r}")
        self._on_progress(label, 1, 1)
        return replies

    def _receive(self, name: str) -> msgspec.Struct:
        rank = self._ranks[name]
        try:
            message = decode(rank.connection.recv_bytes())
        except (EOFError, ConnectionError):
            try:
                status = rank.process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                raise rank.fail("closed its socket and did not exit") from None
            ended = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            raise rank.fail(f"{ended} in the middle") from None
        if isinstance(message, Failed):
            raise rank.fail(f"failed: {message.reason}\n{message.traceback}")
        return message

    def join(self) -> dict[str, str]:
        """Wait for every rank to exit by itself.

        Returns
        -------
        dict of str to str
            What each has written to its standard output and error.

        Raises
        ------
        DemoError
            If one does not, or exits with a failure.
        """
        for rank in self._ranks.values():
            try:
                status = rank.process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise rank.fail("did not exit after it was told to") from None
            if status:
                raise rank.fail(f"exited with {status} at the end")
        return {name: rank.output() for name, rank in self._ranks.items()}
