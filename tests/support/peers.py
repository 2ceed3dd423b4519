"""A function of a test file in a process of its own, which talks to the test."""

from __future__ import annotations

import contextlib

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
