"""Which ranks of two engines have to do with each other, and what they exchange.

The same answers serve both directions: a consumer that reads and a producer that writes ask for the
same parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pynixlkv.errors import IncompatibleLayoutError
from pynixlkv.topology import expected_readers, read_sources, release_targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pynixlkv.connector.metadata import ParallelSizes, Rank
    from pynixlkv.geometry import Geometry, Group

__all__ = ["TransferSlice", "check_complete", "num_readers", "transfer_slices", "ranks_to_tell"]


@dataclass(frozen=True)
class TransferSlice:
    """What one rank of a consumer gets from one rank of a producer in one transfer.

    Parameters
    ----------
    groups : tuple of str
        Groups that take part.
    heads : tuple of int or None
        Global KV heads; None where no group has heads.
    layers : tuple of int
        Global layers.
    """

    groups: tuple[str, ...]
    heads: tuple[int, ...] | None
    layers: tuple[int, ...]


def ranks_to_tell(
    groups: Iterable[Group], rank: Rank, parallel: ParallelSizes, remote: ParallelSizes
) -> list[Rank]:
    """Return the producer's ranks that a consumer rank reads from, or only tells the end.

    All pipeline stages of a tensor-parallel rank are among them: which stages have layers in common
    is known only when their geometries are.
    """
    told = {
        target
        for group in groups
        for target in release_targets(
            group.kv_heads,
            local=(rank[1], parallel.tp),
            remote_size=remote.tp,
            local_dcp=parallel.dcp,
            remote_dcp=remote.dcp,
        )
    }
    return [(stage, target) for stage in range(remote.pp) for target in sorted(told)]


def num_readers(
    groups: Iterable[Group], rank: Rank, parallel: ParallelSizes, remote: ParallelSizes
) -> int:
    """Return how many ranks of a consumer a producer rank must hear from.

    It is `ranks_to_tell` seen from the other end.
    """
    readers = {
        reader.rank
        for group in groups
        for reader in expected_readers(
            group.kv_heads,
            local=(rank[1], parallel.tp),
            remote_size=remote.tp,
            local_dcp=parallel.dcp,
            remote_dcp=remote.dcp,
        )
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
    """Return what a consumer rank gets from a producer rank: usually one part, or nothing.

    Raises
    ------
    IncompatibleLayoutError
        If the groups of the two differ, or if a geometry is not the one of its rank.
    """
    _check_ranks("local", consumer, consumer_rank, consumer_parallel)
    _check_ranks("remote", producer, producer_rank, producer_parallel)
    theirs = {group.name: group for group in producer.groups}
    by_heads: dict[tuple[int, ...] | None, tuple[list[str], set[int]]] = {}
    for group in consumer.groups:
        other = theirs.get(group.name)
        if other is None:
            # A pipeline stage without layers of a kind does not describe that kind.
            continue
        differences = group.differences(other)
        if differences:
            raise _incompatible(differences)
        layers = set(group.layers) & set(other.layers)
        if not layers:
            continue
        for source in read_sources(
            group.kv_heads,
            local=(consumer_rank[1], consumer_parallel.tp),
            remote_size=producer_parallel.tp,
            local_dcp=consumer_parallel.dcp,
            remote_dcp=producer_parallel.dcp,
        ):
            if source.rank == producer_rank[1]:
                key = None if group.kv_heads is None else tuple(source.heads)
                names, union = by_heads.setdefault(key, ([], set()))
                names.append(group.name)
                union |= layers
    return [
        TransferSlice(tuple(names), heads, tuple(sorted(layers)))
        for heads, (names, layers) in by_heads.items()
    ]


def check_complete(consumer: Geometry, producers: Sequence[Geometry]) -> None:
    """Check that the producer's ranks together hold all layers that the consumer has.

    Raises
    ------
    IncompatibleLayoutError
        If layers or groups are missing.
    """
    held: dict[str, set[int]] = {}
    for geometry in producers:
        for group in geometry.groups:
            held.setdefault(group.name, set()).update(group.layers)
    differences: list[tuple[str, object, object]] = [
        (f"{group.name}.layers", group.layers, tuple(sorted(held.get(group.name, ()))))
        for group in consumer.groups
        if not set(group.layers) <= held.get(group.name, set())
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
