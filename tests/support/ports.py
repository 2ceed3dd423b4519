"""Ports for services that must be told one."""

import random
import socket

# Below those that systems hand out by themselves (Linux from 32768 on), which another service of
# the test may get between the look and the use.
PORTS = range(20_000, 30_000)


def free_port() -> int:
    """Return a TCP port that nobody uses now, on any address."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"100 ports of {PORTS} are all in use")
