"""Numbers of host blocks, handed out to the requests that are staged in them.

It knows no memory: it lives beside the engine's scheduler, and all workers of the engine use the
numbers that it gives out for blocks of their own host caches.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pynixlkv.errors import ConfigError, PoolExhausted, StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pynixlkv.connector.metadata import BlockLists

__all__ = ["HostBlockPool"]


class HostBlockPool:
    """Hands out host blocks, all that are asked for or none. Thread-safe.

    Parameters
    ----------
    num_blocks : sequence of int
        Blocks of the host cache, for each group of layers.

    Raises
    ------
    ConfigError
        If there is no group, or one without blocks.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        if not num_blocks or min(num_blocks) < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; expected at least 1 for each group")
        self._sizes = tuple(num_blocks)
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self._used: list[set[int]] = [set() for _ in num_blocks]
        self._freed = threading.Condition()

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks of each group."""
        with self._freed:
            return tuple(map(len, self._free))

    def can_hold(self, counts: Sequence[int]) -> bool:
        """Return whether `allocate` could succeed if all blocks were free.

        Parameters
        ----------
        counts : sequence of int
            Blocks of each group.

        Returns
        -------
        bool
            Whether there are so many.
        """
        counts = self._check_counts(counts)
        return all(count <= size for count, size in zip(counts, self._sizes, strict=True))

    def has_free(self, counts: Sequence[int]) -> bool:
        """Return whether `allocate` would succeed at once.

        Parameters
        ----------
        counts : sequence of int
            Blocks of each group.

        Returns
        -------
        bool
            Whether so many are free now.
        """
        with self._freed:
            return self._fits(self._check_counts(counts))

    def allocate(self, counts: Sequence[int], timeout: float = 0.0) -> BlockLists:
        """Take blocks.

        Parameters
        ----------
        counts : sequence of int
            Blocks of each group, at least 0.
        timeout : float
            Seconds to wait for others to free some; 0 does not wait.

        Returns
        -------
        tuple of tuple of int
            Block numbers of the host cache, for each group.

        Raises
        ------
        PoolExhausted
            If there are too few until then; nothing is taken.
        ConfigError
            If `counts` does not fit the groups.

        Notes
        -----
        Who waits does not hold up others: whoever finds enough free blocks gets them.
        """
        counts = self._check_counts(counts)
        deadline = time.monotonic() + timeout
        with self._freed:
            while not self._fits(counts):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PoolExhausted(
                        f"{counts} host blocks by group are not free within {timeout} s: "
                        f"{tuple(map(len, self._free))} are, of {self._sizes}; free some, or make "
                        "the host cache larger"
                    )
                self._freed.wait(left)
            return tuple(self._take(group, count) for group, count in enumerate(counts))

    def free(self, blocks: BlockLists) -> None:
        """Give blocks back.

        Parameters
        ----------
        blocks : tuple of tuple of int
            Block numbers for each group, as `allocate` gave them; nothing may be moving in them.

        Raises
        ------
        StateError
            If one of them is not taken, or appears twice; nothing is freed.
        ConfigError
            If they do not fit the groups.
        """
        self._check_counts([len(table) for table in blocks])
        with self._freed:
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
            self._freed.notify_all()

    def _check_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        if len(counts) != len(self._sizes) or (counts and min(counts) < 0):
            raise ConfigError(
                f"counts of blocks are {list(counts)}; expected {len(self._sizes)} of at least 0"
            )
        return tuple(counts)

    def _fits(self, counts: tuple[int, ...]) -> bool:
        return all(count <= len(free) for count, free in zip(counts, self._free, strict=True))

    def _take(self, group: int, count: int) -> tuple[int, ...]:
        free = self._free[group]
        taken = tuple(free[len(free) - count :][::-1])  # ascending, as long as the pool is fresh
        del free[len(free) - count :]
        self._used[group].update(taken)
        return taken
