"""One rank of the demo: a cache with known contents and an agent, in a process of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pynixlkv.cli.cache import Contents, RankCache
from pynixlkv.cli.models import find_model
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.testing.process import RunError, parent
from pynixlkv.topology import expected_readers, read_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pynixlkv.topology import Reader, Source

Role = Literal["prefill", "decode"]
Operation = Literal["read", "write"]
# Physical blocks of one role that are read and written, in token order.
Tables = dict[Operation, list[int]]


@dataclass(frozen=True)
class DemoOptions:
    """What to move between which ranks; `blocks` each way, by default as many as fit the memory.

    `axes` has the order of the dimensions of each role's tensors, by default the model's own.
    """

    model: str
    axes: dict[Role, str]
    sizes: dict[Role, int]
    blocks: int | None = None
    transfer_backend: str = "nixl"
    timeout_s: float = 300.0
    seed: int | None = None


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to know to build its cache and its expectations."""

    role: Role
    rank: int
    options: DemoOptions
    num_blocks: int
    tables: dict[Role, Tables]
    seed: int

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
        self._options = options = spec.options
        self._deadline = time.monotonic() + options.timeout_s
        self._model = model = find_model(options.model)
        self._tables = spec.tables[spec.role]
        axes, size = options.axes[spec.role], options.sizes[spec.role]
        self._cache = RankCache(model, axes, spec.rank, size, spec.num_blocks)
        self._contents: dict[Operation, Contents] = {
            "read": Contents((spec.seed, 0), model, len(self._tables["read"])),
            "write": Contents((spec.seed, 1), model, len(self._tables["write"])),
        }
        # The initial contents of a pool differ on every rank.
        role = ("prefill", "decode").index(spec.role)
        self._unused = Contents((spec.seed, 2, role, spec.rank), model, spec.num_blocks)
        for layer in range(model.layers):
            self._cache.layer(layer)[:] = self._expected(layer, [])
            parent().send((layer + 1, model.layers))

        self._kv = KVCache.from_tensors(
            {f"layer.{i}": tensor for i, tensor in enumerate(self._cache.tensors)},
            dtype="bfloat16",
            axes=self._cache.letters,
            kv_heads=model.kv_heads,
            tp=(spec.rank, size),
        )
        self._agent = make_agent(options.transfer_backend, spec.name)
        self._registration = self._agent.register(self._kv)
        self._peers: list[tuple[Any, TransferPlan]] = []

    def close(self) -> None:
        """Deregister and close the agent."""
        self._registration.close()
        self._agent.close()

    def describe(self) -> tuple[bytes, int]:
        """Return the hello for the other role, and the bytes of the cache."""
        return self._agent.hello(self._kv), self._cache.num_bytes

    def _expected(self, layer: int, done: Sequence[Operation]) -> NDArray[np.uint16]:
        """Return the expected contents of the pool in one layer after some operations."""
        pages = self._unused.pages(layer, self._cache.heads)
        for name in ("read", "write") if self._spec.role == "prefill" else done:
            pages[self._tables[name]] = self._contents[name].pages(layer, self._cache.heads)
        return pages

    def connect(self, hellos: dict[Role, list[bytes]]) -> None:
        """Connect to the ranks of the other role that hold some of the same heads, and plan."""
        spec, sizes, kv_heads = self._spec, self._options.sizes, self._model.kv_heads
        me, others = (spec.rank, sizes[spec.role]), sizes[spec.other_role]
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

    def own_transports(self) -> set[str]:
        """Return the ways to the peers that are the agent's own, which UCX does not report."""
        return {t for peer, _ in self._peers for t in peer.transports} & {"process_vm", "lane"}

    def await_notifications(self) -> None:
        """Take notifications until each peer's has come; any other is an error."""
        spec = self._spec
        missing = {(peer.name, _note(peer.name, spec.name)) for peer, _ in self._peers}
        while missing:
            for note in self._agent.notifications(timeout=self._left()):
                if (note.peer, note.message) not in missing:
                    raise RunError(f"{spec.name} got an unexpected notification: {note!r}")
                missing.remove((note.peer, note.message))

    def check(self, done: Sequence[Operation]) -> tuple[int, str]:
        """Count the wrong bytes in the whole pool after some operations; describe the first."""
        wrong_bytes, difference = 0, ""
        layers = self._model.layers
        for layer in range(layers):
            wrong, where = self._cache.compare(layer, self._expected(layer, done))
            wrong_bytes += wrong
            difference = difference or where
            parent().send((layer + 1, layers))
        return wrong_bytes, difference

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RunError(f"{self._spec.name} did not end within {self._options.timeout_s} s")
        return left


def _note(sender: str, receiver: str) -> bytes:
    return f"from {sender} to {receiver}".encode()
