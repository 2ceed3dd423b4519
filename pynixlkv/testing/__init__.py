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


FakeNetwork = _native.transfer.FakeNetwork


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
        return _native.transfer.fake_agent(name, incarnation, self._network)


def live_counts() -> dict[str, int]:
    """Return how many native objects of each class are alive in this process.

    A test that ends with the counts it began with has leaked nothing.
    """
    return _native.live_counts()
