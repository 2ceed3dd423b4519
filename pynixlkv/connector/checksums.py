"""Digests of a request's KV, as its producer holds it and as its consumer received it.

The consumer draws units of tokens, and asks each source rank for digests of what that rank gives of
them, once the bytes are on their way. Digests do not depend on layouts and block sizes (see
`pynixlkv.digest`), so the consumer compares them with those of its own blocks.

The producer computes while it holds the blocks: a lease that ends waits for it. So digests that
differ, of a request whose lease held during its reads, are those of wrong bytes.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from pynixlkv.connector import messages
from pynixlkv.digest import Digest, GroupDigest
from pynixlkv.errors import KVCorruptError, PlanError
from pynixlkv.types import MemoryType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import ArrayLike

    from pynixlkv.connector.context import WorkerContext
    from pynixlkv.connector.metadata import ReqMeta
    from pynixlkv.connector.remote_engines import RemoteRank
    from pynixlkv.digest import DigestScope


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
    tables, starts = ctx.tables_by_group(
        ctx.cache, meta.host_blocks or meta.blocks, meta.starts, meta.block_sizes
    )
    return [each.data for each in _compute(ctx, scopes, tables, starts).groups]


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
        self._tables, self._starts = ctx.tables_by_group(
            ctx.cache, meta.host_blocks or meta.blocks, meta.starts, meta.block_sizes
        )
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
