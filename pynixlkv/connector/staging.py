"""Host staging: where device memory cannot be registered, blocks pass through host memory.

The producer copies device blocks to host blocks, which the consumer reads; the consumer reads into
host blocks and copies them to its device blocks. The `HostBlockPool` beside the engine's scheduler
chooses the host blocks of a request. The `HostStaging` of each worker starts the copies, through a
copy function of the engine. Copies run in the background; each has a `DeviceEvent`.

`make_host_tensors` and `TensorCopy` are for engines without a copy function of their own.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from pynixlkv.errors import ConfigError, LayoutError, PlanError, PoolExhausted, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.geometry import Group, KVCache

__all__ = [
    "COMPLETED",
    "CopyFunction",
    "DeviceEvent",
    "Direction",
    "HostBlockPool",
    "HostStaging",
    "TensorCopy",
    "make_host_tensors",
]

Direction: TypeAlias = Literal["d2h", "h2d"]
"""Device to host, or host to device."""


# ---- events


class DeviceEvent(Protocol):
    """Completes after earlier work of a device; a recorded ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Return whether the work has completed; raise if it has failed. Does not block."""
        ...


class _Completed:
    def query(self) -> bool:
        return True


COMPLETED: DeviceEvent = _Completed()
"""An event that has already completed."""


def has_completed(event: DeviceEvent) -> bool:
    """Return whether the work of an event is over, whether it succeeded or failed."""
    try:
        return bool(event.query())
    except Exception:
        return True


# ---- the scheduler's side


class HostBlockPool:
    """Hands out host blocks: all that are requested, or none. Thread-safe.

    It holds no memory: all workers of the engine use its block numbers in their own host caches.
    Methods take `counts`, how many blocks of each group, or `blocks`, their numbers by group.

    Parameters
    ----------
    num_blocks : sequence of int
        Blocks of the host cache, for each group of layers.

    Raises
    ------
    ConfigError
        If there is no group, or a group without blocks; by methods, if the groups do not fit.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        if not num_blocks or min(num_blocks) < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; expected at least 1 for each group")
        self._sizes = tuple(num_blocks)
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self._used: list[set[int]] = [set() for _ in num_blocks]
        self._lock = threading.Lock()

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks of each group."""
        with self._lock:
            return tuple(map(len, self._free))

    def can_hold(self, counts: Sequence[int]) -> bool:
        """Return whether `allocate` could succeed if all blocks were free."""
        return all(c <= size for c, size in zip(self._checked(counts), self._sizes, strict=True))

    def has_free(self, counts: Sequence[int]) -> bool:
        """Return whether `allocate` would succeed now."""
        return all(c <= free for c, free in zip(self._checked(counts), self.num_free, strict=True))

    def allocate(self, counts: Sequence[int]) -> BlockLists:
        """Take blocks; raise `PoolExhausted`, and take none, if too few are free. Does not wait."""
        counts = self._checked(counts)
        with self._lock:
            num_free = tuple(map(len, self._free))
            if any(count > free for count, free in zip(counts, num_free, strict=True)):
                raise PoolExhausted(
                    f"{counts} host blocks by group are not free: {num_free} are, of "
                    f"{self._sizes}; free some, or make the host cache larger"
                )
            return tuple(self._take(group, count) for group, count in enumerate(counts))

    def free(self, blocks: BlockLists) -> None:
        """Give blocks back, in which no bytes may be moving.

        Raises
        ------
        StateError
            If one of them is not allocated, or appears twice; nothing is freed.
        """
        self._checked([len(table) for table in blocks])
        with self._lock:
            for group, (table, used) in enumerate(zip(blocks, self._used, strict=True)):
                if not used.issuperset(table) or len(set(table)) < len(table):
                    wrong = sorted({b for b in table if b not in used or table.count(b) > 1})
                    raise StateError(
                        f"host blocks {wrong[:8]} of group {group} are freed twice, or were never "
                        "allocated"
                    )
            for table, used, free in zip(blocks, self._used, self._free, strict=True):
                used.difference_update(table)
                free.extend(reversed(table))

    def _checked(self, counts: Sequence[int]) -> tuple[int, ...]:
        if len(counts) != len(self._sizes) or (counts and min(counts) < 0):
            raise ConfigError(
                f"counts of blocks are {list(counts)}; expected {len(self._sizes)} of at least 0"
            )
        return tuple(counts)

    def _take(self, group: int, count: int) -> tuple[int, ...]:
        free = self._free[group]
        taken = tuple(free[len(free) - count :][::-1])  # ascending while the pool is fresh
        del free[len(free) - count :]
        self._used[group].update(taken)
        return taken


# ---- the workers' side


class CopyFunction(Protocol):
    """Starts the copies of some blocks, of all layers."""

    def __call__(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        """Start to copy block i of each table to or from block i of the other; do not wait."""
        ...


class _Group:
    def __init__(self, name: str, num_device: int, num_host: int) -> None:
        self.name = name
        self.num_device = num_device
        self.copies: NDArray[np.object_] = np.full(num_host, None, np.object_)
        """The event of the last copy into or out of each host block."""

    def check(self, what: str, table: Sequence[int], limit: int) -> NDArray[np.intp]:
        ids = np.asarray(table, np.intp)
        outside = np.flatnonzero((ids < 0) | (ids >= limit))
        if outside.size:
            raise PlanError(
                f"{what} block {ids[outside[0]]} at position {outside[0]} of group {self.name!r} "
                f"is outside 0 to {limit - 1}"
            )
        return ids


def _kind(group: Group) -> tuple[object, ...]:
    """Return what device and host blocks of a group must agree in."""
    kind = (group.name, group.dtype, group.block_size, group.kv_heads, group.head_dim)
    return (*kind, group.planes, group.tp, group.dcp, group.interleave, group.layers)


class HostStaging:
    """Copies blocks between a device cache and a host cache.

    Parameters
    ----------
    device_cache : KVCache
        The engine's own.
    host_cache : KVCache
        Same groups and layout in host memory, with its own numbers of blocks; peers read and write
        this one. See `make_host_tensors`.
    copy : CopyFunction
        Starts copies; must not wait for them.

    Raises
    ------
    ConfigError
        If the caches do not have the same groups.

    Notes
    -----
    Thread-safe; no method waits for a copy.
    """

    def __init__(self, device_cache: KVCache, host_cache: KVCache, copy: CopyFunction) -> None:
        device, host = device_cache.geometry.groups, host_cache.geometry.groups
        if [_kind(group) for group in device] != [_kind(group) for group in host]:
            raise ConfigError(
                f"device cache {device_cache!r} and host cache {host_cache!r} differ in more than "
                "their numbers of blocks"
            )
        self.device_cache = device_cache
        self.host_cache = host_cache
        self._copy = copy
        self._lock = threading.Lock()
        self._groups = [
            _Group(mine.name, mine.num_blocks, theirs.num_blocks)
            for mine, theirs in zip(device, host, strict=True)
        ]

    def stage(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        """Start to copy block i of each table to or from block i of the other.

        Host blocks can be sent, or freed, once the event has completed.

        Raises
        ------
        PlanError
            If the block numbers of a group do not fit each other or the caches.
        StateError
            If an earlier copy into or out of one of the host blocks has not ended.
        """
        for blocks in (device_blocks, host_blocks):
            if len(blocks) != len(self._groups):
                raise PlanError(f"{len(blocks)} block tables for {len(self._groups)} groups")
        with self._lock:
            tables = []
            for group, mine, theirs in zip(self._groups, device_blocks, host_blocks, strict=True):
                device = group.check("device", mine, group.num_device)
                host = group.check("host", theirs, group.copies.size)
                written = host if direction == "d2h" else device
                if device.size != host.size or np.unique(written).size < written.size:
                    raise PlanError(
                        f"group {group.name!r}: {device.size} device blocks and {host.size} host "
                        "blocks; expected equal numbers, and each block that is written once"
                    )
                earlier = set(group.copies[host].tolist()) - {None}
                if not all(map(has_completed, earlier)):
                    raise StateError(
                        f"a copy of some of the host blocks {host[:8].tolist()} of group "
                        f"{group.name!r} has not ended; wait for its event before they are reused"
                    )
                tables.append((group, host))
            event = self._copy(direction, device_blocks, host_blocks)
            for group, host in tables:
                group.copies[host] = event
        return event


# ---- tensors of the CPU


def make_host_tensors(tensors: Mapping[str, Any], *, axes: str, num_blocks: int) -> dict[str, Any]:
    """Make host tensors like those of a device, with another number of blocks.

    Parameters
    ----------
    tensors : mapping of str to tensor or pair of tensors
        Of one group of layers, as `pynixlkv.geometry.KVCache.from_tensors` takes them.
    axes : str
        The dimensions of each tensor, one letter each, ``B`` for the block; or ``"MLA"``.
    num_blocks : int
        Blocks of the host tensors, at least 1.

    Returns
    -------
    dict of str to tensor or pair of tensors
        Same names, types and order of dimensions in memory, without gaps, all zero. Torch tensors
        for torch tensors, in pinned memory for a device's; numpy arrays otherwise.

    Raises
    ------
    LayoutError
        If `axes` does not say which dimension is the block, or `num_blocks` is below 1.
    """
    if num_blocks < 1:
        raise LayoutError(f"num_blocks is {num_blocks}; expected at least 1")
    return {
        name: tuple(_make_like(each, axes, num_blocks) for each in value)
        if isinstance(value, (tuple, list))
        else _make_like(value, axes, num_blocks)
        for name, value in tensors.items()
    }


def _make_like(tensor: Any, axes: str, num_blocks: int) -> Any:  # noqa: ANN401
    shape = list(tensor.shape)
    shape[_block_dim(axes, tensor)] = num_blocks
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(tensor, torch.Tensor)
    strides = tensor.stride() if is_torch else tensor.strides
    order = sorted(range(len(shape)), key=lambda dim: -abs(strides[dim]))
    ordered, back = [shape[dim] for dim in order], np.argsort(order).tolist()
    if torch is not None and is_torch:
        pinned = tensor.device.type != "cpu"
        made = torch.zeros(ordered, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return made.permute(back)
    return np.zeros(ordered, tensor.dtype).transpose(back)


def _block_dim(axes: str, tensor: Any) -> int:  # noqa: ANN401
    letters = "BND" if axes == "MLA" else axes
    if "B" not in letters or len(letters) != len(tensor.shape):
        raise LayoutError(
            f"axes {axes!r} for a tensor of shape {tuple(tensor.shape)}; expected one letter for "
            "each dimension, B among them"
        )
    return letters.index("B")


class TensorCopy:
    """A synchronous `CopyFunction` for numpy arrays and torch tensors that the CPU can address.

    Parameters
    ----------
    *groups : tuple of (mapping, mapping, str)
        For each group of layers, in the cache's order: its device tensors, the host tensors of the
        same names, and the `axes` of both, as in `make_host_tensors`.

    Raises
    ------
    LayoutError
        If the tensors of a group do not have the same names, or are not in the CPU's memory.
    """

    def __init__(self, *groups: tuple[Mapping[str, Any], Mapping[str, Any], str]) -> None:
        self._groups = []
        for device, host, axes in groups:
            if device.keys() != host.keys():
                raise LayoutError(f"tensors {sorted(device)} and {sorted(host)} are not the same")
            pairs = zip(_by_block(device, axes), _by_block(host, axes), strict=True)
            self._groups.append(list(pairs))

    def __call__(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        """Copy blocks."""
        for pairs, mine, theirs in zip(self._groups, device_blocks, host_blocks, strict=True):
            here, there = np.asarray(mine, np.intp), np.asarray(theirs, np.intp)
            for device, host in pairs:
                if direction == "d2h":
                    host[there] = device[here]
                else:
                    device[here] = host[there]
        return COMPLETED


def _by_block(tensors: Mapping[str, Any], axes: str) -> Iterator[Any]:
    """Yield a view of each tensor whose first dimension is the block, in the order of names."""
    for name in sorted(tensors):
        value: Sequence[Any] | Any = tensors[name]
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if str(getattr(tensor, "device", "cpu")) != "cpu":
                raise LayoutError(f"tensor {name!r} is on {tensor.device}; expected the CPU")
            block = _block_dim(axes, tensor)
            rest = [dim for dim in range(len(tensor.shape)) if dim != block]
            is_numpy = isinstance(tensor, np.ndarray)
            yield tensor.transpose(block, *rest) if is_numpy else tensor.permute(block, *rest)
