"""Child processes that run functions on request.

A child is a new interpreter, not a fork, so it is safe beside native threads. It reports a failure
with its traceback, dumps its stacks and exits when a call outlasts its deadline, and exits when its
parent closes the connection or dies. Both ends are one program and their socket has no name, so
values travel as `multiprocessing.connection` sends them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pynixlkv.errors import PynixlkvError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

    from typing_extensions import Self

# A top-level function or class, or the name of a method of the object that the child keeps.
Function = str | Callable[..., Any]

DEADLINE_S = 300.0
_GRACE_S = 30.0
_SHOWN_LINES = 15
_MAIN = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from pynixlkv.testing import process; process.serve(int(sys.argv[1]))"
)


class RunError(PynixlkvError):
    """A process failed, ended early, or missed a deadline; or a measurement went wrong.

    ``__cause__`` is the child's exception if that is a `PynixlkvError`.
    """


class Channel:
    """One end of the connection between a process and its child."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name  # of the other end
        self.connection = connection

    def send(self, value: object) -> None:
        """Send a value to the function that the other end is running."""
        self.connection.send(("value", value))

    def receive(self, timeout: float = DEADLINE_S) -> Any:  # noqa: ANN401
        """Return the next value of the other end, or the result of its function."""
        return self.take(timeout)[1]

    def take(self, timeout: float) -> tuple[str, Any]:
        """Return the next message and its kind, ``"value"`` or ``"result"``."""
        if not self.connection.poll(timeout):
            raise RunError(f"no answer from {self.name} within {timeout:g} s")
        kind, value = self.connection.recv()
        return kind, value


class ChildProcess(Channel):
    """A process that runs functions, and methods of one object that it keeps.

    `output` is the file that takes its standard output and error, `prefix` the beginning of its
    command; other options are those of `subprocess.Popen`. As a context manager the process is
    ended cleanly, or killed if the block raises.
    """

    def __init__(
        self,
        name: str = "the child process",
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        output: Path | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self._output = output
        ours, theirs = socket.socketpair()
        super().__init__(Connection(ours.detach()), name)
        with theirs, contextlib.ExitStack() as stack:
            if output is not None:
                options["stdout"] = options["stderr"] = stack.enter_context(output.open("wb"))
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-c", _MAIN, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # an interrupt from the keyboard reaches the parent alone
                **options,
            )

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process.poll() is None

    def post(
        self,
        function: Function,
        *args: object,
        timeout: float = DEADLINE_S,
        keep: bool = False,
        **kwargs: object,
    ) -> None:
        """Begin a call, whose result is to be received; with `keep` the child keeps the result."""
        name = function if isinstance(function, str) else name_of(function)
        # A process that is gone is reported where its reply is missed.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((name, args, kwargs, timeout, keep))

    def call(
        self,
        function: Function,
        *args: object,
        timeout: float = DEADLINE_S,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call as `post` does and return the result."""
        self.post(function, *args, timeout=timeout, **options)
        return self.receive(timeout)

    def take(self, timeout: float) -> tuple[str, Any]:
        """Return the next message and its kind; raise the failure of the child."""
        try:
            kind, value = super().take(timeout)
        except (EOFError, ConnectionError):
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(_GRACE_S)
            if status is None:
                raise self.failed("closed its socket and did not exit") from None
            how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            raise self.failed(f"{how} in the middle") from None
        if kind == "error":
            error, text = value
            raise self.failed(f"failed: {text}") from error
        return kind, value

    def failed(self, reason: str) -> RunError:
        """Make the error for a failure, with the end of the child's output."""
        return RunError("\n    ".join([f"{self.name} {reason}", *self.output()[-_SHOWN_LINES:]]))

    def output(self) -> list[str]:
        """Return the lines in the output file."""
        text = "" if self._output is None else self._output.read_text(errors="replace")
        return text.splitlines()

    def stop(self) -> None:
        """Stop the process (SIGSTOP), and wait until all of its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        # Waits for an end, too: a process that ends meanwhile is never reported as stopped.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the process after `stop` (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait until it is gone."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.connection.close()

    def end(self, timeout: float = DEADLINE_S) -> int | None:
        """Let the process close its object and exit; return its status, None if it was killed."""
        self.connection.close()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.end() if exc_type is None else self.kill()


class ProcessGroup:
    """Child processes that live no longer than a ``with`` block, under one deadline.

    `environments` has what each adds to the environment, by name. `on_progress` is called with a
    label, and how much of how much is done, as children report it: ``parent().send((1, 10))``.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, str]],
        timeout_s: float,
        on_progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self._environments = environments
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_progress = on_progress
        self._processes: dict[str, ChildProcess] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="pynixlkv-")

    def __enter__(self) -> Self:
        try:
            for name, env in self._environments.items():
                output = Path(self._folder.name) / name
                self._processes[name] = ChildProcess(name, env=env, output=output)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.process.kill()
        for process in self._processes.values():
            process.kill()
        self._folder.cleanup()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def post(self, names: Iterable[str], function: Function, *args: object, **options: Any) -> None:  # noqa: ANN401
        """Begin the same call in some children."""
        for name in names:
            self._processes[name].post(function, *args, timeout=self._left(), **options)

    def call(
        self,
        label: str,
        names: Iterable[str],
        function: Function,
        *args: object,
        **options: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Make the same call in some children and return the results by name."""
        names = list(names)
        self.post(names, function, *args, **options)
        return self.gather(label, names)

    def gather(self, label: str, names: Iterable[str]) -> dict[str, Any]:
        """Return the results of the calls that some children are at."""
        waiting: dict[Any, str] = {self._processes[name].connection: name for name in names}
        results: dict[str, Any] = {}
        progress: dict[str, int] = {}
        num_processes = len(waiting)
        self._on_progress(label, 0, 1)
        while waiting:
            ready = wait(list(waiting), self._left())
            if not ready:
                late = ", ".join(sorted(waiting.values()))
                raise RunError(f"{label}: no answer from {late} within {self._timeout_s:g} s")
            for connection in ready:
                name = waiting[connection]
                kind, value = self._processes[name].take(_GRACE_S)
                if kind == "result":
                    results[name] = value
                    del waiting[connection]
                else:
                    progress[name], total = value
                    self._on_progress(label, sum(progress.values()), total * num_processes)
        self._on_progress(label, 1, 1)
        return results

    def join(self) -> dict[str, list[str]]:
        """Let every child end by itself; return the lines that each has written."""
        for process in self._processes.values():
            process.connection.close()
        for process in self._processes.values():
            status = process.end(self._left())
            if status is None:
                raise process.failed("did not exit after it was told to")
            if status:
                raise process.failed(f"exited with {status} at the end")
        return {name: process.output() for name, process in self._processes.items()}


_parent: Channel | None = None


def parent() -> Channel:
    """Return the connection of this child process to its parent."""
    assert _parent is not None, "this process was not started as a ChildProcess"
    return _parent


def serve(fd: int) -> None:
    """Run what the process at the other end of a socket asks for, until it hangs up.

    Between calls the kept object may take part in something by a method `idle`, which returns the
    seconds until it is to be called again, None for not before the next call.
    """
    global _parent
    faulthandler.enable()
    connection = Connection(fd)
    _parent = Channel(connection, "the parent process")
    kept: Any = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            idle = getattr(kept, "idle", None)
            try:
                while not connection.poll(None if idle is None else idle()):
                    pass
            except Exception as error:
                connection.send(_failure(error))
                raise
            message = connection.recv()
            if message[0] == "value":  # for a function that has ended
                continue
            name, args, kwargs, timeout, keep = message
            faulthandler.dump_traceback_later(timeout + _GRACE_S, exit=True)
            try:
                result = find(name, kept)(*args, **kwargs)
                if keep:
                    kept, result = result, None
                reply: tuple[str, Any] = ("result", result)
            except SystemExit:
                raise
            except BaseException as error:
                reply = _failure(error)
            faulthandler.cancel_dump_traceback_later()
            connection.send(reply)
    if hasattr(kept, "close"):
        kept.close()


def _failure(error: BaseException) -> tuple[str, Any]:
    text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    # Other exceptions may be of classes that the parent cannot import or make.
    return "error", (error if isinstance(error, PynixlkvError) else None, text)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a top-level function or class for `find` in another process."""
    file = getattr(sys.modules[function.__module__], "__file__", "")
    return f"{function.__module__}:{function.__qualname__}:{file}"


def find(name: str, kept: object = None) -> Any:  # noqa: ANN401
    """Return the function of a name, which without a module is a method of the kept object."""
    if ":" not in name:
        return getattr(kept, name)
    module, function, file = name.split(":", 2)
    found: Any = _import(module, file)
    for part in function.split("."):
        found = getattr(found, part)
    return found


def _import(name: str, file: str) -> ModuleType:
    """Import a module by name, or from its file: test files are in no package."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
