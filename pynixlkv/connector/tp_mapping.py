"""Which ranks of two engines exchange data, and what.

The answers serve both directions: a consumer that reads and a producer that writes ask for the same
slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pynixlkv.errors import IncompatibleLayoutError
from pynixlkv.geometry import meetings
from pynixlkv.topology import expected_readers, read_sources, release_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pynixlkv.connector.metadata import ParallelSizes
    from pynixlkv.geometry import Geometry, Group
    from pynixlkv.types import Rank

_T = TypeVar("_T")


@dataclass(frozen=True)
class TransferSlice:
    """What one rank of a consumer gets from one rank of a producer in one transfer."""

    groups: tuple[str, ...]
    """Names of the consumer's groups."""
    heads: tuple[int, ...] | None
    """Global KV heads; None where no group has heads."""
    layers: tuple[int, ...]
    """Global layers."""


def _ask(
    topology: Callable[..., Iterable[_T]],
    kv_heads: int | None,
    rank: Rank,
    parallel: ParallelSizes,
    remote: ParallelSizes,
) -> Iterable[_T]:
    return topology(
        kv_heads,
        local=(rank[1], parallel.tp),
        remote_size=remote.tp,
        local_dcp=parallel.dcp,
        remote_dcp=remote.dcp,
    )


def ranks_to_tell(
    groups: Iterable[Group], rank: Rank, parallel: ParallelSizes, remote: ParallelSizes
) -> list[Rank]:
    """Return the producer's ranks that a consumer rank reads from, or only releases.

    They include all pipeline stages of a tensor-parallel rank: which stages share layers is known
    only once their geometries are.
    """
    told = {
        target
        for kv_heads in {group.kv_heads for group in groups}
        for target in _ask(release_targets, kv_heads, rank, parallel, remote)
    }
    return [(stage, target) for stage in range(remote.pp) for target in sorted(told)]


def num_readers(
    groups: Iterable[Group], rank: Rank, parallel: ParallelSizes, remote: ParallelSizes
) -> int:
    """Return how many consumer ranks must release a producer rank: the dual of `ranks_to_tell`."""
    readers = {
        reader.rank
        for kv_heads in {group.kv_heads for group in groups}
        for reader in _ask(expected_readers, kv_heads, rank, parallel, remote)
    }
    return len(readers) * remote.pp


def transfer_slices(
    consumer: Geometry,
    consumer_rank: Rank,
    consumer_parallel: ParallelSizes,
    producer: Geometry,
    producer_rank: Rank,
    producer_parallel: ParallelSizes,
) -> list[TransferSlice]:
    """Return what a consumer rank gets from a producer rank: usually one slice, or none."""
    _check_ranks("local", consumer, consumer_rank, consumer_parallel)
    _check_ranks("remote", producer, producer_rank, producer_parallel)
    by_heads: dict[tuple[int, ...] | None, tuple[dict[str, None], set[int]]] = {}
    for group, other, layers in meetings(consumer.groups, producer.groups):
        differences = group.differences(other)
        if differences:
            raise _incompatible(differences)
        kv_heads = group.agreed_heads(other)
        for source in _ask(
            read_sources, kv_heads, consumer_rank, consumer_parallel, producer_parallel
        ):
            if source.rank == producer_rank[1]:
                key = None if kv_heads is None else tuple(source.heads)
                names, union = by_heads.setdefault(key, ({}, set()))
                names[group.name] = None
                union.update(layers)
    return [
        TransferSlice(tuple(names), heads, tuple(sorted(layers)))
        for heads, (names, layers) in by_heads.items()
    ]


def check_complete(consumer: Geometry, producers: Sequence[Geometry]) -> None:
    """Raise unless the producer's ranks together hold all of the consumer's layers."""
    held: dict[str, set[int]] = {}
    for geometry in producers:
        for group in geometry.groups:
            held.setdefault(group.kind, set()).update(group.layers)
    differences: list[tuple[str, object, object]] = [
        (f"{group.name}.layers", group.layers, tuple(sorted(held.get(group.kind, ()))))
        for group in consumer.groups
        if not set(group.layers) <= held.get(group.kind, set())
    ]
    if differences:
        raise _incompatible(differences)


def _check_ranks(side: str, geometry: Geometry, rank: Rank, parallel: ParallelSizes) -> None:
    for group in geometry.groups:
        if group.kv_heads is not None and group.tp != (rank[1], parallel.tp):
            raise _incompatible(
                [(f"{group.name}.tp of the {side} side", group.tp, (rank[1], parallel.tp))]
            )


def _incompatible(differences: list[tuple[str, object, object]]) -> IncompatibleLayoutError:
    listed = "; ".join(f"{name} is {a!r} here and {b!r} there" for name, a, b in differences)
    return IncompatibleLayoutError(
        f"the caches of the two engines do not fit: {listed}", differences=differences
    )
