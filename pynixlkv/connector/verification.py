"""How a consumer's rank verifies what arrives: digests of KV, and a self-test at first contact.

Digests: the consumer draws units of tokens, and asks each source rank for digests of what that rank
gives of them, once the bytes are on their way. Digests do not depend on layouts and block sizes
(see `pynixlkv.digest`), so the consumer compares them with those of its own blocks. The producer
computes while it holds the blocks: a lease that ends waits for it. So digests that differ, of a
request whose lease held during its reads, are those of wrong bytes.

Self-test: each rank has scratch blocks beside its cache, of the same layout. Pattern block i
numbers the elements along axis i: each byte of an element is its index there. A consumer reads the
pattern as it is going to read KV. If pattern block i arrives other than the consumer's own, the two
ranks do not mean the same elements by that axis. That tests what the geometries say, the plan
between them, and the path of the bytes. It shows that a geometry says what the engine's kernels do
only if the engine fills the pattern through them.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from pynixlkv.connector import messages
from pynixlkv.digest import Digest, GroupDigest, as_torch
from pynixlkv.errors import IncompatibleLayoutError, KVCorruptError, PlanError
from pynixlkv.geometry import Axis, KVCache, _read_array, meetings
from pynixlkv.plan import TransferPlan
from pynixlkv.types import MemoryType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import ArrayLike, NDArray

    from pynixlkv.agent import Agent, Peer, Transfer
    from pynixlkv.connector.context import WorkerContext
    from pynixlkv.connector.metadata import ReqMeta
    from pynixlkv.connector.remote_engines import RemoteRank
    from pynixlkv.connector.tp_mapping import TransferSlice
    from pynixlkv.digest import DigestScope
    from pynixlkv.geometry import Geometry, Group, Region

AXES = ("layer", "kv", "head", "token", "dim")
"""Of the self-test: one pattern block for each, in this order."""
NUM_SCRATCH_BLOCKS = 2 * len(AXES)
"""Of a scratch cache: the pattern, and as many blocks to read it into."""
_MAX_BYTES = 4 << 20
_MAX_STEP = 4096
_MODULUS = 251


# ---- digests


def num_bytes(ctx: WorkerContext, scopes: Iterable[DigestScope]) -> int:
    """Return about how many bytes the digests of scopes are of; many in device memory."""
    groups = {group.name: group for group in ctx.cache.groups}
    total = 0
    for scope in scopes:
        group = groups.get(scope.group)
        if group is not None:
            tokens = min(scope.unit, scope.tokens[1] - scope.tokens[0])
            total += math.prod(scope.shape) * tokens * group.head_dim * group.element_bytes
    is_host = all(span.memory is MemoryType.DRAM for span in ctx.cache.spans)
    return total if is_host else sys.maxsize


def answer(ctx: WorkerContext, meta: ReqMeta, scopes: Sequence[DigestScope]) -> list[bytes]:
    """Return the digests that a consumer wants of a request, by scope; takes long.

    Raises `PlanError` if they are too many, or of what the request does not hold.
    """
    count = sum(math.prod(scope.shape) for scope in scopes)
    if count > messages.MAX_DIGESTS:
        raise PlanError(f"{count} digests are wanted; at most {messages.MAX_DIGESTS} fit an answer")
    if len({(scope.group, scope.heads, scope.layers) for scope in scopes}) < len(scopes):
        raise PlanError("digests of the same heads of a group are wanted twice")
    return [each.data for each in _compute(ctx, scopes, *ctx.local_tables(meta)).groups]


def _compute(
    ctx: WorkerContext,
    scopes: Sequence[DigestScope],
    tables: Mapping[str, ArrayLike],
    starts: Mapping[str, int],
) -> Digest:
    began = time.perf_counter()
    digest = ctx.kv.digest(tables, start=starts, scopes=scopes)
    ctx.stats.digested(time.perf_counter() - began)
    return digest


class Verification:
    """The comparison of one request with its source ranks. Lives on the connector's thread."""

    def __init__(
        self, ctx: WorkerContext, request_id: str, meta: ReqMeta, sources: Sequence[RemoteRank]
    ) -> None:
        self._ctx = ctx
        self._request_id = request_id
        self._tables, self._starts = ctx.local_tables(meta)
        self._seed = secrets.randbits(62)
        self.scopes = {
            source: scopes for source in sources if (scopes := self._draw(source, meta.num_tokens))
        }
        """What to ask of each source."""
        self.ask_at = dict.fromkeys(self.scopes, 0.0)
        """When to ask the sources, again, that have not answered."""
        self._theirs: dict[RemoteRank, Digest] = {}
        self._ours: Future[dict[RemoteRank, Digest]] | None = None

    def _draw(self, source: RemoteRank, num_tokens: int) -> list[DigestScope]:
        config, groups = self._ctx.config, self._ctx.cache.groups
        fraction = config.checksum_fraction if config.checksums == "sampled" else 1.0
        # Larger units where the digests of blocks would be too many for an answer.
        rows = sum(len(g.layers) * g.planes * len(g.heads) for g in groups)
        wanted = 2 * rows * num_tokens * max(fraction, 1 / 64) / messages.MAX_DIGESTS
        unit = None
        if wanted > min(g.block_tokens for g in groups):
            largest = max(g.block_tokens for g in (*groups, *source.geometry.groups))
            unit = largest * math.ceil(wanted / largest)
        return [
            scope
            for plan in source.plans
            for scope in plan.digest_scopes(
                {name: self._tables[name] for name in plan.groups},
                {
                    # Only the number of blocks matters: their producer covers all tokens.
                    g.name: np.zeros(
                        -(-num_tokens // g.block_tokens)
                        if g.block_size
                        else len(np.asarray(self._tables[name])),
                        np.int64,
                    )
                    for g, name in zip(
                        source.geometry.select(name for _, name in plan.pairs),
                        (name for name, _ in plan.pairs),
                        strict=True,
                    )
                },
                num_tokens=num_tokens,
                local_start={name: self._starts[name] for name in plan.groups},
                unit=unit,
                fraction=fraction,
                seed=self._seed,
            )
        ]

    def take(self, source: RemoteRank, values: Sequence[bytes]) -> None:
        """Take a source's answer; raise `PlanError` if it does not fit the question."""
        scopes = self.scopes[source]
        if len(values) != len(scopes):
            raise PlanError(f"{len(values)} digests of groups were sent; expected {len(scopes)}")
        self._theirs[source] = Digest(tuple(map(GroupDigest, scopes, values)))
        del self.ask_at[source]

    def begin(self) -> None:
        """Start to compute digests of what has arrived."""
        self._ours = self._ctx.compute(
            lambda: {
                source: _compute(self._ctx, scopes, self._tables, self._starts)
                for source, scopes in self.scopes.items()
            },
            sum(num_bytes(self._ctx, scopes) for scopes in self.scopes.values()),
        )

    def cancel(self) -> None:
        """Give up."""
        if self._ours is not None:
            self._ours.cancel()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads the blocks."""
        return self._ours is None or self._ours.done()

    def check(self) -> None:
        """Raise `KVCorruptError` if digests differ; when all have answered and this is quiet."""
        assert self._ours is not None
        for source, ours in self._ours.result().items():
            try:
                ours.check(self._theirs[source], peer=source.peer.name)
            except KVCorruptError as error:
                who = f"request {self._request_id!r} from rank {source.rank}"
                error.args = (f"{who} arrived corrupt: {error}",)
                raise


# ---- the self-test


def make_scratch(cache: KVCache) -> KVCache | None:
    """Return a scratch cache, with the pattern, of at most 4 MiB: if need be of some layers.

    None if even one layer is larger.
    """
    step = 1
    while True:
        shrunk = [(group, *_shrink(group, step)) for group in cache.geometry.groups]
        if step > _MAX_STEP or sum(size for _, _, size in shrunk) <= _MAX_BYTES:
            break
        step *= 2  # so that the layers of one cache are among those of another, or the reverse
    arrays, groups = [], []
    for group, regions, size in shrunk:
        if not regions:
            continue
        memory: Any = np.zeros(size, np.uint8)
        for region in regions:
            _fill(memory, group, region)
        if cache.geometry.spans[group.regions[0].span].memory is MemoryType.VRAM:
            owner = as_torch(cache, group, group.regions[0])
            memory = sys.modules["torch"].from_numpy(memory).to(owner.device).view(owner.dtype)
        array = _read_array(group.name, memory)
        placed = [replace(each, address=array.address + each.address) for each in regions]
        groups.append(replace(group, num_blocks=NUM_SCRATCH_BLOCKS, regions=tuple(placed)))
        arrays.append(array)
    return KVCache(arrays, groups) if groups else None


def _shrink(group: Group, step: int) -> tuple[list[Region], int]:
    """Return dense regions of each `step`-th layer, from address 0 on, and their size."""
    regions, size = [], 0
    for region in group.regions:
        axes = {name: getattr(region, name) for name in ("block", *AXES[1:])}
        extent = group.element_bytes
        for name, axis in sorted(axes.items(), key=lambda item: item[1].stride):
            count = NUM_SCRATCH_BLOCKS if name == "block" else axis.count
            axes[name] = Axis(axis.start, count, extent if count > 1 else 0)
            extent *= count
        for layer in range(region.layer.start, region.layer.start + region.layer.count):
            if layer % step == 0:
                regions.append(replace(region, address=size, layer=Axis(layer), **axes))
                size += extent
    return regions, size


def _fill(memory: NDArray[np.uint8], group: Group, region: Region) -> None:
    axes = [getattr(region, name) for name in ("block", *AXES[1:])]
    shape = [*(axis.count for axis in axes), group.element_bytes]
    strides = [*(axis.stride for axis in axes), 1]
    pattern = np.ndarray(shape, np.uint8, memory, region.address, strides)
    indices = [axis.start + np.arange(axis.count) for axis in axes[1:]]
    turns, slots = np.divmod(indices[2], group.interleave)
    indices[2] = (turns * group.dcp[1] + group.dcp[0]) * group.interleave + slots
    for block, index in enumerate([np.array([region.layer.start]), *indices]):
        along = np.expand_dims(index % _MODULUS, [i for i in range(5) if i != max(block - 1, 0)])
        pattern[block] = along


def self_test(
    agent: Agent,
    scratch: KVCache,
    peer: Peer,
    theirs: Geometry,
    slices: Sequence[TransferSlice],
    timeout: float,
    turn: int,
    reads: list[Transfer],
) -> None:
    """Read a producer's pattern and compare it; blocks. Adds its transfers to `reads`.

    With another `turn` than the last one, each pattern arrives where another one was.

    Raises
    ------
    IncompatibleLayoutError
        If something arrives in another place than this rank expects; it names the axes.
    TransferError
        If nothing arrives.
    """
    wrong: dict[str, KVCorruptError] = {}
    for piece in slices:
        met = [
            (here, there, common)
            for here, there, layers in meetings(
                scratch.geometry.select(set(piece.groups) & set(scratch.geometry.names)),
                theirs.groups,
            )
            if (common := {*piece.layers} & {*layers})
        ]
        if not met:
            continue
        plan = TransferPlan(
            scratch.geometry,
            theirs,
            groups=dict.fromkeys(here.name for here, _, _ in met),
            heads=piece.heads,
            layers=set().union(*(layers for _, _, layers in met)),
        )
        # The pattern numbers the heads as one side does.
        renumbered = {here.kind for here, there, _ in met if here.kv_heads != there.kv_heads}
        num_tokens: dict[str, int] = {}
        for here, there, _ in met:
            tokens = num_tokens.get(here.name, here.block_tokens)
            num_tokens[here.name] = min(tokens, there.block_tokens)
        ours, remote = (
            [{pair[side]: [i] for pair in plan.pairs} for i in range(NUM_SCRATCH_BLOCKS)]
            for side in range(2)
        )
        places = [ours[len(AXES) + (i + turn) % len(AXES)] for i in range(len(AXES))]
        begun = [
            agent.read(peer, plan, *tables, timeout=timeout, num_tokens=num_tokens)
            for tables in zip(places, remote, strict=False)
        ]
        reads += begun
        for transfer in begun:
            transfer.wait(timeout)
        for axis, arrived, block, block_there in zip(AXES, places, ours, remote, strict=False):
            scopes = [
                scope
                for scope in plan.digest_scopes(arrived, block_there, num_tokens=num_tokens)
                if axis != "head" or scope.group not in renumbered
            ]
            expected = scratch.digest(block, scopes=scopes)
            try:
                scratch.digest(arrived, scopes=scopes).check(expected, peer=peer.name)
            except KVCorruptError as error:
                wrong.setdefault(axis, error)
    if wrong:
        raise IncompatibleLayoutError(
            f"the self-test with {peer.name!r} shows that the two sides do not mean the same by "
            f"axes {', '.join(wrong)}; compare the axes and the shapes that their caches were made "
            f"with: {next(iter(wrong.values()))}",
            peer=peer.name,
            differences=[
                (axis, error.mismatches[0].here, error.mismatches[0].there)
                for axis, error in wrong.items()
            ],
        )
