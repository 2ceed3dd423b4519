"""The other side of a transfer test: an agent with a pool of bytes, in this process or in a child.

A suite written against `Remote` runs in one process and between processes alike.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pynixlkv.agent import Registration
from pynixlkv.errors import PynixlkvError
from pynixlkv.geometry import KVCache
from pynixlkv.testing.contents import random_bytes
from pynixlkv.testing.process import ChildProcess, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pynixlkv.agent import Agent, Peer, Transfer
    from pynixlkv.testing import FakeNetwork

__all__ = ["LocalRemote", "Pool", "ProcessRemote", "Remote"]


class Pool:
    """The memory of one side: a small paged KV cache in a numpy array.

    Parameters
    ----------
    axes : str
        Order of the axes, out of the letters ``K B H N D``.
    """

    NUM_BLOCKS = 64
    HEADS = 4
    TOKENS = 8
    DIM = 32

    def __init__(self, axes: str = "KBHND") -> None:
        sizes = {"K": 2, "B": self.NUM_BLOCKS, "H": self.HEADS, "N": self.TOKENS, "D": self.DIM}
        self.axes = axes
        self.array: npt.NDArray[np.uint16] = np.zeros([sizes[a] for a in axes], dtype=np.uint16)
        self.cache = KVCache.from_tensors({"layer.0": self.array}, axes=axes, kv_heads=self.HEADS)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All bytes, as a view."""
        return self.array.reshape(-1).view(np.uint8)

    def fill(self, seed: int) -> None:
        """Fill the pool with bytes that depend on the seed."""
        self.bytes[:] = random_bytes(self.bytes.size, seed)

    def block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Return a view of one block, its axes in the order ``K H N D``."""
        order = [self.axes.index(a) for a in "BKHND"]
        block: npt.NDArray[np.uint16] = self.array.transpose(order)[block_id]
        return block


class Remote(Protocol):
    """The other side as a suite sees it."""

    name: str

    def start(self) -> None:
        """Make the agent, again after `kill`."""

    def hello(self) -> bytes:
        """Return the agent's hello, with the pool's cache."""
        ...

    def connect(self, hello: bytes) -> None:
        """Connect the agent to the suite's agent."""

    def address(self) -> int:
        """Return the address of the pool."""
        ...

    def fill(self, seed: int) -> None:
        """Fill the pool with bytes that depend on the seed."""

    def content(self) -> bytes:
        """Return the pool's bytes."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification to a connected peer."""

    def notifications(self, timeout: float) -> list[tuple[str, bytes]]:
        """Take the notifications that have arrived, as (sender, message)."""
        ...

    def register_more(self, nbytes: int, seed: int) -> int:
        """Register another buffer, of `random_bytes`, and return its address."""
        ...

    def deregister_more(self) -> None:
        """Deregister the buffers of `register_more`, and keep them."""

    def pause(self) -> None:
        """Stop the agent, as if its process were stopped."""

    def resume(self) -> None:
        """Undo `pause`."""

    def kill(self) -> None:
        """End the agent without warning."""

    def close(self) -> None:
        """Close the agent."""


class _AgentWithPool:
    """The agent and the pool of a remote, and what its methods do with them."""

    def __init__(self, make: Callable[[str], Agent], name: str, axes: str) -> None:
        self.pool = Pool(axes)
        self.agent = make(name)
        self.agent.register(self.pool.cache)
        self.peers: dict[str, Peer] = {}
        self.more: list[Registration | Transfer] = []
        self.arrays: list[object] = []

    def hello(self) -> bytes:
        return self.agent.hello(self.pool.cache)

    def connect(self, hello: bytes) -> None:
        peer = self.agent.connect(hello)
        self.peers[peer.name] = peer

    def address(self) -> int:
        return self.pool.address

    def fill(self, seed: int) -> None:
        self.pool.fill(seed)

    def content(self) -> bytes:
        return self.pool.bytes.tobytes()

    def notify(self, peer: str, message: bytes) -> None:
        self.agent.notify(self.peers[peer], message)

    def notifications(self, timeout: float) -> list[tuple[str, bytes]]:
        return [(n.peer, n.message) for n in self.agent.notifications(timeout)]

    def register_more(self, nbytes: int, seed: int) -> int:
        array = random_bytes(nbytes, seed)
        self.arrays.append(array)
        self.more.append(self.agent.register(array))
        return int(array.__array_interface__["data"][0])

    def deregister_more(self) -> None:
        for registration in self.more:
            if isinstance(registration, Registration):
                registration.close()
        self.more.clear()

    def start_pulling(self, hello: bytes, address: int, nbytes: int) -> None:
        """Begin to read memory of another agent, and return at once."""
        array = np.zeros(nbytes, dtype=np.uint8)
        self.more.append(self.agent.register(array))
        here = int(array.__array_interface__["data"][0])
        step = nbytes // 64
        starts = np.arange(64, dtype=np.uint64) * np.uint64(step)
        rows = np.zeros((2, 64, 3), dtype=np.uint64)
        rows[:, :, 0] = starts + np.array([[here], [address]], dtype=np.uint64)
        rows[:, :, 1] = step
        peer = self.agent.connect(hello)
        self.more += [self.agent.read_descriptors(peer, rows[0], rows[1]) for _ in range(20)]

    def close(self) -> None:
        self.peers.clear()
        self.agent.close()
        self.more.clear()
        self.arrays.clear()


class LocalRemote:
    """The other side as a fake agent of this process.

    Parameters
    ----------
    network : FakeNetwork
        The network of the suite's agents.
    name, axes : str
        Agent name, axes of the pool.
    """

    def __init__(self, network: FakeNetwork, name: str = "remote", axes: str = "KBHND") -> None:
        self.name = name
        self._network = network
        self._axes = axes
        self._local: _AgentWithPool | None = None
        self.start()

    def start(self) -> None:
        """Make the agent, again after `kill`."""
        from pynixlkv.testing import FakeAgent

        self._local = _AgentWithPool(
            lambda name: FakeAgent(name, self._network), self.name, self._axes
        )

    def __getattr__(self, command: str) -> Any:  # noqa: ANN401
        return getattr(self._local, command)

    def pause(self) -> None:
        """Leave operations to the agent pending."""
        self._network.pause(self.name)

    def resume(self) -> None:
        """Undo `pause`."""
        self._network.resume(self.name)

    def kill(self) -> None:
        """Break the connections of the agent for good."""
        self._network.kill(self.name)
        self.close()

    def close(self) -> None:
        """Close the agent."""
        if self._local is not None:
            self._local.close()
            self._local = None


class ProcessRemote:
    """The other side in a child process of its own.

    Parameters
    ----------
    make : callable
        Makes an agent from its name; a top-level class or function, or a partial of one.
    name, axes : str
        Agent name, axes of the pool.
    hosts : list of ChildProcess, optional
        Idle processes, which several remotes share because a start takes longer than most tests; by
        default the remote starts a process and ends it.
    """

    def __init__(
        self,
        make: Callable[[str], Agent],
        name: str = "remote",
        axes: str = "KBHND",
        hosts: list[ChildProcess] | None = None,
    ) -> None:
        self.name = name
        self._make = make
        self._axes = axes
        self._hosts = hosts
        self.start()

    def start(self) -> None:
        """Start the process, again after `kill`."""
        self._host = self._hosts.pop() if self._hosts else ChildProcess("the remote process")
        self._host.call(_AgentWithPool, self._make, self.name, self._axes, keep=True)

    def _call(self, command: str, *arguments: object) -> object:
        try:
            return self._host.call(command, *arguments)
        except RunError as error:
            if isinstance(error.__cause__, PynixlkvError):
                raise error.__cause__ from None
            raise

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)
        return functools.partial(self._call, command)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._host.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._host.is_running

    def pause(self) -> None:
        """Stop the process (SIGSTOP), and wait until all of its threads stand still."""
        self._host.stop()

    def resume(self) -> None:
        """Continue the process (SIGCONT)."""
        self._host.resume()

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._host.kill()

    def close(self) -> None:
        """Close the agent and end the process, or give it back; kill it if that fails."""
        if not self._host.is_running:
            self._host.kill()
            return
        self.resume()  # a test that failed may have left it stopped
        try:
            self._host.call("close")
        except BaseException:
            self.kill()
            raise
        if self._hosts is None:
            self._host.end()
        else:
            self._hosts.append(self._host)
