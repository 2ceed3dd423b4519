"""Test doubles and test suites for code that uses, or implements, an agent.

`FakeAgent` moves real bytes between agents of one process and keeps every promise of `Agent`, since
only its transfer backend differs; `FakeNetwork` makes it slow, lossy or dead on demand.
`pynixlkv.testing.conformance` holds the suite that every agent passes (it needs pytest).
"""

from __future__ import annotations

from typing import ClassVar

from pynixlkv import _native
from pynixlkv.agent import Agent

__all__ = ["FakeAgent", "FakeNetwork", "live_counts"]


class FakeNetwork:
    """The fake agents that can reach each other, and the faults between them. Thread-safe.

    Every method that names an agent raises `UnknownPeerError` if there is none of that name.
    """

    def __init__(self) -> None:
        self._native = _native.transfer.FakeNetwork()

    def set_delay(self, agent: str, seconds: float) -> None:
        """Make operations to the agent take this long; half of each batch moves immediately."""
        self._native.set_delay(agent, seconds)

    def pause(self, agent: str) -> None:
        """Leave operations to the agent pending, as if its process were stopped."""
        self._native.pause(agent)

    def resume(self, agent: str) -> None:
        """Undo `pause`; pending operations go on."""
        self._native.resume(agent)

    def kill(self, agent: str) -> None:
        """Break all connections to the agent; a new one of the same name can be made."""
        self._native.kill(agent)

    def fail_next(self, agent: str, count: int = 1) -> None:
        """Let the next `count` operations to the agent end with a library error."""
        self._native.fail_next(agent, count)

    def drop_notifications(self, agent: str, count: int = 1) -> None:
        """Lose the next `count` notifications to the agent."""
        self._native.drop_notifications(agent, count)


class FakeAgent(Agent):
    """An agent of this process alone: real bytes, real bounds, faults on demand.

    Parameters
    ----------
    name : str
        Unique in its network.
    network : FakeNetwork
        The agents that it can reach.
    secret : bytes or str, optional
        As in `Agent`.

    Raises
    ------
    ConfigError
        If the name is empty.
    DuplicatePeerError
        If the network has a live agent of that name.
    """

    transfer_backend: ClassVar[str] = "fake"

    def __init__(
        self, name: str, network: FakeNetwork, *, secret: bytes | str | None = None
    ) -> None:
        self._network = network
        super().__init__(name, backend_version="1.0", secret=secret)

    def _start(self, name: str, incarnation: bytes) -> _native.transfer.Agent:
        return _native.transfer.fake_agent(name, incarnation, self._network._native)


def live_counts() -> dict[str, int]:
    """Return how many native objects of each kind are alive in this process.

    Returns
    -------
    dict of str to int
        By class name. A test that ends with the counts it began with has leaked nothing.
    """
    return _native.live_counts()
