"""A function of a test file in a process of its own, which talks to the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import psutil

from pynixlkv.testing.process import DEADLINE_S, Channel, ChildProcess, find, name_of, parent


class Peer(ChildProcess):
    """A process that runs `function(channel, *args)` and exits."""

    def __init__(self, function, *args, deadline_s=DEADLINE_S, **options):
        super().__init__(f"the peer {function.__name__}", **options)
        self.post(_run, name_of(function), *args, timeout=deadline_s)

    def finish(self, timeout=DEADLINE_S):
        """Wait for the end of the function and return what it returned."""
        value = self.receive(timeout)
        assert self.process.wait(timeout) == 0
        return value

    def last_words(self):
        """Kill it, and return what it has sent and nobody has received; raises its failure."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        said = []
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                said.append(Channel.take(self, 0.0))
        self.kill()
        for kind, value in said:
            assert kind != "error", value
        return [value for _, value in said]


def _run(name, *args):
    parent().connection.send(("result", find(name)(parent(), *args)))
    raise SystemExit


def interrupt(number, is_ready, **command):
    """Signal a program once its child processes are ready; they end with it. Returns its status."""
    program = subprocess.Popen(
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell's background job starts with interrupts ignored, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **command,
    )
    deadline = time.monotonic() + DEADLINE_S
    children = []
    while not is_ready(children):
        assert time.monotonic() < deadline
        assert program.poll() is None
        psutil.wait_procs(children, timeout=0.02)
        children = psutil.Process(program.pid).children(recursive=True)
    os.kill(program.pid, number)
    program.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    return program.returncode
