"""The processes of a command as their parent sees them: start, talk, end, whatever happens."""

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
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import msgspec

from pynixlkv.cli.messages import Failed, Progress, RunError, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["ProcessGroup"]

M = TypeVar("M", bound=msgspec.Struct)

_GRACE_S = 5.0
_SHOWN_LINES = 15


class Spec(Protocol):
    """The first message to a process."""

    @property
    def name(self) -> str:
        """Name of the process."""
        ...

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that it gets besides its parent's."""
        ...


class _Process:
    """One process, the socket to it, and the file that takes what it writes."""

    def __init__(self, module: str, spec: Spec, folder: Path) -> None:
        self.name = spec.name
        self._output = folder / spec.name
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        # A session of its own, so that an interrupt from the keyboard reaches the parent alone.
        with theirs, self._output.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **spec.environment},
            )
        self.send(cast("msgspec.Struct", spec))

    def send(self, message: msgspec.Struct) -> None:
        # A process that is gone is reported where its reply is missed.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(encode(message))

    def output(self) -> str:
        """Return what it has written to its standard output and error."""
        return self._output.read_text(errors="replace")

    def fail(self, reason: str) -> RunError:
        """Make the error for a process that failed, with the end of what it wrote."""
        lines = self.output().splitlines()[-_SHOWN_LINES:]
        return RunError("\n    ".join([f"{self.name} {reason}", *lines]))


class ProcessGroup:
    """Processes that live no longer than the ``with`` block they are used in.

    Parameters
    ----------
    module : str
        What they run; gets the number of its socket as argument.
    decode : callable
        Makes a message of bytes.
    specs : sequence of Spec
        First message to each.
    timeout_s : float
        Seconds from now until `gather` gives up, whatever is being waited for.
    on_progress : callable
        Called with a label, and how much of how much is done.
    """

    def __init__(
        self,
        module: str,
        decode: Callable[[bytes], msgspec.Struct],
        specs: Sequence[Spec],
        timeout_s: float,
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self._module = module
        self._decode = decode
        self._specs = specs
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_progress = on_progress
        self._processes: dict[str, _Process] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="pynixlkv-")

    def __enter__(self) -> Self:
        try:
            for spec in self._specs:
                self._processes[spec.name] = _Process(self._module, spec, Path(self._folder.name))
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
        for process in self._processes.values():
            process.popen.kill()
        for process in self._processes.values():
            process.popen.wait()
            process.connection.close()
        self._folder.cleanup()

    def ask(
        self, label: str, commands: Mapping[str, msgspec.Struct], reply: type[M]
    ) -> dict[str, M]:
        """Send a command to each named process and wait for all the replies.

        Parameters
        ----------
        label : str
            What is being done, for people.
        commands : mapping of str to msgspec.Struct
            Command for each.
        reply : type
            Class of the replies.

        Returns
        -------
        dict of str to reply
            Reply of each.

        Raises
        ------
        RunError
            If one fails, ends, says something else, or the deadline passes.
        """
        self.send(commands)
        return self.gather(label, dict.fromkeys(commands, reply))

    def send(self, commands: Mapping[str, msgspec.Struct]) -> None:
        """Send a command to each named process, whose reply is to be gathered later.

        Parameters
        ----------
        commands : mapping of str to msgspec.Struct
            Command for each.
        """
        for name, command in commands.items():
            self._processes[name].send(command)

    def gather(self, label: str, expected: Mapping[str, type[M]]) -> dict[str, M]:
        """Wait for one reply from each named process.

        Parameters
        ----------
        label : str
            What is being done, for people.
        expected : mapping of str to type
            Class of each reply.

        Returns
        -------
        dict of str to reply
            Reply of each.

        Raises
        ------
        RunError
            As for `ask`.
        """
        replies: dict[str, M] = {}
        progress: dict[str, tuple[int, int]] = {}
        waiting = {self._processes[name].connection: name for name in expected}
        self._on_progress(label, 0, 1)
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                late = ", ".join(sorted(waiting.values()))
                raise RunError(f"{label}: no answer from {late} within {self._timeout_s:g} s")
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
                    del waiting[self._processes[name].connection]
                else:
                    raise RunError(f"{name} answered {message!r} to {label!r}")
        self._on_progress(label, 1, 1)
        return replies

    def _receive(self, name: str) -> msgspec.Struct:
        process = self._processes[name]
        try:
            message = self._decode(process.connection.recv_bytes())
        except (EOFError, ConnectionError):
            try:
                status = process.popen.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                raise process.fail("closed its socket and did not exit") from None
            ended = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            raise process.fail(f"{ended} in the middle") from None
        if isinstance(message, Failed):
            raise process.fail(f"failed: {message.reason}\n{message.traceback}")
        return message

    def join(self) -> dict[str, str]:
        """Wait for every process to exit by itself.

        Returns
        -------
        dict of str to str
            What each has written to its standard output and error.

        Raises
        ------
        RunError
            If one does not, or exits with a failure.
        """
        for process in self._processes.values():
            try:
                status = process.popen.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise process.fail("did not exit after it was told to") from None
            if status:
                raise process.fail(f"exited with {status} at the end")
        return {name: process.output() for name, process in self._processes.items()}
