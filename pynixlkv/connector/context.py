"""What the parts of a worker share: its agent, its place, its memory and its connected peers."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.connector import messages
from pynixlkv.errors import DuplicatePeerError, PeerLostError, PlanError
from pynixlkv.plan import physical_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from numpy.typing import ArrayLike

    from pynixlkv.agent import Agent, Peer
    from pynixlkv.connector.metadata import BlockLists, ConnectorConfig, ReqMeta
    from pynixlkv.connector.spans import Tracer
    from pynixlkv.connector.staging import DeviceEvent, Direction, HostStaging
    from pynixlkv.connector.stats import ConnectorStats
    from pynixlkv.geometry import Geometry, KVCache

_ATTEMPTS = 3


@dataclass(frozen=True)
class WorkerContext:
    """One worker: constant after `ConnectorWorker.register_kv_caches`."""

    agent: Agent
    identity: messages.ConsumerRank
    """How the worker introduces itself to producers."""
    kv: KVCache
    """What transfers read and write: the KV cache, or the host cache it is staged in."""
    lease_buffer: KVCache
    """Where lease words are read to."""
    hello: bytes
    staging: HostStaging | None
    config: ConnectorConfig
    stats: ConnectorStats
    peers: Peers
    scratch: KVCache | None
    """For the self-test; None if it is off."""
    compute: Callable[[Callable[[], Any], int], Future[Any]]
    """Runs a function that digests a number of bytes, on another thread if they are many; its end
    wakes the agent."""
    tracer: Tracer | None = None

    @property
    def cache(self) -> Geometry:
        """The geometry of `kv`."""
        return self.kv.geometry

    @cached_property
    def state_tables(self) -> frozenset[int]:
        """Numbers of the block tables that are not by position."""
        return frozenset(int(g.table) for g in self.cache.groups if not g.block_size)

    def check_state(self, wanted: int, held: int) -> None:
        """Raise unless state that a producer has after some tokens is what a consumer wants."""
        if self.state_tables and wanted != held:
            raise PlanError(
                f"the producer has state after {held} tokens, wanted is that after {wanted}; state "
                "of other tokens cannot be used"
            )

    def introduce(self, peer: Peer) -> None:
        """Tell a producer's rank how it reaches this worker."""
        self.agent.notify(peer, messages.encode(messages.ConsumerHello(self.identity, self.hello)))

    def tables_by_group(
        self,
        geometry: Geometry,
        blocks: BlockLists,
        starts: tuple[int, ...],
        block_sizes: tuple[int, ...],
    ) -> tuple[dict[str, ArrayLike], dict[str, int]]:
        """Return the block table and the start of each group, in the blocks of its geometry.

        A group's `table` is the number of an engine's block table.

        An engine has one block table for each of its groups of layers, and counts in its own
        blocks of `block_sizes` tokens (empty: the geometry's). The groups of a geometry may be
        finer (layers of other shapes that share a table), and their blocks smaller (kernels that
        split a block).
        """
        tables: dict[str, ArrayLike] = {}
        begins: dict[str, int] = {}
        for group in geometry.groups:
            index = int(group.table) if group.table.isdecimal() else -1
            if not 0 <= index < len(blocks) == len(starts):
                raise PlanError(
                    f"group {group.name!r} uses block table {group.table!r}; there are "
                    f"{len(blocks)} tables and {len(starts)} starts"
                )
            tables[group.name] = blocks[index]
            begins[group.name] = starts[index] if group.block_size else 0
            size = block_sizes[index] if block_sizes else 0
            if size and group.block_size and size != group.block_tokens:
                if size % group.block_tokens:
                    raise PlanError(
                        f"group {group.name!r}: a block of its table stands for {size} tokens, "
                        f"which are no whole number of blocks of {group.block_tokens}"
                    )
                tables[group.name] = physical_blocks(blocks[index], size // group.block_tokens)
        return tables, begins

    def local_tables(self, meta: ReqMeta) -> tuple[dict[str, ArrayLike], dict[str, int]]:
        """Return `tables_by_group` of a request's blocks in `kv`."""
        blocks = meta.host_blocks or meta.blocks
        return self.tables_by_group(self.cache, blocks, meta.starts, meta.block_sizes)

    def stage(self, direction: Direction, meta: ReqMeta) -> DeviceEvent | None:
        """Start to copy a request between device and host; None if it has no host blocks."""
        if self.staging is None or meta.host_blocks is None:
            return None

        def tables(blocks: BlockLists) -> BlockLists:
            found, _ = self.tables_by_group(self.cache, blocks, meta.starts, meta.block_sizes)
            return tuple(tuple(np.asarray(table).tolist()) for table in found.values())

        return self.staging.stage(direction, tables(meta.blocks), tables(meta.host_blocks))


class Peers:
    """Use counts of an agent's peers; the last use that ends disconnects. Thread-safe.

    An agent has one connection to each peer. A worker may use it as a producer, as a consumer, and
    for operations of an earlier `RemoteEngine` that are not quiet yet.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._uses: Counter[tuple[str, int]] = Counter()
        self._peers: dict[tuple[str, int], Peer] = {}

    def connect(self, hello: bytes) -> Peer:
        """Connect, or reuse the existing connection; each call needs a `release`. May block."""
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
            # It may be the successor of a peer whose death has not been noticed yet.
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
