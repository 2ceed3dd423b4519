"""Leases: what a producer keeps of them, and the words by which a reader knows that they held.

Each rank of a producer has a table of 64-bit words in registered memory, one for each slot. While
a lease holds, its slot contains the lease's token; when it ends, the word moves on *before* the
blocks can be reused. A reader reads the word before and after the blocks: if both times it is the
token, the lease held in between. The tokens of a slot only grow, so the word also distinguishes
"not yet" from "over".
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pynixlkv.connector.messages import LeaseStatus
from pynixlkv.connector.metadata import Lease
from pynixlkv.errors import StateError
from pynixlkv.geometry import KVCache

if TYPE_CHECKING:
    from pynixlkv.connector.metadata import ReqMeta
    from pynixlkv.connector.staging import DeviceEvent
    from pynixlkv.types import Rank

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
    """Return the state of a lease by the word in its slot."""
    if word == lease.token:
        return LeaseStatus.HELD
    return LeaseStatus.UNKNOWN if word < lease.token else LeaseStatus.ENDED


class LeaseTable:
    """The words of a producer's rank. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._words, self.cache = make_words(num_slots)

    def grant(self, lease: Lease) -> None:
        """Let readers see that the lease holds; its token must be larger than the slot's."""
        if self.status(lease) is not LeaseStatus.UNKNOWN:
            raise StateError(
                f"lease {lease} cannot be granted: its slot has the word "
                f"{int(self._words[lease.slot]):x}; tokens of a slot must grow"
            )
        self._words[lease.slot] = lease.token

    def revoke(self, lease: Lease) -> None:
        """Let readers see that the lease is over; call it before the blocks can be reused."""
        self._words[lease.slot] = lease.token + 1

    def status(self, lease: Lease) -> LeaseStatus:
        """Return the state of a lease, which may be forged."""
        if lease.slot >= self._words.size:
            return LeaseStatus.UNKNOWN
        return status(lease, int(self._words[lease.slot]))


@dataclass(eq=False)
class LeaseReader:
    """A reader of a lease: one request of one consumer engine."""

    deadline: float
    """When it counts as lost."""
    released_by: set[Rank] = field(default_factory=set)
    is_done: bool = False
    """All its ranks have released the lease."""


@dataclass(eq=False)
class HeldRequest:
    """A request whose blocks are held for consumers."""

    id: str
    meta: ReqMeta
    lease: Lease
    num_readers: int
    """How many are expected; 0 if unknown."""
    deadline: float
    since: float
    event: DeviceEvent | None
    """Must complete before readers may see the blocks, and before they may be reused."""
    is_staged: bool = False
    is_granted: bool = False
    is_extended: bool = False
    """It got more time for its first reader."""
    readers: dict[int, LeaseReader] = field(default_factory=dict)
    released_at: float | None = None
    """When the last reader so far was done."""
    num_done: int = 0
    """Readers that have released the lease."""
    digesting: int = 0
    """Computations that read its blocks."""
    ending: str = ""
    """Why the lease ends; the blocks are freed once everything that uses them is quiet."""

    @property
    def have_all_come(self) -> bool:
        """Whether no further reader is expected."""
        return len(self.readers) >= max(self.num_readers, 1)

    @property
    def is_done(self) -> bool:
        """Whether all expected readers have come, and each has released the lease."""
        return self.have_all_come and self.num_done == len(self.readers)


class LeaseSlots:
    """Hands out leases; lives with the scheduler. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        # A random start keeps tokens of an earlier life of the engine from matching.
        self._next_token = 2 + 2 * secrets.randbits(56)

    @property
    def num_free(self) -> int:
        """Leases that can be taken."""
        return len(self._free)

    def take(self) -> Lease | None:
        """Return a lease with an unused token; None if all slots are taken."""
        if not self._free:
            return None
        self._next_token += 2
        return Lease(self._free.pop(), self._next_token)

    def give_back(self, lease: Lease) -> None:
        """Return a slot once all ranks have reported that the lease is over."""
        self._free.append(lease.slot)
