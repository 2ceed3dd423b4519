"""Host staging: where device memory cannot be registered, blocks go through host memory.

The producer copies its device blocks to host blocks, which the consumer reads; the consumer reads
into host blocks and copies those to its device blocks. Which host blocks a request gets is decided
by the `HostBlockPool` beside the engine's scheduler; the copies are started by the `HostStaging` in
each worker, through a copy function that the engine gives, and run beside everything else: each has
a `DeviceEvent`. `HostStaging` knows which host blocks hold, whole, what their device blocks hold now.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from pynixlkv.connector.fences import DeviceEvent, has_completed
from pynixlkv.connector.hostpool import HostBlockPool
from pynixlkv.errors import ConfigError, NotStagedError, PlanError, StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.geometry import Group, KVCache

__all__ = [
    "CopyFunction",
    "Direction",
    "DeviceEvent",
    "HostBlockPool",
    "HostStaging",
]

Direction: TypeAlias = Literal["d2h", "h2d"]
"""Device to host, or host to device."""

_NO_BLOCK = -1


class CopyFunction(Protocol):
    """Starts the copies of some blocks, of all layers."""

    def __call__(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        """Start copying block i of each table to or from block i of the other; do not wait."""
        ...


class _Copy:
    """A copy that has been asked for: a `DeviceEvent` from before the engine's own is there."""

    def __init__(self) -> None:
        self._event: DeviceEvent | None = None
        self._error: Exception | None = None

    def start(self, copy: CopyFunction, direction: Direction, *tables: BlockLists) -> None:
        try:
            self._event = copy(direction, *tables)
        except Exception as error:
            self._error = error
            raise

    def query(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._event is not None and self._event.query()


class _Group:
    """What is known of the blocks of one group."""

    def __init__(self, name: str, num_device: int, num_host: int) -> None:
        self.name = name
        # How often each device block was written, as far as we were told.
        self.version: NDArray[np.int64] = np.zeros(num_device, np.int64)
        # For each host block: what was staged in it, which version of it, and the last copy.
        self.source: NDArray[np.int64] = np.full(num_host, _NO_BLOCK, np.int64)
        self.staged: NDArray[np.int64] = np.zeros(num_host, np.int64)
        self.copies: NDArray[np.object_] = np.full(num_host, None, np.object_)

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
    return (*kind, group.has_values, group.tp, group.dcp, group.interleave, group.layers)


def _refuse(group: _Group, ids: NDArray[np.intp], why: str) -> None:
    if ids.size:
        raise NotStagedError(f"host blocks {ids[:8].tolist()} of group {group.name!r} {why}")


class HostStaging:
    """Copies blocks between a device cache and a host cache, and knows what is staged.

    Parameters
    ----------
    device_cache : KVCache
        The engine's own.
    host_cache : KVCache
        Same groups and layout in host memory, with its own numbers of blocks; this one is
        registered and read or written by peers. See `pynixlkv.connector.hostcopy`.
    copy : CopyFunction
        Starts copies; must not wait for them.

    Raises
    ------
    ConfigError
        If the caches do not have the same groups.

    Notes
    -----
    Thread-safe. Nothing waits for a copy. Whoever writes device blocks that may be staged says so
    with `mark_written`.
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

    def stage_out(self, device_blocks: BlockLists, host_blocks: BlockLists) -> DeviceEvent:
        """Start to copy device blocks to host blocks, to be sent from there.

        Parameters
        ----------
        device_blocks, host_blocks : tuple of tuple of int
            Block numbers for each group; block i goes to block i.

        Returns
        -------
        DeviceEvent
            Once it is done, and as long as nobody writes the device blocks, the host blocks pass
            `check_staged`.

        Raises
        ------
        PlanError
            If the tables do not fit each other or the caches.
        StateError
            If another copy into or out of one of the host blocks has not ended.
        """
        return self._start("d2h", device_blocks, host_blocks)

    def stage_in(self, host_blocks: BlockLists, device_blocks: BlockLists) -> DeviceEvent:
        """Start to copy host blocks that were received to device blocks.

        Parameters
        ----------
        host_blocks, device_blocks : tuple of tuple of int
            Block numbers for each group; block i goes to block i.

        Returns
        -------
        DeviceEvent
            The host blocks must not be freed before it is done.

        Raises
        ------
        PlanError, StateError
            As in `stage_out`.
        """
        return self._start("h2d", device_blocks, host_blocks)

    def mark_written(self, device_blocks: BlockLists) -> None:
        """Say that device blocks are being written: what was staged of them before is stale.

        Parameters
        ----------
        device_blocks : tuple of tuple of int
            Block numbers for each group.

        Raises
        ------
        PlanError
            If they do not fit the cache.
        """
        with self._lock:
            for group, table in self._pairs(device_blocks):
                group.version[group.check("device", table, group.version.size)] += 1

    def check_staged(self, host_blocks: BlockLists) -> None:
        """Make sure that host blocks hold what their device blocks hold.

        Parameters
        ----------
        host_blocks : tuple of tuple of int
            Block numbers for each group.

        Raises
        ------
        NotStagedError
            If a block was never staged, its copy has not ended or has failed, or its device block
            was written after the copy was started; says which.
        PlanError
            If they do not fit the cache.
        """
        with self._lock:
            for group, table in self._pairs(host_blocks):
                ids = group.check("host", table, group.source.size)
                source = group.source[ids]
                _refuse(group, ids[source == _NO_BLOCK], "were never staged")
                stale = group.staged[ids] != group.version[source]
                _refuse(group, ids[stale], "are older than their device blocks; stage them again")
                for copy in set(group.copies[ids].tolist()):
                    try:
                        is_done = copy.query()
                    except Exception as error:
                        raise NotStagedError(
                            f"the copy to host blocks of group {group.name!r} failed: {error}"
                        ) from error
                    if not is_done:
                        waiting = ids[group.copies[ids] == copy]
                        _refuse(group, waiting, "are still being copied; wait for the event")

    def _pairs(self, blocks: BlockLists) -> list[tuple[_Group, Sequence[int]]]:
        if len(blocks) != len(self._groups):
            raise PlanError(f"{len(blocks)} block tables for {len(self._groups)} groups")
        return list(zip(self._groups, blocks, strict=True))

    def _start(
        self, direction: Direction, device_blocks: BlockLists, host_blocks: BlockLists
    ) -> DeviceEvent:
        copy = _Copy()
        with self._lock:
            tables = []
            for (group, mine), (_, theirs) in zip(
                self._pairs(device_blocks), self._pairs(host_blocks), strict=True
            ):
                device = group.check("device", mine, group.version.size)
                host = group.check("host", theirs, group.source.size)
                written = host if direction == "d2h" else device
                if device.size != host.size or np.unique(written).size < written.size:
                    raise PlanError(
                        f"group {group.name!r}: {device.size} device blocks and {host.size} host "
                        "blocks; expected equal numbers, and each block that is written once"
                    )
                busy = [c for c in set(group.copies[host].tolist()) if c and not has_completed(c)]
                if busy:
                    raise StateError(
                        f"a copy of some of the host blocks {host[:8].tolist()} of group "
                        f"{group.name!r} has not ended; wait for its event before they are reused"
                    )
                tables.append((group, device, host))
            for group, device, host in tables:
                group.copies[host] = copy
                if direction == "d2h":
                    group.source[host], group.staged[host] = device, group.version[device]
                else:
                    group.source[host] = _NO_BLOCK
                    group.version[device] += 1
        copy.start(self._copy, direction, device_blocks, host_blocks)
        return copy
