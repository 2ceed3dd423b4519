"""The words by which a reader knows that a producer still held its blocks.

Each rank of a producer has a table of 64-bit words in registered memory, one for each slot. While
a lease holds, its slot has the lease's token; when it ends, the word moves on *before* the blocks
can be reused. A reader looks at the word before it reads the blocks, and again after that: if both
times it finds the token, the lease held all the while. Tokens of a slot only grow, so that the word
also tells "not yet" from "over".
"""

from __future__ import annotations

import secrets

import numpy as np

from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.metadata import Lease
from pynixlkv.errors import StateError
from pynixlkv.geometry import KVCache

__all__ = ["LEASE_GROUP", "LeaseSlots", "LeaseTable", "make_words", "status"]

LEASE_GROUP = "pynixlkv.lease"
"""Name of the group of a lease table's geometry."""


def make_words(num_slots: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], KVCache]:
    """Return zeroed words, shape (num_slots,), and the cache that describes them."""
    words = np.zeros(num_slots, np.uint64)
    cache = KVCache.from_tensors(
        {"words": words.reshape(-1, 1)}, axes="BD", kv_heads=None, group=LEASE_GROUP
    )
    return words, cache


def status(lease: Lease, word: int) -> LeaseStatus:
    """Return what the word in a lease's slot says about it."""
    if word == lease.token:
        return LeaseStatus.HELD
    return LeaseStatus.UNKNOWN if word < lease.token else LeaseStatus.ENDED


class LeaseTable:
    """A producer rank's words. Not thread-safe.

    Parameters
    ----------
    num_slots : int
        Most leases at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._words, self.cache = make_words(num_slots)

    def grant(self, lease: Lease) -> None:
        """Let readers find the lease.

        Raises
        ------
        StateError
            If its slot has seen this lease, or a later one.
        """
        if self.status(lease) is not LeaseStatus.UNKNOWN:
            raise StateError(
                f"lease {lease} cannot be granted: its slot has the word "
                f"{int(self._words[lease.slot]):x}; tokens of a slot must grow"
            )
        self._words[lease.slot] = lease.token

    def revoke(self, lease: Lease) -> None:
        """Let readers find that the lease is over; call it before the blocks can be reused."""
        self._words[lease.slot] = lease.token + 1

    def status(self, lease: Lease) -> LeaseStatus:
        """Return what is known of a lease, which may be anybody's invention."""
        if lease.slot >= self._words.size:
            return LeaseStatus.UNKNOWN
        return status(lease, int(self._words[lease.slot]))


class LeaseSlots:
    """Hands out leases; lives with the scheduler. Not thread-safe.

    Parameters
    ----------
    num_slots : int
        Most leases at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        # Where another life of the engine began is far away, so that its tokens are no longer ours.
        self._next_token = 2 + 2 * secrets.randbits(56)

    @property
    def num_free(self) -> int:
        """Leases that can still be had."""
        return len(self._free)

    def take(self) -> Lease | None:
        """Return a lease that never was before; None if all slots are taken."""
        if not self._free:
            return None
        self._next_token += 2
        return Lease(self._free.pop(), self._next_token)

    def give_back(self, lease: Lease) -> None:
        """Return a slot, when all ranks have reported that the lease is over."""
        self._free.append(lease.slot)
