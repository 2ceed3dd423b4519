"""Digests of KV by logical coordinates: equal for equal contents, whatever the layout.

A digest is 64 bits for one layer, K or V, head and unit of consecutive tokens. `KVCache.digest`
computes digests from memory, and `Digest.check` compares those of two caches. Digests find
accidents; they do not stop an attacker, who could choose bytes with equal digests.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from pynixlkv import wire
from pynixlkv._arrays import MAX_POSITION, block_ids, first_outside, integers, position
from pynixlkv.errors import ConfigError, KVCorruptError, NativeError, PlanError
from pynixlkv.types import DigestMismatch, MemorySpan, MemoryType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from pynixlkv.geometry import Geometry, Group, KVCache, Region

__all__ = ["Digest", "DigestScope", "GroupDigest", "sample_units"]

_MAX_DIGESTS = 1 << 22  # of one group; 32 MiB
_STAGED_BYTES = 64 << 20
_SHOWN = 64  # of mismatches, in an error

_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Position = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITION)]
_Indices = Annotated[tuple[_Index, ...], msgspec.Meta(min_length=1, max_length=65536)]
_Turns = tuple[_Index, Annotated[int, msgspec.Meta(ge=1, lt=2**31)], _Count]


class DigestScope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the digests of a group cover. Both sides of a comparison use the same scope."""

    group: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    """Kind of the group, the same on both sides."""
    layers: _Indices
    """Global layers, ascending."""
    heads: _Indices
    """Global KV heads, ascending; 0 alone if every rank holds the whole cache."""
    kv_heads: _Count | None
    """KV heads of the model by which `heads` counts."""
    planes: _Count
    """2 for keys and values, 1 for one latent, any number for state."""
    tokens: tuple[_Position, _Position]
    """First position covered, and one past the last; positions of state are entries of a table."""
    unit: _Count
    """Tokens per digest: unit i is the positions from ``i * unit`` to ``(i + 1) * unit - 1``."""
    units: Annotated[tuple[_Position, ...], msgspec.Meta(min_length=1, max_length=_MAX_DIGESTS)]
    """Numbers of the units, ascending."""
    turns: Annotated[tuple[_Turns, ...], msgspec.Meta(max_length=2)] = ()
    """Only tokens of these ranks count: context-parallel rank, size and interleave."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Numbers of layers, of K and V, of heads and of units."""
        return len(self.layers), self.planes, len(self.heads), len(self.units)

    def __post_init__(self) -> None:
        first, stop = self.tokens
        every = range(first // self.unit, -(-stop // self.unit))
        numbers = (self.layers, self.heads, self.units)
        if (
            not all(numbers)
            or not all((np.diff(each) > 0).all() for each in numbers)
            or not (self.units[0] in every and self.units[-1] in every)
            or any(rank >= size for rank, size, _ in self.turns)
        ):
            raise PlanError(
                f"group {self.group!r}: a digest of tokens {first} to {stop - 1} in units "
                f"{_ranges(self.units)} of {self.unit}, layers {_ranges(self.layers)}, heads "
                f"{_ranges(self.heads)}, turns {self.turns} is impossible; expected ascending "
                f"numbers, and units from {every.start} to {every.stop - 1}"
            )
        if math.prod(self.shape) > _MAX_DIGESTS:
            raise PlanError(
                f"group {self.group!r} would have {self.shape} digests, more than {_MAX_DIGESTS}; "
                "use larger or fewer units"
            )


class GroupDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digests of a group."""

    scope: DigestScope
    data: bytes
    """`values` as little-endian bytes."""

    @property
    def values(self) -> NDArray[np.uint64]:
        """Digests by layer, K or V, head and unit, in the order of the scope."""
        return np.frombuffer(self.data, "<u8").reshape(self.scope.shape)

    def __post_init__(self) -> None:
        expected = 8 * math.prod(self.scope.shape)
        if len(self.data) != expected:
            raise PlanError(
                f"the digests of group {self.scope.group!r} are {len(self.data)} bytes; "
                f"expected {expected} for {self.scope.shape}"
            )


class Digest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digests of some blocks of a cache, by group; made by `KVCache.digest`."""

    groups: Annotated[tuple[GroupDigest, ...], msgspec.Meta(min_length=1, max_length=64)]

    @property
    def scopes(self) -> tuple[DigestScope, ...]:
        """What the digests cover."""
        return tuple(group.scope for group in self.groups)

    def to_bytes(self) -> bytes:
        """Serialise for a peer, in the envelope of `pynixlkv.wire`."""
        return wire.seal(self, "digest")

    @classmethod
    def from_bytes(cls, data: bytes) -> Digest:
        """Read what `to_bytes` wrote; raise `WireError` if it is damaged or impossible."""
        return wire.unseal(data, cls, "digest")

    def check(self, other: Digest, *, peer: str = "") -> None:
        """Compare these digests of the local bytes with a peer's.

        Raises
        ------
        KVCorruptError
            If digests differ. The error names group, layer, K or V, head and tokens.
        PlanError
            If the two do not have the same scopes.
        """
        if self.scopes != other.scopes:
            raise PlanError(
                f"digests of unlike scopes cannot be compared: {repr(self.scopes)[:500]} here, "
                f"{repr(other.scopes)[:500]} there"
            )
        texts: list[str] = []
        mismatches: list[DigestMismatch] = []
        total = 0
        for here, there in zip(self.groups, other.groups, strict=True):
            differs = here.values != there.values
            if differs.any():
                total += np.count_nonzero(differs)
                texts.append(_summary(here.scope, differs))
                mismatches.extend(_mismatches(here, there, differs))
        if total:
            raise KVCorruptError(
                f"the KV differs from that of {f'peer {peer!r}' if peer else 'the other side'}: "
                f"{'; '.join(texts)}; first {mismatches[0]}; see docs/guides/wrong-bytes.md",
                peer=peer,
                mismatches=tuple(mismatches[:_SHOWN]),
                num_mismatches=total,
            )


def sample_units(units: range, fraction: float, seed: int) -> list[int]:
    """Choose a fraction of units, at least one, ascending; equal seeds choose equally everywhere.

    Every unit has the same chance. A peer that does not know the seed cannot tell which are chosen.
    """
    if not 0 < fraction <= 1:
        raise PlanError(f"fraction is {fraction}; expected a number above 0 and at most 1")
    count = min(len(units), max(1, round(len(units) * fraction)))
    if count == len(units):
        return list(units)
    # Not numpy's generators, whose streams may change between versions.
    keys = _mix(np.arange(len(units), dtype=np.uint64) + _mix(np.array([seed % 2**64], np.uint64)))
    chosen = np.sort(np.argsort(keys, kind="stable")[:count])
    return [units[i] for i in chosen.tolist()]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((32, 0x6A09E667F3BCC909), (29, 0xBB67AE8584CAA73B)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(32))


def digest_cache(
    cache: KVCache,
    blocks: ArrayLike | Mapping[str, ArrayLike],
    start: int | Mapping[str, int],
    num_tokens: int | Mapping[str, int] | None,
    scopes: Iterable[DigestScope] | None,
    **wanted: Any,  # noqa: ANN401
) -> Digest:
    """Compute digests from the memory of a cache; see `KVCache.digest`, which has the options."""
    groups = cache.geometry.groups
    known = {group.table for group in groups}
    given = blocks if isinstance(blocks, Mapping) else dict.fromkeys(known, blocks)
    unknown = set(given) - known - {group.name for group in groups}
    if unknown or not given or (given is not blocks and len(known) > 1):
        raise PlanError(
            f"blocks must be a mapping of group name to table, or one table if there is one group; "
            f"the groups are {cache.geometry.names}"
        )
    groups = tuple(group for group in groups if group.name in given or group.table in given)
    tables = {
        group.name: block_ids(f"group {group.name!r}: blocks", _of(given, group))
        for group in groups
    }
    starts = {
        group.name: position("start", _of(start, group) or 0) if group.block_size else 0
        for group in groups
    }
    if scopes is None:
        scopes = [
            make_scope(
                group,
                _tokens_in(group, tables[group.name], starts[group.name], _of(num_tokens, group)),
                **{option: _of(value, group) for option, value in wanted.items()},
            )
            for group in groups
        ]
    digests = []
    for scope in scopes:
        of_kind = [group for group in groups if group.kind == scope.group]
        if not of_kind:
            raise PlanError(f"blocks has no table for group {scope.group!r} of a scope")
        group = next((g for g in of_kind if {*scope.layers} & {*g.layers}), of_kind[0])
        digests.append(_digest_group(cache, group, scope, tables[group.name], starts[group.name]))
    return Digest(tuple(digests))


def make_scope(
    group: Group,
    tokens: range,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    unit: int | None = None,
    units: Sequence[int] | None = None,
    turns: tuple[tuple[int, int, int], ...] = (),
) -> DigestScope:
    """Make the scope of a group's digests; what is None is all that the group holds."""
    size = group.block_tokens if unit is None else position("unit", unit)
    if not size:
        raise PlanError("unit is 0; expected tokens per digest")
    every = range(tokens.start // size, -(-tokens.stop // size))
    numbers = {
        what: tuple(np.sort(integers(what, chosen, PlanError)).tolist())
        for what, chosen in (
            ("layers", group.layers if layers is None else layers),
            ("heads", group.heads if heads is None else heads),
            ("units", every if units is None else units),
        )
    }
    return DigestScope(
        group=group.kind,
        kv_heads=group.kv_heads,
        planes=group.planes,
        tokens=(tokens.start, tokens.stop),
        unit=size,
        turns=turns,
        **numbers,
    )


def _of(value: Any, group: Group) -> Any:  # noqa: ANN401
    """Return what is given for a group."""
    from pynixlkv.geometry import for_group

    return for_group(value, group) if isinstance(value, Mapping) else value


def _tokens_in(group: Group, table: NDArray[np.int64], start: int, num_tokens: int | None) -> range:
    end = start + len(table) * group.block_tokens
    if num_tokens is not None and group.block_size:
        end = position("num_tokens", num_tokens)
        if "N" in group.opaque_axes:
            end = -(-end // group.block_tokens) * group.block_tokens
    return range(start, end)


def _digest_group(
    cache: KVCache, group: Group, scope: DigestScope, table: NDArray[np.int64], start: int
) -> GroupDigest:
    geometry = cache.geometry
    at = geometry.names.index(group.name)
    if scope.kv_heads != group.kv_heads and not group.has_exact_heads:
        group = group.with_heads(scope.kv_heads)
        geometry = geometry.with_groups([group])
    facts: dict[str, tuple[Iterable[int | None], Iterable[int | None]]] = {
        "layers": (scope.layers, group.layers),
        "heads": (scope.heads, group.heads),
        "kv_heads": ([scope.kv_heads], [group.kv_heads]),
        "planes": ([scope.planes], [group.planes]),
        "head_dim": ([region.dim.count for region in group.regions], [group.head_dim]),
    }
    for fact, (asked, held) in facts.items():
        if not set(asked) <= set(held):
            raise PlanError(
                f"group {group.name!r}: a digest of {fact} {list(asked)} cannot be made here, "
                f"where they are {list(held)}"
            )
    wrong = first_outside(table, 0, group.num_blocks - 1)
    if wrong is not None:
        raise PlanError(
            f"group {group.name!r}: block {table[wrong]} at index {wrong[0]} must be from 0 to "
            f"{group.num_blocks - 1}"
        )
    end = _tokens_in(group, table, start, None).stop
    if not start <= scope.tokens[0] < scope.tokens[1] <= end:
        raise PlanError(
            f"group {group.name!r}: tokens {scope.tokens[0]} to {scope.tokens[1] - 1} are not all "
            f"in the {len(table)} blocks, which hold {start} to {end - 1}"
        )
    kinds = {geometry.spans[region.span].memory for region in group.regions}
    if kinds == {MemoryType.DRAM}:
        values = geometry._native.digests(at, table, start, scope, scope.tokens)
    elif kinds == {MemoryType.VRAM}:
        values = _staged_digests(cache, group, scope, table, start)
    else:
        raise PlanError(
            f"group {group.name!r} is in {sorted(kind.name for kind in kinds)} memory; digests "
            "need one kind, DRAM or VRAM"
        )
    return GroupDigest(scope, values.astype("<u8", copy=False).tobytes())


# ---- device memory


def _staged_digests(
    cache: KVCache, group: Group, scope: DigestScope, table: NDArray[np.int64], start: int
) -> NDArray[np.uint64]:
    """Digest host copies of the blocks that the scope needs, some blocks of a region at a time."""
    values = np.zeros(scope.shape, np.uint64)
    entries = _entries(group, scope, len(table), start)
    for region in group.regions:
        layers = range(region.layer.start, region.layer.start + region.layer.count)
        rows = [i for i, layer in enumerate(scope.layers) if layer in layers]
        axes = (region.layer, region.kv, region.head, region.token, region.dim)
        block_bytes = group.element_bytes * math.prod(axis.count for axis in axes)
        step = max(1, _STAGED_BYTES // block_bytes)
        for at in range(0, len(entries) if rows else 0, step):
            chunk = entries[at : at + step]
            geometry, _memory = _copy_to_host(cache, group, region, table[chunk])
            staged = np.zeros_like(table)
            staged[chunk] = np.arange(len(chunk))
            first, last = (start + group.block_tokens * int(entry) for entry in chunk[[0, -1]])
            tokens = (
                max(scope.tokens[0], first),
                min(scope.tokens[1], last + group.block_tokens),
            )
            # Sums of parts: units that a chunk cuts, or has nothing of, need no care.
            values += geometry._native.digests(0, staged, start, scope, tokens)
    return values


def _entries(group: Group, scope: DigestScope, num_entries: int, start: int) -> NDArray[np.int64]:
    """Return the indices of the table's entries that hold tokens of a scope's units."""
    first = start + group.block_tokens * np.arange(num_entries)
    units = np.array(scope.units)
    next_unit = units[np.searchsorted(units, first // scope.unit).clip(max=len(units) - 1)]
    reached = (next_unit + 1) * scope.unit > first
    return np.flatnonzero(reached & (next_unit * scope.unit < first + group.block_tokens))


def as_torch(cache: KVCache, group: Group, region: Region) -> Any:  # noqa: ANN401
    """Return the device memory of a region as a torch tensor, which can copy it."""
    owner: Any = cache.owner_of(region, group.element_bytes)
    torch = sys.modules.get("torch")
    if torch is None:
        raise ConfigError(
            f"digests of a {type(owner).__name__} in device memory need torch: import it, or set "
            "checksums='off' and self_test=False"
        )
    if isinstance(owner, torch.Tensor):
        return owner
    # Without its number torch would copy the whole to the device that is current.
    return torch.as_tensor(owner, device=f"cuda:{cache.geometry.spans[region.span].device}")


_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _copy_to_host(
    cache: KVCache, group: Group, region: Region, blocks: NDArray[np.int64]
) -> tuple[Geometry, object]:
    """Copy blocks of a region of torch's memory; return a geometry of the copy, and the copy.

    The blocks are gathered on the device, one kernel, and cross the bus once.
    """
    from pynixlkv.geometry import Axis, Geometry

    size = group.element_bytes
    owner = as_torch(cache, group, region)
    torch = sys.modules["torch"]
    # Not every device can gather every element type, but integers.
    words = owner.view(getattr(torch, _WORDS[size])) if size in _WORDS else owner
    names = ("block", "layer", "kv", "head", "token", "dim")
    axes = [getattr(region, name) for name in names]
    box = words.as_strided(
        [axis.count for axis in axes],
        [axis.stride // size for axis in axes],
        words.storage_offset() + (region.address - words.data_ptr()) // size,
    )
    try:
        host = box.index_select(0, torch.as_tensor(blocks, device=owner.device)).cpu().contiguous()
    except RuntimeError as error:  # torch's, out of memory among them
        raise NativeError(
            f"{len(blocks)} blocks of {region.name!r} could not be copied to the host: {error}",
            library="torch",
        ) from error
    copied = {
        name: Axis(axis.start, count, stride * size if count > 1 else 0)
        for name, axis, count, stride in zip(names, axes, host.shape, host.stride(), strict=True)
    }
    address = host.data_ptr()
    made = msgspec.structs.replace(region, span=0, address=address, **copied)
    span = MemorySpan(address, host.numel() * size, MemoryType.DRAM, 0)
    one = msgspec.structs.replace(group, num_blocks=len(blocks), regions=(made,))
    return Geometry((span,), (one,)), host


# ---- words of errors


def _ranges(numbers: Sequence[int] | NDArray[np.int64], scope: DigestScope | None = None) -> str:
    """Return ascending numbers in few words: "0-3, 7"; with a scope, the tokens of these units."""
    array = np.asarray(numbers)
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    shown = []
    for run in np.split(array, cuts[:9])[:8] if array.size else ():
        first, last = int(run[0]), int(run[-1])
        if scope is not None:
            first, last = _tokens(scope, first).start, _tokens(scope, last).stop - 1
        shown.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(shown) + (", …" if len(cuts) > 7 else "")


def _plane(scope: DigestScope, index: int) -> str:
    return {1: "", 2: "KV"[index % 2]}.get(scope.planes, str(index))


def _tokens(scope: DigestScope, unit: int) -> range:
    first = unit * scope.unit
    return range(max(first, scope.tokens[0]), min(first + scope.unit, scope.tokens[1]))


def _summary(scope: DigestScope, differs: NDArray[np.bool_]) -> str:
    """Name the layers, heads and tokens that differ; all others agree."""
    layers, kv, heads, units = (np.unique(indices) for indices in np.nonzero(differs))
    words = [
        f"{np.count_nonzero(differs)} of {differs.size} digests of group {scope.group!r} differ: ",
        f"layers {_ranges(np.array(scope.layers)[layers])} of {_ranges(scope.layers)}, ",
        f"{' and '.join(_plane(scope, i) for i in kv)}, " if scope.planes > 1 else "",
        f"heads {_ranges(np.array(scope.heads)[heads])} of {_ranges(scope.heads)}, ",
        f"tokens {_ranges(np.array(scope.units)[units], scope)}",
    ]
    return "".join(words)


def _mismatches(
    here: GroupDigest, there: GroupDigest, differs: NDArray[np.bool_]
) -> Iterator[DigestMismatch]:
    scope = here.scope
    for at in np.argwhere(differs)[:_SHOWN].tolist():
        layer, kv, head, unit = at
        yield DigestMismatch(
            scope.group,
            scope.layers[layer],
            _plane(scope, kv),
            scope.heads[head],
            _tokens(scope, scope.units[unit]),
            int(here.values[tuple(at)]),
            int(there.values[tuple(at)]),
        )
