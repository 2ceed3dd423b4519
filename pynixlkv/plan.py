"""From two geometries and two block tables to the byte ranges to move.

A `TransferPlan` is made once per pair of ranks and used for every transfer between them. The
arithmetic is in csrc/kv; this module checks arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from pynixlkv import _kernels, _native
from pynixlkv._arrays import block_ids, is_integer, position
from pynixlkv.digest import make_scope, sample_units
from pynixlkv.errors import PlanError
from pynixlkv.geometry import Geometry, for_group, meetings, runs
from pynixlkv.types import MemoryType, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from pynixlkv.digest import Digest, DigestScope
    from pynixlkv.geometry import Group, KVCache

    _GroupTables = tuple[NDArray[np.int64], NDArray[np.int64], int, int, int]
    _Pair = tuple[Group, Group, list[int] | None]
    """Groups that meet, and the layers that move; None for all."""

__all__ = ["Coverage", "GroupDescription", "PlanDescription", "TransferPlan", "physical_blocks"]

_T = TypeVar("_T")


def _check_out(out: object) -> None:
    """Check what C++ relies on: it writes to these arrays as rows of three aligned numbers."""
    if not isinstance(out, tuple) or len(out) != 2:
        seen = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
        raise PlanError(f"out is {seen}; expected a tuple of two arrays, (local, remote)")
    for side, array in zip(("local", "remote"), out, strict=True):
        if not isinstance(array, np.ndarray):
            seen = type(array).__name__
        else:
            flags = array.flags
            faults = {
                "not C-contiguous": not flags.c_contiguous,
                "not aligned": not flags.aligned,
                "read-only": not flags.writeable,
            }
            wrong = [fault for fault, is_so in faults.items() if is_so]
            if array.dtype == np.uint64 and array.shape[1:] == (3,) and not wrong:
                continue
            seen = ", ".join([f"{array.dtype} of shape {array.shape}", *wrong])
        raise PlanError(
            f"the {side} array of out is {seen}; expected uint64 of shape (n, 3), C-contiguous, "
            "aligned and writable: make it with np.empty((n, 3), np.uint64)"
        )
    if np.may_share_memory(*out):
        raise PlanError("the arrays of out overlap; give the local and the remote rows one each")


@dataclass(frozen=True)
class Coverage:
    """What two block tables of a group have in common."""

    tokens: range
    """Token positions below ``num_tokens`` that both tables cover (blocks, for state)."""
    local: range
    """Indices into the local table of the blocks that hold these tokens."""
    remote: range
    """Indices into the remote table of the blocks that hold these tokens."""
    local_only: tuple[int, ...]
    """Indices of the other local blocks, left to compute."""
    remote_only: tuple[int, ...]
    """Indices of the other remote blocks, left unread."""


@dataclass(frozen=True)
class GroupDescription:
    """Cost of one pair of blocks of a group."""

    group: str
    bytes_per_block: int
    """Bytes moved per pair of blocks; per pair of the smaller blocks if the sizes differ."""
    runs_per_block: int
    """Contiguous runs of bytes, before blocks are merged and long runs cut."""
    shortest_run: int
    """Bytes of the shortest run."""
    longest_run: int
    """Bytes of the longest run."""
    best_runs_per_block: int
    """Runs in the best layout, where all that a peer wants of a block is contiguous."""


@dataclass(frozen=True)
class PlanDescription:
    """Cost of a plan per block, and of one transfer if block tables were given."""

    groups: tuple[GroupDescription, ...]
    num_bytes: int = 0
    """Bytes that the tables move; 0 without tables."""
    num_runs: int = 0
    """Runs before adjacent ones are merged and long ones cut."""
    num_descriptors: int = 0
    """Descriptors after merging and cutting."""

    def __str__(self) -> str:
        lines = [
            f"{g.group}: {g.bytes_per_block} bytes per block in {g.runs_per_block} runs of "
            f"{g.shortest_run} to {g.longest_run} bytes; {g.best_runs_per_block} in the best layout"
            for g in self.groups
        ]
        if self.num_runs:
            lines.append(
                f"{self.num_bytes} bytes: {self.num_runs} runs -> "
                f"{self.num_descriptors} descriptors"
            )
        return "\n".join(lines)


def physical_blocks(logical_blocks: ArrayLike, ratio: int) -> NDArray[np.int64]:
    """Return the blocks of the attention kernels for the larger blocks of an engine.

    `ratio` is the number of physical blocks per logical block. In token order, logical block b
    becomes ``b * ratio`` to ``b * ratio + ratio - 1``.

    Raises
    ------
    PlanError
        If the table is not one of integers, or the ratio is below 1.
    """
    if ratio < 1:
        raise PlanError(f"ratio is {ratio}; expected physical blocks per logical one, 1 or more")
    return _kernels.physical_blocks(block_ids("logical_blocks", logical_blocks), ratio)


class TransferPlan:
    """How to move blocks between a local and a remote cache.

    Parameters
    ----------
    local, remote : Geometry
        The two sides. Groups meet by their kind where they have layers in common; layers, heads and
        elements meet by global index.
    heads : iterable of int, optional
        Global KV heads to move, held by both sides: `Source.heads` of
        `pynixlkv.topology.read_sources`. By default all that the local side holds. Groups that
        every rank holds whole always move whole.
    layers : iterable of int, optional
        Global layers to move, held by both sides. By default all that the local side holds.
    groups : iterable of str, optional
        Names of the local groups to move, of kinds that both sides hold. By default all; both sides
        must then have the same kinds.
    max_bytes : int, optional
        Longest descriptor in bytes, at least 1; longer runs are cut. By default no limit.

    Raises
    ------
    PlanError
        If the sides cannot be matched (dtype, head size, K and V, heads, layers, …; the message
        names field and values), if something is wanted that the remote side lacks, or if one side
        mixes kinds of memory.

    Notes
    -----
    Immutable and safe from several threads. Making a plan costs time in proportion to layers and
    runs per block, not to the size of the pools.
    """

    __slots__ = (
        "__weakref__",
        "_heads",
        "_native",
        "_pairs",
        "_sides",
        "groups",
        "local",
        "max_bytes",
        "memory",
        "remote",
    )

    local: Geometry
    remote: Geometry
    groups: tuple[str, ...]
    """Names of the local groups that move, in the plan's order."""
    max_bytes: int | None
    memory: tuple[MemoryType, MemoryType]
    """Kind of memory of the local and the remote side."""

    def __init__(
        self,
        local: Geometry,
        remote: Geometry,
        *,
        heads: Iterable[int] | None = None,
        layers: Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        for side, geometry in (("local", local), ("remote", remote)):
            if not isinstance(geometry, Geometry):
                raise PlanError(
                    f"{side} is a {type(geometry).__name__}; expected a Geometry, such as "
                    "cache.geometry"
                )
        self.local = local
        self.remote = remote
        self.max_bytes = max_bytes
        self.groups = _select_groups(local, remote, groups)
        self._heads = None if heads is None else _numbers("heads", heads)
        wanted = None if layers is None else _numbers("layers", layers)
        self._pairs = _pair_groups(local.select(self.groups), remote.groups, wanted)
        self._sides = sides = [
            [here for here, _, _ in self._pairs],
            [there for _, there, _ in self._pairs],
        ]
        if self._heads is not None:
            _check_heads(sides, self._heads)
        if wanted is not None:
            _check_layers(sides, wanted)
        self.memory = (
            _memory("local", local, sides[0]),
            _memory("remote", remote, sides[1]),
        )
        if max_bytes is not None and not (is_integer(max_bytes) and max_bytes >= 1):
            raise PlanError(
                f"max_bytes is {max_bytes!r}; expected an integer from 1 on, or None for no limit"
            )
        self._native = _native.kv.Plan(
            local.with_groups(sides[0])._native,
            remote.with_groups(sides[1])._native,
            local_groups=[local.names.index(group.name) for group in sides[0]],
            remote_groups=[remote.names.index(group.name) for group in sides[1]],
            max_bytes=None if max_bytes is None else min(int(max_bytes), 2**60),
            heads=None if self._heads is None else _intervals(self._heads),
            layers=[
                [(0, 2**60 - 1)] if layers is None else _intervals(layers)
                for _, _, layers in self._pairs
            ],
        )

    def __repr__(self) -> str:
        local, remote = self.memory
        return f"<TransferPlan {', '.join(self.groups)}: {local.name}, {remote.name}>"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Names of the local and remote groups that meet; a group may meet several."""
        return [(here.name, there.name) for here, there, _ in self._pairs]

    def tables(
        self,
        local_blocks: ArrayLike | Mapping[str, ArrayLike],
        remote_blocks: ArrayLike | Mapping[str, ArrayLike],
        num_tokens: int | Mapping[str, int] | None = None,
        local_start: int | Mapping[str, int] = 0,
        remote_start: int | Mapping[str, int] = 0,
    ) -> _native.kv.BlockTables:
        """Check block tables, given as for `descriptors`, and copy them for one transfer."""
        return self._native.tables(
            self._tables(local_blocks, remote_blocks, num_tokens, local_start, remote_start)
        )

    def _tables(
        self,
        local_blocks: ArrayLike | Mapping[str, ArrayLike],
        remote_blocks: ArrayLike | Mapping[str, ArrayLike],
        num_tokens: int | Mapping[str, int] | None,
        local_start: int | Mapping[str, int],
        remote_start: int | Mapping[str, int],
    ) -> list[_GroupTables]:
        sides = self._sides
        rows = zip(
            sides[0],
            _per_table("local_blocks", local_blocks, sides[0]),
            _per_table("remote_blocks", remote_blocks, sides[1]),
            _per_group("num_tokens", num_tokens, sides[0], None),
            _per_group("local_start", local_start, sides[0], 0),
            _per_group("remote_start", remote_start, sides[1], 0),
            strict=True,
        )
        return [_group_tables(*row) for row in rows]

    def descriptors(
        self,
        local_blocks: ArrayLike | Mapping[str, ArrayLike],
        remote_blocks: ArrayLike | Mapping[str, ArrayLike],
        *,
        num_tokens: int | Mapping[str, int] | None = None,
        local_start: int | Mapping[str, int] = 0,
        remote_start: int | Mapping[str, int] = 0,
        operation: Operation = Operation.READ,
        out: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the descriptors of one transfer.

        They cover every element that both sides hold, of the plan's heads and layers, at token
        positions that both tables cover: from the later of the two starts to `num_tokens`.

        Parameters
        ----------
        local_blocks, remote_blocks : array_like of int, shapes (n,) and (m,), or mapping
            Physical block numbers of one sequence in token order, each below the side's
            ``num_blocks``. Entry i of a table holds the positions from ``start + i * size`` on,
            where size is the side's tokens per block (times its context-parallel size). A plan
            of several tables takes a mapping of the side's group or table names to tables.
        num_tokens : int or mapping of str to int, optional
            Valid tokens of the sequence, counted from position 0; later positions do not move. Both
            tables must reach it. Without it, the tables must end together: all but the last block
            of each lie before the end of the other table.
        local_start, remote_start : int or mapping of str to int
            Token position of the first block of each table, a multiple of the tokens that one
            block stands for. Earlier positions that only one table covers do not move.
        operation : Operation
            READ writes local blocks, WRITE remote ones; the written table may hold no block twice.
        out : tuple of two ndarrays of uint64, shapes (n, 3), optional
            Where to write the local and the remote rows: C-contiguous, aligned, writable and
            apart from each other. Each needs room for the rows before merging: ``num_runs`` of
            `describe`, plus ``num_bytes // max_bytes`` if the plan has `max_bytes`. What lies
            behind the returned rows is undefined. Spares callers that repeat the page faults of
            fresh memory.

        Returns
        -------
        local, remote : ndarray of uint64, shape (k, 3)
            Address, length in bytes, device number. Row i of one side pairs with row i of the
            other and has the same length. Local addresses ascend; ranges that adjoin on both
            sides are one, whatever the order of the tables; none is longer than `max_bytes`, and
            only the last piece of a cut run is shorter. With `out`, views of its first k rows.

        Raises
        ------
        PlanError
            If a block number is out of range or written twice, a start is not at a block's
            boundary, the tables do not cover the wanted tokens (see `coverage`), an argument has
            the wrong type, or `out` does not fit, and is then unchanged; the message names side,
            index, value and limit.

        Notes
        -----
        State groups have no positions: their tables pair up entry by entry and must be equally
        long. An opaque token axis rounds `num_tokens` up to whole blocks.

        Releases the GIL. Time and memory are linear in blocks plus runs before merging.
        """
        if not isinstance(operation, Operation):
            raise PlanError(f"operation is {operation!r}; expected Operation.READ or WRITE")
        tables = self.tables(local_blocks, remote_blocks, num_tokens, local_start, remote_start)
        tables.check_written_once(remote=operation == Operation.WRITE)
        if out is None:
            return tables.descriptors()
        _check_out(out)
        count = tables.descriptors_into(*out)
        return out[0][:count], out[1][:count]

    def coverage(
        self,
        local_blocks: ArrayLike,
        remote_blocks: ArrayLike,
        *,
        group: str | None = None,
        num_tokens: int | None = None,
        local_start: int = 0,
        remote_start: int = 0,
    ) -> Coverage:
        """Return the tokens that two tables share, and the blocks that only one side has.

        The arguments are those of `descriptors`, for one group. `group` may be left out if the
        plan has only one. The tables may have any length and need not reach `num_tokens`.

        Raises
        ------
        PlanError
            If a block number or start is out of range, or the group is not in the plan.
        """
        if group is None and len(self.groups) > 1:
            raise PlanError(f"say which group: the plan has {list(self.groups)}")
        name = self.groups[0] if group is None else group
        if name not in self.groups:
            raise PlanError(f"group {name!r} is not in the plan, which has {list(self.groups)}")
        names = [here.name for here, _, _ in self._pairs]
        at = names.index(name)
        tables = _group_tables(
            self._pairs[at][0], local_blocks, remote_blocks, num_tokens, local_start, remote_start
        )
        tokens, local, remote = (range(*bounds) for bounds in self._native.overlap(at, tables))
        return Coverage(
            tokens,
            local,
            remote,
            tuple(i for i in range(len(tables[0])) if i not in local),
            tuple(i for i in range(len(tables[1])) if i not in remote),
        )

    def describe(
        self,
        local_blocks: ArrayLike | Mapping[str, ArrayLike] | None = None,
        remote_blocks: ArrayLike | Mapping[str, ArrayLike] | None = None,
        *,
        num_tokens: int | Mapping[str, int] | None = None,
        local_start: int | Mapping[str, int] = 0,
        remote_start: int | Mapping[str, int] = 0,
    ) -> PlanDescription:
        """Return what the plan costs per block, and for the tables that are given.

        The arguments are those of `descriptors`; both tables are given or neither. With tables,
        costs as much as `descriptors`. The ``str()`` of the result is for people.
        """
        groups = []
        for i, (here, _, _) in enumerate(self._pairs):
            runs = self._native.block_runs(i)
            num_bytes = sum(runs)
            groups.append(
                GroupDescription(
                    group=here.name,
                    bytes_per_block=num_bytes,
                    runs_per_block=len(runs),
                    shortest_run=min(runs, default=0),
                    longest_run=max(runs, default=0),
                    best_runs_per_block=-(-num_bytes // (self.max_bytes or max(num_bytes, 1))),
                )
            )
        if (local_blocks is None) != (remote_blocks is None):
            raise PlanError("describe takes both block tables or neither")
        if local_blocks is None or remote_blocks is None:
            return PlanDescription(tuple(groups))
        tables = self.tables(local_blocks, remote_blocks, num_tokens, local_start, remote_start)
        return PlanDescription(tuple(groups), *tables.totals(), len(tables.descriptors()[0]))

    def digest_scopes(
        self,
        local_blocks: ArrayLike | Mapping[str, ArrayLike],
        remote_blocks: ArrayLike | Mapping[str, ArrayLike],
        *,
        num_tokens: int | Mapping[str, int] | None = None,
        local_start: int | Mapping[str, int] = 0,
        remote_start: int | Mapping[str, int] = 0,
        unit: int | None = None,
        fraction: float = 1.0,
        seed: int = 0,
    ) -> tuple[DigestScope, ...]:
        """Return what both sides digest to verify one transfer: all that it moves, or a sample.

        Groups in which nothing moves are left out.

        Parameters
        ----------
        local_blocks, remote_blocks, num_tokens, local_start, remote_start
            The arguments of `descriptors`.
        unit : int, optional
            Tokens per digest; by default those of the larger of the two sides' blocks.
        fraction : float
            Share of the units to digest, above 0; at least one unit of each group.
        seed : int
            Chooses the units. Keep it from the other side until the bytes have moved.
        """
        tables = self._tables(local_blocks, remote_blocks, num_tokens, local_start, remote_start)
        scopes = []
        for i, (here, there, layers) in enumerate(self._pairs):
            tokens = range(*self._native.overlap(i, tables[i])[0])
            if not tokens:
                continue
            pair = (here, there)
            whole = make_scope(
                here,
                tokens,
                layers=_common(here.layers, layers),
                heads=_common(here.heads, None if here.kv_heads is None else self._heads),
                unit=max(group.block_tokens for group in pair) if unit is None else unit,
                turns=tuple((*group.dcp, group.interleave) for group in pair if group.dcp[1] > 1),
            )
            units = sample_units(range(whole.units[0], whole.units[-1] + 1), fraction, seed + i)
            scopes.append(msgspec.structs.replace(whole, units=tuple(units)))
        return tuple(scopes)

    def verify(
        self,
        cache: KVCache,
        digest: Digest,
        blocks: ArrayLike | Mapping[str, ArrayLike],
        *,
        start: int | Mapping[str, int] = 0,
        scopes: Iterable[DigestScope] | None = None,
        peer: str = "",
    ) -> None:
        """Verify that local blocks hold what the other side digested.

        Parameters
        ----------
        cache : KVCache
            The local cache.
        digest : Digest
            What ``KVCache.digest(remote_blocks, scopes=scopes)`` returned on the other side.
        blocks, start
            The local tables of the transfer.
        scopes : iterable of DigestScope, optional
            What `digest` has to cover; by default whatever it covers.
        peer : str
            Name of the other side, for the error.

        Raises
        ------
        KVCorruptError
            If the bytes differ.
        PlanError
            If the digest covers something else, or what the local blocks do not hold.
        """
        expected = digest.scopes if scopes is None else tuple(scopes)
        cache.digest(blocks, start=start, scopes=expected).check(digest, peer=peer)


def _per_group(
    what: str, value: Mapping[str, _T] | _T, groups: list[Group], default: _T
) -> list[_T]:
    """Return what is given for each group; a mapping has some of the groups."""
    if not isinstance(value, Mapping):
        return [value] * len(groups)
    _check_names(what, value, groups)
    found = [for_group(value, group) for group in groups]
    return [default if each is None else each for each in found]


def _per_table(
    what: str, value: Mapping[str, ArrayLike] | ArrayLike, groups: list[Group]
) -> list[ArrayLike]:
    """Return the block table of each group."""
    if not isinstance(value, Mapping):
        if any(group.table != groups[0].table for group in groups):
            raise PlanError(
                f"{what} is one table, but the plan has groups {_names(groups)}; pass a mapping "
                "of group name to table"
            )
        if len(groups) == 1:
            return [value]
        value = {groups[0].table: value}
    _check_names(what, value, groups)
    found = [for_group(value, group) for group in groups]
    missing = [group.name for group, each in zip(groups, found, strict=True) if each is None]
    if missing:
        raise PlanError(f"{what} has no table for {missing}; every group of the plan needs one")
    first: dict[str, Group] = {}
    for group in groups:
        other = first.setdefault(group.name if group.name in value else group.table, group)
        if other.block_tokens != group.block_tokens:
            raise PlanError(
                f"{what} has one table for groups {other.name!r} and {group.name!r}, whose blocks "
                f"hold {other.block_tokens} and {group.block_tokens} tokens; pass one for each"
            )
    return [each for each in found if each is not None]


def _check_names(what: str, value: Mapping[str, object], groups: list[Group]) -> None:
    known = {name for group in groups for name in (group.name, group.table)}
    unknown = [name for name in value if name not in known]
    if unknown:
        raise PlanError(f"{what} names {unknown}; the plan has groups {_names(groups)}")


def _names(groups: list[Group]) -> list[str]:
    return list(dict.fromkeys(group.name for group in groups))


def _select_groups(
    local: Geometry, remote: Geometry, groups: Iterable[str] | None
) -> tuple[str, ...]:
    names = local.names
    here, there = ([group.kind for group in side.groups] for side in (local, remote))
    wanted = names if groups is None else list(dict.fromkeys(groups))
    if groups is None and set(here) != set(there):
        raise PlanError(
            f"the groups differ: local has {here}, remote {there}; select common ones with groups="
        )
    missing = [name for name in wanted if name not in names]
    if missing:
        raise PlanError(f"groups {missing} are not in the local cache, which has {names}")
    missing = [group.name for group in local.select(wanted) if group.kind not in there]
    if missing:
        raise PlanError(f"groups {missing} are not in the remote cache, which has {there}")
    if not wanted:
        raise PlanError(f"groups is empty; expected some of {names}")
    return tuple(wanted)


def _pair_groups(
    local: Sequence[Group], remote: Sequence[Group], wanted: list[int] | None
) -> list[_Pair]:
    """Pair the groups that hold the same of some wanted layers, with heads as both number them."""
    pairs: list[_Pair] = []
    for here in local:
        theirs = [there for there in remote if there.kind == here.kind]
        if len(theirs) == 1:
            pairs.append((here, theirs[0], wanted))
            continue
        left = _common(here.layers, wanted)
        found = [
            (there, common)
            for _, there, layers in meetings([here], theirs)
            if (common := _common(layers, wanted))
        ] or [(theirs[0], left)]
        left = [layer for layer in left if not any(layer in common for _, common in found)]
        found[0] = (found[0][0], sorted([*found[0][1], *left]))  # the plan reports what is missing
        pairs.extend((here, there, layers) for there, layers in found)
    differences = [
        f"{field} is {a!r} here and {b!r} there"
        for here, there, _ in pairs
        for field, a, b in here.differences(there)
    ]
    if differences:
        raise PlanError(f"the caches cannot be matched: {'; '.join(differences)}")
    heads = [here.agreed_heads(there) for here, there, _ in pairs]
    return [
        (here.with_heads(count), there.with_heads(count), layers)
        for (here, there, layers), count in zip(pairs, heads, strict=True)
    ]


def _check_heads(sides: list[list[Group]], wanted: list[int]) -> None:
    for side, groups in zip(("local", "remote"), sides, strict=True):
        # A cache without a head axis counts as one head if no group has such an axis.
        for group in [g for g in groups if g.kv_heads is not None] or groups:
            missing = [head for head in wanted if head not in group.heads]
            if missing:
                raise PlanError(
                    f"heads {missing} of group {group.name!r} are not held by the {side} side; "
                    f"rank {group.tp[0]} of {group.tp[1]} holds {group.heads.start} to "
                    f"{group.heads.stop - 1}"
                )


def _check_layers(sides: list[list[Group]], wanted: list[int]) -> None:
    for side, groups in zip(("local", "remote"), sides, strict=True):
        held = {layer for group in groups for layer in group.layers}
        missing = [layer for layer in wanted if layer not in held]
        if missing:
            raise PlanError(
                f"layers {missing} are not held by the {side} side, which has {sorted(held)}"
            )


def _numbers(what: str, values: object) -> list[int]:
    if not isinstance(values, Iterable):
        raise PlanError(f"{what} is {values!r}; expected integers, or None for all")
    numbers: list[int] = np.unique(block_ids(what, list(values))).tolist()
    if not numbers:
        raise PlanError(f"{what} is empty; leave it out to move all that the local side holds")
    return numbers


def _common(held: Iterable[int], selected: list[int] | None) -> list[int]:
    return [number for number in held if selected is None or number in selected]


def _intervals(numbers: list[int]) -> list[tuple[int, int]]:
    return [(numbers[at], numbers[at] + count) for at, count in runs(numbers) if count]


def _memory(side: str, geometry: Geometry, groups: list[Group]) -> MemoryType:
    kinds = {geometry.spans[region.span].memory for group in groups for region in group.regions}
    if len(kinds) > 1:
        raise PlanError(
            f"the {side} side mixes {sorted(kind.name for kind in kinds)} memory; make a plan for "
            "each kind with groups="
        )
    return kinds.pop()


def _group_tables(
    group: Group,
    local_blocks: ArrayLike,
    remote_blocks: ArrayLike,
    num_tokens: int | None,
    local_start: int,
    remote_start: int,
) -> _GroupTables:
    where = f"group {group.name!r}: "
    local = block_ids(f"{where}local_blocks", local_blocks)
    remote = block_ids(f"{where}remote_blocks", remote_blocks)
    positions = (
        -1 if num_tokens is None else position(f"{where}num_tokens", num_tokens),
        position(f"{where}local_start", local_start),
        position(f"{where}remote_start", remote_start),
    )
    return (local, remote, *(positions if group.block_size else (-1, 0, 0)))
