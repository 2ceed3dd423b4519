"""One rank of the demo: a cache with known contents and an agent, in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pynixlkv.cli.cache import Contents, Placement, RankCache
from pynixlkv.cli.models import find_model
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.testing.process import RunError, parent
from pynixlkv.topology import expected_readers, read_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pynixlkv.topology import Reader, Source

__all__ = ["Checked", "DemoRank", "Fault", "Operation", "RankSpec", "Role", "Tables"]

Role = Literal["prefill", "decode"]
Operation = Literal["read", "write"]
# Physical blocks of one role that are read and written, in token order.
Tables = dict[Operation, list[int]]


class Fault(str, Enum):
    """What decode rank 0 spoils on purpose: a block that was moved, an unused one, or itself."""

    read = "read"
    write = "write"
    guard = "guard"
    crash = "crash"
    hang = "hang"


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to know to build its cache and its expectations."""

    role: Role
    rank: int
    sizes: dict[Role, int]
    axes: str
    model: str
    transfer_backend: str
    num_blocks: int
    tables: dict[Role, Tables]
    seed: int
    timeout_s: float
    fault: Fault | None

    @property
    def name(self) -> str:
        """Name of the process and of its agent."""
        return f"{self.role}-{self.rank}"

    @property
    def other_role(self) -> Role:
        """The role of this rank's peers."""
        return "decode" if self.role == "prefill" else "prefill"

    @property
    def operation(self) -> Operation:
        """What this rank does: decode reads, prefill writes."""
        return "read" if self.role == "decode" else "write"


@dataclass(frozen=True)
class Checked:
    """Result of a comparison; `difference` describes the first one, if any."""

    moved_bytes: int
    guard_bytes: int
    wrong_bytes: int
    difference: str


def make_agent(transfer_backend: str, name: str) -> Any:  # noqa: ANN401
    """Return an agent over ``"nixl"`` or ``"ucx"``."""
    if transfer_backend == "nixl":
        from pynixlkv.nixl import NixlAgent

        return NixlAgent(name)
    from pynixlkv.ucx import UcxAgent

    return UcxAgent(name)


class DemoRank:
    """A rank's cache, agent and expectations."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._deadline = time.monotonic() + spec.timeout_s
        self._model = find_model(spec.model)
        self._tables = spec.tables[spec.role]
        size = spec.sizes[spec.role]
        self._cache = RankCache(self._model, spec.axes, spec.rank, size, spec.num_blocks)
        num_moved = len(self._tables["read"])
        self._contents: dict[Operation, Contents] = {
            "read": Contents((spec.seed, 0), self._model, num_moved),
            "write": Contents((spec.seed, 1), self._model, num_moved),
        }
        # The initial contents of a pool differ on every rank.
        role = ("prefill", "decode").index(spec.role)
        self._unused = Contents((spec.seed, 2, role, spec.rank), self._model, spec.num_blocks)
        self._fill()

        self._kv = KVCache.from_tensors(
            {f"layer.{i}": tensor for i, tensor in enumerate(self._cache.tensors)},
            dtype="bfloat16",
            axes=self._cache.letters,
            kv_heads=self._model.kv_heads,
            tp=(spec.rank, size),
        )
        self._agent = make_agent(spec.transfer_backend, spec.name)
        self._registration = self._agent.register(self._kv)
        self._peers: list[tuple[Any, TransferPlan]] = []

    def close(self) -> None:
        """Deregister and close the agent."""
        self._registration.close()
        self._agent.close()

    def describe(self) -> tuple[bytes, int]:
        """Return the hello for the other role, and the bytes of the cache."""
        return self._agent.hello(self._kv), self._cache.num_bytes

    def _fill(self) -> None:
        """Fill the whole pool, guard blocks included."""
        holds: list[Operation] = ["read", "write"] if self._spec.role == "prefill" else []
        layers = self._model.layers
        for layer in range(layers):
            for placement in self._expected(holds):
                self._cache.fill(layer, placement)
            parent().send((layer + 1, layers))

    def _expected(self, holds: Sequence[Operation]) -> list[Placement]:
        """Return the expected contents of each block of the pool, guard blocks last."""
        guards = np.ones(self._spec.num_blocks, dtype=bool)
        placements = []
        for name in holds:
            blocks = np.asarray(self._tables[name], dtype=np.intp)
            placements.append(Placement(self._contents[name], np.arange(len(blocks)), blocks))
            guards[blocks] = False
        (unused,) = np.nonzero(guards)
        return [*placements, Placement(self._unused, unused, unused)]

    def connect(self, hellos: dict[Role, list[bytes]]) -> None:
        """Connect to the ranks of the other role that hold some of the same heads, and plan."""
        spec, kv_heads = self._spec, self._model.kv_heads
        me, others = (spec.rank, spec.sizes[spec.role]), spec.sizes[spec.other_role]
        partners: Sequence[Source | Reader]
        if spec.role == "decode":
            partners = read_sources(kv_heads, local=me, remote_size=others)
        else:
            partners = expected_readers(kv_heads, local=me, remote_size=others)
        for partner in partners:
            if len(partner.heads):
                peer = self._agent.connect(hellos[spec.other_role][partner.rank])
                heads = None if kv_heads is None else partner.heads
                plan = TransferPlan(self._kv.geometry, peer.geometry, heads=heads)
                self._peers.append((peer, plan))

    def move(self) -> dict[str, float]:
        """Read from all peers at once, or write to them.

        Returns sums over the peers, and the longest of their times (keys that end in ``_s``).
        """
        spec = self._spec
        if spec.fault is Fault.crash:
            os._exit(3)
        if spec.fault is Fault.hang:
            os.kill(os.getpid(), signal.SIGSTOP)
        local, remote = (spec.tables[role][spec.operation] for role in (spec.role, spec.other_role))
        post = self._agent.read if spec.operation == "read" else self._agent.write
        started = time.perf_counter()
        transfers = [
            post(peer, plan, local, remote, notify=_note(spec.name, peer.name), timeout=left)
            for (peer, plan), left in ((pair, self._left()) for pair in self._peers)
        ]
        for transfer in transfers:
            transfer.wait(timeout=self._left())
        elapsed_s = time.perf_counter() - started
        results = [transfer.result for transfer in transfers]
        costs = [plan.describe(local, remote) for _, plan in self._peers]
        return {
            "bytes": sum(result.bytes for result in results),
            "descriptors_unmerged": sum(cost.num_runs for cost in costs),
            "descriptors": sum(result.descriptors for result in results),
            "plan_s": max((result.plan_s for result in results), default=0.0),
            "post_s": max((result.post_s for result in results), default=0.0),
            "transfer_s": max((result.transfer_s for result in results), default=0.0),
            "elapsed_s": elapsed_s,
        }

    def await_notifications(self) -> None:
        """Take notifications until each peer's has come; any other is an error."""
        spec = self._spec
        missing = {(peer.name, _note(peer.name, spec.name)) for peer, _ in self._peers}
        while missing:
            for note in self._agent.notifications(timeout=self._left()):
                if (note.peer, note.message) not in missing:
                    raise RunError(f"{spec.name} got an unexpected notification: {note!r}")
                missing.remove((note.peer, note.message))

    def check(self, done: Sequence[Operation]) -> Checked:
        """Compare the whole pool with its expected contents after some operations."""
        holds: Sequence[Operation] = done
        if self._spec.role == "prefill":
            holds = ["read", "write"]
        self._corrupt(holds)
        *moved, guards = placements = self._expected(holds)
        wrong_bytes, difference = 0, ""
        layers = self._model.layers
        for layer in range(layers):
            for placement in placements:
                wrong, where = self._cache.compare(layer, placement)
                wrong_bytes += wrong
                difference = difference or where
            parent().send((layer + 1, layers))
        block_bytes = self._cache.num_bytes // self._spec.num_blocks
        return Checked(
            moved_bytes=sum(len(placement.blocks) for placement in moved) * block_bytes,
            guard_bytes=len(guards.blocks) * block_bytes,
            wrong_bytes=wrong_bytes,
            difference=difference,
        )

    def _left(self) -> float:
        """Return the seconds until the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RunError(f"{self._spec.name} did not end within {self._spec.timeout_s} s")
        return left

    def _corrupt(self, holds: Sequence[Operation]) -> None:
        """Flip a bit if a fault is injected."""
        fault = self._spec.fault
        if fault is Fault.guard:
            self._cache.layer(0)[0, 0, 0, 0, 0] ^= 1
        for operation in holds:
            if fault is not None and fault.value == operation:
                self._cache.layer(0)[self._tables[operation][0], 0, 0, 0, 0] ^= 1


def _note(sender: str, receiver: str) -> bytes:
    return f"from {sender} to {receiver}".encode()
