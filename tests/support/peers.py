"""Run a function of a test file in another process, with deadlines on everything.

`Peer` starts the process; the function gets a `Channel` to talk to the test. A failure in the
child is raised in the test with the child's traceback. When the deadline passes, the child dumps
its stacks and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

DEADLINE_S = 60.0


class PeerFailed(AssertionError):
    """The other process failed; the message holds its traceback."""


class Channel:
    """One end of the connection between a test and its peer."""

    def __init__(self, connection):
        self._connection = connection

    def send(self, value):
        self._connection.send(("value", value))

    def receive(self, timeout=DEADLINE_S):
        if not self._connection.poll(timeout):
            raise TimeoutError(f"nothing arrived within {timeout} s")
        kind, value = self._connection.recv()
        if kind == "failure":
            raise PeerFailed(value)
        return value

    def has_data(self, timeout=0):
        return self._connection.poll(timeout)


class Peer(Channel):
    """A process that runs `function(channel, *args)`, a top-level function of a test file.

    `prefix` is the beginning of its command; other options are those of `subprocess.Popen`.
    """

    def __init__(self, function, *args, env=None, prefix=(), deadline_s=DEADLINE_S, **options):
        ours, theirs = multiprocessing.connection.Pipe()
        super().__init__(ours)
        source = Path(sys.modules[function.__module__].__file__)
        command = [*prefix, sys.executable, __file__, str(source), function.__name__]
        command += [str(theirs.fileno()), str(deadline_s)]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, **(env or {})}, **options
        )
        theirs.close()
        self._connection.send(args)

    def finish(self, timeout=DEADLINE_S):
        """Wait for the end of the function and return what it returned."""
        value = self.receive(timeout)
        assert self.process.wait(timeout) == 0
        return value

    def stop(self):
        """Stop it, and wait until all of its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def last_words(self):
        """Kill it, and return what it has sent and nobody has received; raises its failure."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        said = []
        with contextlib.suppress(EOFError, ConnectionError):
            while self.has_data():
                said.append(self.receive())
        self.kill()
        return said

    def kill(self):
        """Kill it and wait until it is gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self._connection.close()


def main(source, function, fd, deadline_s):
    faulthandler.dump_traceback_later(float(deadline_s), exit=True)
    connection = multiprocessing.connection.Connection(int(fd))
    try:
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, function)(Channel(connection), *connection.recv())
    except BaseException:
        connection.send(("failure", traceback.format_exc()))
        raise SystemExit(1) from None
    connection.send(("value", result))


if __name__ == "__main__":
    main(*sys.argv[1:])
