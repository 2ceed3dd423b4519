"""The heads, layers and tokens that a rank holds, and which ranks read from which.

Integers only; no tensors or addresses. A cache that every rank holds whole (``kv_heads=None``, an
MLA latent) counts as one head that all ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from pynixlkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Reader",
    "Source",
    "expected_readers",
    "held_heads",
    "held_layers",
    "held_tokens",
    "read_sources",
    "release_targets",
]


@dataclass(frozen=True)
class Source:
    """A remote rank to read from, and what to read there."""

    rank: int
    """Tensor-parallel rank in the remote group."""
    heads: range
    """Global KV heads to read from it, never empty; ``range(0, 1)`` for a replicated cache."""


@dataclass(frozen=True)
class Reader:
    """A remote rank that a producer must hear from before it may reuse its blocks."""

    rank: int
    """Tensor-parallel rank in the consumers' group."""
    heads: range
    """Global KV heads that it reads here; none if it only releases the request."""


def held_heads(rank: int, size: int, kv_heads: int | None) -> range:
    """Return the global KV heads that a tensor-parallel rank holds.

    Parameters
    ----------
    rank : int
        Rank in its group, from 0 to ``size - 1``.
    size : int
        Number of ranks in the group, at least 1.
    kv_heads : int or None
        KV heads of the whole model, at least 1; None for a cache that every rank holds whole.

    Returns
    -------
    range
        Consecutive global head numbers: ``kv_heads / size`` of them, or, in a group larger than
        the number of heads, the one head ``floor(rank * kv_heads / size)``.

    Raises
    ------
    LayoutError
        If a number is out of range, or if `size` is smaller than `kv_heads` and does not divide it:
        engines differ in how they cut such models.
    """
    _check_rank(rank, size)
    if kv_heads is None:
        return range(1)
    _check_count("kv_heads", kv_heads)
    if size > kv_heads:
        head = rank * kv_heads // size
        return range(head, head + 1)
    if kv_heads % size:
        raise LayoutError(
            f"{kv_heads} KV heads do not divide over {size} ranks ({kv_heads} % {size} = "
            f"{kv_heads % size}); use a size that divides {kv_heads}, or one larger than it, "
            "where heads are replicated"
        )
    share = kv_heads // size
    return range(rank * share, (rank + 1) * share)


def held_layers(
    rank: int, size: int, num_layers: int, *, stages: Sequence[int] | None = None
) -> range:
    """Return the global layers that a pipeline stage holds.

    Parameters
    ----------
    rank : int
        Stage, from 0 to ``size - 1``.
    size : int
        Number of stages, at least 1.
    num_layers : int
        Layers of the whole model, at least 1.
    stages : sequence of int, shape (size,), optional
        Layers in each stage, each at least 0, adding up to `num_layers`. Required if `size` does
        not divide `num_layers`, since the defaults of engines differ.

    Raises
    ------
    LayoutError
        If a number is out of range, or if `stages` does not fit `size` and `num_layers` or is
        required and missing.
    """
    _check_rank(rank, size)
    _check_count("num_layers", num_layers)
    if stages is None:
        if num_layers % size:
            raise LayoutError(
                f"{num_layers} layers do not divide over {size} pipeline stages ({num_layers} % "
                f"{size} = {num_layers % size}); say how many each stage has with stages=[...]"
            )
        stages = [num_layers // size] * size
    for stage, count in enumerate(stages):
        _check_count(f"stages[{stage}]", count, at_least=0)
    if len(stages) != size or sum(stages) != num_layers:
        raise LayoutError(
            f"stages lists {len(stages)} stages with {sum(stages)} layers in all; expected "
            f"{size} stages with {num_layers}"
        )
    first = sum(stages[:rank])
    return range(first, first + stages[rank])


def held_tokens(rank: int, size: int, num_tokens: int, *, interleave: int = 1) -> list[range]:
    """Return the token positions that a rank holds under decode context parallelism.

    They are runs of consecutive positions in ascending order, none empty.

    Parameters
    ----------
    rank : int
        Rank in the context-parallel group, from 0 to ``size - 1``. In a tensor-parallel group whose
        ranks share tokens `size` ways, it is the tensor-parallel rank modulo `size`.
    size : int
        Number of ranks that the tokens are dealt to, at least 1.
    num_tokens : int
        Tokens of the sequence, at least 0.
    interleave : int
        Consecutive tokens dealt to one rank before the next rank's turn, at least 1.

    Raises
    ------
    LayoutError
        If a number is out of range.
    """
    _check_rank(rank, size)
    _check_count("num_tokens", num_tokens, at_least=0)
    _check_count("interleave", interleave)
    if size == 1:
        return [range(num_tokens)] if num_tokens else []
    starts = range(rank * interleave, num_tokens, size * interleave)
    return [range(start, min(start + interleave, num_tokens)) for start in starts]


def read_sources(
    kv_heads: int | None,
    *,
    local: tuple[int, int],
    remote_size: int,
    local_dcp: int = 1,
    remote_dcp: int = 1,
) -> list[Source]:
    """Return the remote ranks that a local rank reads from, so that all it holds arrives once.

    The local ranks that want the same heads are dealt evenly, in order, to the remote ranks that
    hold copies.

    Parameters
    ----------
    kv_heads : int or None
        KV heads of the whole model, at least 1; None for a cache that every rank holds whole.
    local : (int, int)
        Rank and size of the local tensor-parallel group.
    remote_size : int
        Size of the remote tensor-parallel group, at least 1.
    local_dcp, remote_dcp : int
        How many ways each group shares the tokens of a head among the ranks that hold it (decode
        context parallelism), at least 1; both by the same interleave.

    Returns
    -------
    list of Source
        Ascending by rank, one for each rank. Each head of the local rank is in exactly one source,
        or, under remote context parallelism, in one for each share of its tokens. A source gives
        its own share, so the sources of a head never overlap.

    Raises
    ------
    LayoutError
        If a number is out of range, if the heads cannot be cut into the group sizes (see
        `held_heads`), or if a group shares tokens more ways than it has copies of each head.

    See Also
    --------
    release_targets : The remote ranks to notify after reading, possibly more.
    expected_readers : The producer's view.
    """
    rank, size = local
    _check_rank(rank, size)
    reads = _deal(kv_heads, _Group(size, local_dcp), _Group(remote_size, remote_dcp))
    return [Source(producer, heads) for (consumer, producer), heads in reads if consumer == rank]


def release_targets(
    kv_heads: int | None,
    *,
    local: tuple[int, int],
    remote_size: int,
    local_dcp: int = 1,
    remote_dcp: int = 1,
) -> list[int]:
    """Return the remote ranks that a local rank must notify when it is done with a request.

    They are, ascending, the ranks that it reads from and its share of the ranks without readers,
    which hold blocks for the request too and would keep them until their lease expires. Each remote
    rank is told by as many local ranks as `expected_readers` lists for it. The parameters are those
    of `read_sources`.
    """
    rank, size = local
    _check_rank(rank, size)
    consumers, producers = _Group(size, local_dcp), _Group(remote_size, remote_dcp)
    reads = [pair for pair, _ in _deal(kv_heads, consumers, producers)]
    is_read = {producer for _, producer in reads}
    notified = {producer for consumer, producer in reads if consumer == rank}
    for producer in set(range(remote_size)) - is_read:
        if _notifier(producer, consumers, producers) == rank:
            notified.add(producer)
    return sorted(notified)


def expected_readers(
    kv_heads: int | None,
    *,
    local: tuple[int, int],
    remote_size: int,
    local_dcp: int = 1,
    remote_dcp: int = 1,
) -> list[Reader]:
    """Return the consumer ranks that a producer rank must hear from before it reuses its blocks.

    The local rank is the producer and the remote group reads; otherwise the parameters are those of
    `read_sources`. Readers ascend by rank. A rank without readers gets one without heads, which
    only releases the request.

    Examples
    --------
    Eight producers of an MLA cache and one consumer: it reads one and notifies all.

    >>> [reader.heads for reader in expected_readers(None, local=(0, 8), remote_size=1)]
    [range(0, 1)]
    >>> [reader.heads for reader in expected_readers(None, local=(5, 8), remote_size=1)]
    [range(0, 0)]
    >>> release_targets(None, local=(0, 1), remote_size=8)
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    rank, size = local
    _check_rank(rank, size)
    consumers, producers = _Group(remote_size, remote_dcp), _Group(size, local_dcp)
    readers = [
        Reader(consumer, heads)
        for (consumer, producer), heads in _deal(kv_heads, consumers, producers)
        if producer == rank
    ]
    return readers or [Reader(_notifier(rank, consumers, producers), range(0))]


@dataclass(frozen=True)
class _Group:
    """A tensor-parallel group of `size` ranks that shares the tokens of a head `dcp` ways."""

    size: int
    dcp: int

    def holders(self, kv_heads: int | None) -> dict[tuple[int, int], list[int]]:
        """Return the ranks, ascending, that hold each (head, share of its tokens)."""
        _check_count("the size of a group", self.size)
        _check_count("context parallelism", self.dcp)
        holders: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.size):
            for head in held_heads(rank, self.size, kv_heads):
                holders.setdefault((head, rank % self.dcp), []).append(rank)
        shares = len({head for head, _ in holders}) * self.dcp
        if self.size % self.dcp or len(holders) != shares:
            raise LayoutError(
                f"{self.size} ranks cannot share the tokens of {kv_heads or 'replicated'} KV heads "
                f"{self.dcp} ways: {shares} shares of heads need a rank each and {len(holders)} "
                f"have one; use a number of ways that divides the copies of each head"
            )
        return holders


def _deal(
    kv_heads: int | None, consumers: _Group, producers: _Group
) -> list[tuple[tuple[int, int], range]]:
    """Return the heads of each (consumer, producer) pair that has some."""
    wanted = consumers.holders(kv_heads)
    common = gcd(consumers.dcp, producers.dcp)
    reads: dict[tuple[int, int], list[int]] = {}
    for (head, share), holders in producers.holders(kv_heads).items():
        takers = sorted(
            rank
            for (wanted_head, wanted_share), ranks in wanted.items()
            # Two deals of the same tokens meet where the shares agree modulo `common`.
            if wanted_head == head and (wanted_share - share) % common == 0
            for rank in ranks
        )
        for i, taker in enumerate(takers):
            holder = holders[i * len(holders) // len(takers)]
            reads.setdefault((taker, holder), []).append(head)
    # A rank with several heads is the only holder of each, so its reads form one range.
    return sorted(
        ((pair, range(min(heads), max(heads) + 1)) for pair, heads in reads.items()),
        key=lambda read: read[0],
    )


def _notifier(producer: int, consumers: _Group, producers: _Group) -> int:
    """Return the consumer that notifies a producer rank without readers."""
    return producer * consumers.size // producers.size


def _check_rank(rank: int, size: int) -> None:
    _check_count("the size of a group", size)
    _check_count("rank", rank, at_least=0)
    if rank >= size:
        raise LayoutError(f"rank {rank} is not in a group of {size}; ranks go from 0 to {size - 1}")


def _check_count(name: str, value: int, *, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayoutError(f"{name} is {value!r}; expected an int")
    if value < at_least:
        raise LayoutError(f"{name} is {value}; expected at least {at_least}")
