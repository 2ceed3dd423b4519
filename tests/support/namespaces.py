"""Two hosts joined by a cable, as two network namespaces with a veth pair between them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

DEADLINE_S = 60.0


class TwoHosts:
    """Exists as long as the ``with`` block; needs no privileges where user namespaces are allowed.

    What runs in it has a ``/sys`` of its own, where UCX looks for devices.
    """

    ADDRESSES = ("10.77.0.1", "10.77.0.2")

    def __init__(self):
        self._holders = []

    def __enter__(self):
        try:
            self._hold(["unshare", "--user", "--map-root-user", "--net", "--mount"])
            user = self._enter(0, "--user", "--preserve-credentials")
            self._hold([*user, "unshare", "--net", "--mount"])
            pid = self._holders[1].pid
            self._set_up(
                0, "ip", "link", "add", "cable", "type", "veth", "peer", "cable", "netns", pid
            )
            for host, address in enumerate(self.ADDRESSES):
                self._set_up(host, "mount", "-t", "sysfs", "none", "/sys")
                self._set_up(host, "ip", "address", "add", f"{address}/24", "dev", "cable")
                self._set_up(host, "ip", "link", "set", "cable", "up")
                self._set_up(host, "ip", "link", "set", "lo", "up")
            self._wait_for_the_cable()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for holder in reversed(self._holders):
            holder.communicate(timeout=DEADLINE_S)  # ends with its input

    def _hold(self, command):
        """Start a process that keeps namespaces in being."""
        script = "echo ready; cat"
        try:
            holder = subprocess.Popen(
                [*command, "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError as error:
            pytest.skip(f"needs network namespaces: {error}")
        self._holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"needs network namespaces: {holder.stderr.read().strip()}")

    def _set_up(self, host, *command):
        command = [*self.enter(host), *map(str, command)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=DEADLINE_S
        )
        if done.returncode != 0:
            pytest.skip(f"needs network namespaces: {' '.join(command)}: {done.stderr.strip()}")

    def _wait_for_the_cable(self):
        """Wait until both ends have a carrier: UCX does not use an interface without one."""
        deadline = time.monotonic() + DEADLINE_S
        for host in (0, 1):
            command = [*self.enter(host), "cat", "/sys/class/net/cable/operstate"]
            while subprocess.check_output(command, text=True) != "up\n":
                assert time.monotonic() < deadline, "the cable has no carrier"
                time.sleep(0.01)

    def _enter(self, host, *namespaces):
        return ["nsenter", "--target", str(self._holders[host].pid), *namespaces]

    def enter(self, host):
        """Return the beginning of a command that runs on a host, 0 or 1."""
        every = ("--user", "--preserve-credentials", "--net", "--mount", f"--wd={Path.cwd()}")
        return self._enter(host, *every)

    def plug(self, *, connected):
        """Pull the cable, or plug it in again."""
        self.run(1, "ip", "link", "set", "cable", "up" if connected else "down")

    def run(self, host, *command):
        """Run a command on a host, 0 or 1."""
        subprocess.run([*self.enter(host), *command], check=True, timeout=DEADLINE_S)
