"""The peers of a worker's agent, shared by what uses them.

An agent has one connection to each peer, but a worker may have several uses for it: as a producer,
as a consumer, and for what an earlier link still waits for. The last use that ends disconnects.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from pynixlkv.errors import DuplicatePeerError, PeerLostError

if TYPE_CHECKING:
    from pynixlkv.agent import Agent, Peer

__all__ = ["Peers"]

_ATTEMPTS = 3


class Peers:
    """Connects and disconnects. Thread-safe.

    Parameters
    ----------
    agent : Agent
        Whose peers.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._uses: Counter[tuple[str, int]] = Counter()
        self._peers: dict[tuple[str, int], Peer] = {}

    def connect(self, hello: bytes) -> Peer:
        """Connect, or use the connection that there is; each call needs a `release`. May block.

        Raises
        ------
        DuplicatePeerError
            If another agent of that name is connected, and alive.
        PeerLostError
            If the connection breaks again and again.
        PynixlkvError
            As `Agent.connect`.
        """
        for _ in range(_ATTEMPTS):
            peer = self._connect(hello)
            key = peer.name, peer.generation
            with self._lock:
                self._uses[key] += 1
                self._peers[key] = peer
            if peer.is_connected:
                return peer
            self.release(peer)  # its last other use has just ended, or it is lost
        raise PeerLostError("the connection breaks as soon as it is made", peer=peer.name)

    def _connect(self, hello: bytes) -> Peer:
        try:
            return self._agent.connect(hello)
        except DuplicatePeerError:
            # Maybe the successor of one whose end has not been noticed yet.
            with self._lock:
                known = list(self._peers.values())
            alive = [self._agent.is_alive(peer) for peer in known]
            if all(alive):
                raise
            return self._agent.connect(hello)

    def release(self, peer: Peer) -> None:
        """End one use of a peer."""
        key = peer.name, peer.generation
        with self._lock:
            self._uses[key] -= 1
            if self._uses[key] > 0:
                return
            del self._uses[key], self._peers[key]
            if peer.is_connected:
                self._agent.disconnect(peer)

    def __len__(self) -> int:
        return len(self._peers)
