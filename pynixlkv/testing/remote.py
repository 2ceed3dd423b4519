"""The other side of a transfer test: an agent with a pool of bytes, in this process or in a child.

A suite written against `Remote` runs on an in-process double and between real processes alike.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pynixlkv.agent import Registration
from pynixlkv.errors import PynixlkvError
from pynixlkv.geometry import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import numpy.typing as npt

    from pynixlkv.agent import Agent, Peer, Transfer
    from pynixlkv.testing import FakeNetwork

__all__ = ["HostPool", "LocalRemote", "Pool", "ProcessRemote", "Remote", "random_bytes"]

_DEADLINE_S = 60.0


def random_bytes(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return bytes that depend on the seed alone."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Pool:
    """Memory of one side: a small paged KV cache as numpy sees it, registered as a whole.

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
        """First byte."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All bytes, as a view."""
        return self.array.reshape(-1).view(np.uint8)

    def fill(self, seed: int) -> None:
        """Fill it with bytes that depend on the seed."""
        self.bytes[:] = random_bytes(self.bytes.size, seed)

    def block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """One block with its axes in the order ``K H N D``, a view."""
        order = [self.axes.index(a) for a in "BKHND"]
        block: npt.NDArray[np.uint16] = self.array.transpose(order)[block_id]
        return block


class Remote(Protocol):
    """What a suite asks of the other side."""

    name: str

    def start(self) -> None:
        """Make the agent, again after `kill`."""

    def hello(self) -> bytes:
        """Return the agent's hello, with its pool's cache."""
        ...

    def connect(self, hello: bytes) -> None:
        """Connect the agent to the suite's."""

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
        """Take sender and message of what has arrived."""
        ...

    def register_more(self, nbytes: int, seed: int) -> int:
        """Register another buffer, of `random_bytes`, and return its address."""
        ...

    def deregister_more(self) -> None:
        """Deregister what `register_more` has registered; the buffers stay."""

    def pause(self) -> None:
        """Stop taking part, as a stopped process does."""

    def resume(self) -> None:
        """Undo `pause`."""

    def kill(self) -> None:
        """Be gone from one moment to the next."""

    def close(self) -> None:
        """Close the agent."""


class _Side:
    """An agent with a pool, as the commands of a remote use it."""

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
        """Begin to read memory of another agent, and answer while that goes on."""
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


class LocalRemote:
    """The other side as a fake agent of this process.

    Parameters
    ----------
    network : FakeNetwork
        Where the faults are injected.
    name, axes : str
        Agent name, axes of the pool.
    """

    def __init__(self, network: FakeNetwork, name: str = "remote", axes: str = "KBHND") -> None:
        self.name = name
        self._network = network
        self._axes = axes
        self._side: _Side | None = None
        self.start()

    def start(self) -> None:
        """Make the agent, again after `kill`."""
        from pynixlkv.testing import FakeAgent

        self._side = _Side(lambda name: FakeAgent(name, self._network), self.name, self._axes)

    def __getattr__(self, command: str) -> Any:  # noqa: ANN401
        return getattr(self._side, command)

    def pause(self) -> None:
        """Leave what goes to it pending."""
        self._network.pause(self.name)

    def resume(self) -> None:
        """Undo `pause`."""
        self._network.resume(self.name)

    def kill(self) -> None:
        """Break its connections for good."""
        self._network.kill(self.name)
        self.close()

    def close(self) -> None:
        """Close the agent."""
        if self._side is not None:
            self._side.close()
            self._side = None


def _serve(connection: Connection) -> None:
    """Be one side after the other until the other process closes the connection."""
    faulthandler.enable()
    side: _Side | None = None
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            if command == "start":
                side = _Side(*arguments)
                answer: tuple[str, object] = ("ok", None)
            else:
                answer = ("ok", getattr(side, command)(*arguments))
        except PynixlkvError as error:
            answer = ("error", error)
        except Exception:  # the other process reports it
            answer = ("traceback", traceback.format_exc())
        if command == "close":
            side = None
        connection.send(answer)


class _Host:
    """A process for remotes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Let it end by itself; kill it if it does not."""
        self.connection.close()
        self.process.join(_DEADLINE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class HostPool:
    """Processes that remotes use one after the other: to start one takes longer than most tests."""

    def __init__(self) -> None:
        self._idle: list[_Host] = []

    def take(self) -> _Host:
        """Return a process that nobody uses."""
        return self._idle.pop() if self._idle else _Host()

    def give_back(self, host: _Host) -> None:
        """Take back a process whose agent is closed."""
        self._idle.append(host)

    def close(self) -> None:
        """End all that nobody uses."""
        while self._idle:
            self._idle.pop().end()


class ProcessRemote:
    """The other side in a child process of its own.

    Parameters
    ----------
    make : callable
        Makes an agent from its name; must be picklable.
    name, axes : str
        Agent name, axes of the pool.
    hosts : HostPool, optional
        Where the process comes from and goes to; by default it is started, and ends at the end.
    """

    def __init__(
        self,
        make: Callable[[str], Agent],
        name: str = "remote",
        axes: str = "KBHND",
        hosts: HostPool | None = None,
    ) -> None:
        self.name = name
        self._make = make
        self._axes = axes
        self._hosts = hosts
        self.start()

    def start(self) -> None:
        """Start the process, again after `kill`."""
        self._host = self._hosts.take() if self._hosts else _Host()
        self._ask("start", self._make, self.name, self._axes)

    @property
    def _process(self) -> BaseProcess:
        return self._host.process

    @property
    def _connection(self) -> Connection:
        return self._host.connection

    def _answer(self, command: str) -> object:
        if not self._connection.poll(_DEADLINE_S):
            raise TimeoutError(f"the remote process did not answer {command!r} in {_DEADLINE_S} s")
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(_DEADLINE_S)
            raise RuntimeError(
                f"the remote process ended with exit code {self._process.exitcode} instead of "
                f"answering {command!r}"
            ) from error
        if kind == "error":
            raise value
        if kind == "traceback":
            raise RuntimeError(f"{command!r} failed in the remote process:\n{value}")
        return value

    def _ask(self, command: str, *arguments: object) -> object:
        self._connection.send((command, arguments))
        return self._answer(command)

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)
        return lambda *arguments: self._ask(command, *arguments)

    @property
    def pid(self) -> int:
        """Process id."""
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.is_alive()

    def pause(self) -> None:
        """Stop the process (SIGSTOP), and wait until all of its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._process.kill()
        self._process.join(_DEADLINE_S)
        self._connection.close()

    def close(self) -> None:
        """Close the agent and end the process, or give it back; kill it if that fails."""
        if not self._process.is_alive():
            self._connection.close()
            return
        self.resume()  # a test that failed may have left it stopped
        try:
            self._ask("close")
        except BaseException:
            self.kill()
            raise
        if self._hosts:
            self._hosts.give_back(self._host)
        else:
            self._host.end()
