"""The other side of a transfer test: an agent with a pool of bytes, in this process or in a child.

A suite written against `Remote` runs in one process and between processes alike.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.errors import PynixlkvError
from pynixlkv.geometry import KVCache
from pynixlkv.testing import FakeAgent
from pynixlkv.testing.contents import random_bytes
from pynixlkv.testing.process import ChildProcess, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from pynixlkv.agent import Agent, Peer, Registration
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
        self.array, tensor = self._allocate([sizes[a] for a in axes])
        self.cache = KVCache.from_tensors({"layer.0": tensor}, axes=axes, kv_heads=self.HEADS)

    def _allocate(self, shape: list[int]) -> tuple[npt.NDArray[np.uint16], object]:
        """Return an array for the suite to look at, and the tensor that agents move."""
        array = np.zeros(shape, dtype=np.uint16)
        return array, array

    @property
    def address(self) -> int:
        """Address of the first byte, for agents."""
        return self.cache.spans[0].address

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


class Remote:
    """The other side of a suite's transfers: an agent with a pool.

    Parameters
    ----------
    make : callable
        Makes an agent from its name.
    name, axes : str
        Agent name, axes of the pool.
    make_pool : callable
        Makes the pool from its axes.
    """

    def __init__(
        self,
        make: Callable[[str], Agent],
        name: str = "remote",
        axes: str = "KBHND",
        make_pool: Callable[[str], Pool] = Pool,
    ) -> None:
        self.name = name
        self._make = make
        self._axes = axes
        self._make_pool = make_pool
        self.start()

    def start(self) -> None:
        """Make the agent, again after `kill`."""
        self._pool = self._make_pool(self._axes)
        self._agent = self._make(self.name)
        self._agent.register(self._pool.cache)
        self._peers: dict[str, Peer] = {}
        self._more: list[Registration] = []
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def hello(self) -> bytes:
        """Return the agent's hello, with the pool's cache."""
        return self._agent.hello(self._pool.cache)

    def connect(self, hello: bytes) -> None:
        """Connect the agent to the suite's agent."""
        peer = self._agent.connect(hello)
        self._peers[peer.name] = peer

    def address(self) -> int:
        """Return the address of the pool."""
        return self._pool.address

    def fill(self, seed: int) -> None:
        """Fill the pool with bytes that depend on the seed."""
        self._pool.fill(seed)

    def content(self) -> bytes:
        """Return the pool's bytes."""
        return self._pool.bytes.tobytes()

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification to a connected peer."""
        self._agent.notify(self._peers[peer], message)

    def notifications(self, timeout: float) -> list[tuple[str, bytes]]:
        """Take the notifications that have arrived, as (sender, message)."""
        return [(n.peer, n.message) for n in self._agent.notifications(timeout)]

    def register_more(self, nbytes: int, seed: int) -> int:
        """Register another buffer, of `random_bytes`, and return its address."""
        array = random_bytes(nbytes, seed)
        self._arrays.append(array)
        self._more.append(self._agent.register(array))
        return int(array.__array_interface__["data"][0])

    def deregister_more(self) -> None:
        """Deregister the buffers of `register_more`, and keep them."""
        for registration in self._more:
            registration.close()
        self._more.clear()

    def pause(self) -> None:
        """Stop the agent, as if its process were stopped."""
        raise NotImplementedError

    def resume(self) -> None:
        """Undo `pause`."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the agent without warning."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the agent."""
        self._peers.clear()
        self._agent.close()
        self._more.clear()
        self._arrays.clear()


class LocalRemote(Remote):
    """The other side as a fake agent of this process.

    Parameters
    ----------
    network : FakeNetwork
        The network of the suite's agents.
    name, axes : str
        Agent name, axes of the pool.
    """

    def __init__(self, network: FakeNetwork, name: str = "remote", axes: str = "KBHND") -> None:
        self._network = network
        super().__init__(lambda name: FakeAgent(name, network), name, axes)

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


class ProcessRemote:
    """The other side in a child process of its own; it has every method of `Remote`.

    Parameters
    ----------
    make : callable
        Makes an agent from its name; a top-level class or function, or a partial of one.
    name, axes : str
        Agent name, axes of the pool.
    make_pool : callable
        Makes the pool from its axes; as `make`.
    hosts : list of ChildProcess, optional
        Idle processes, which several remotes share because a start takes longer than most tests; by
        default the remote starts a process and ends it.
    """

    def __init__(
        self,
        make: Callable[[str], Agent],
        name: str = "remote",
        axes: str = "KBHND",
        make_pool: Callable[[str], Pool] = Pool,
        hosts: list[ChildProcess] | None = None,
    ) -> None:
        self.name = name
        self._arguments = make, name, axes, make_pool
        self._hosts = hosts
        self.start()

    def start(self) -> None:
        """Start the process, again after `kill`."""
        self._host = self._hosts.pop() if self._hosts else ChildProcess("the remote process")
        self._host.call(Remote, *self._arguments, keep=True)
        self.pause, self.resume, self.kill = self._host.stop, self._host.resume, self._host.kill

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
