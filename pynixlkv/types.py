"""Small shared types: enums, id types, frozen records; standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

__all__ = ["AgentName", "MemorySpan", "MemoryType", "Operation", "TransferState"]

AgentName = NewType("AgentName", str)
"""Name of an agent, unique among the agents that talk to each other."""


class MemoryType(enum.IntEnum):
    """Kind of memory; the numbers are those of NIXL's C interface."""

    DRAM = 0
    VRAM = 1
    BLOCK = 2
    OBJECT = 3
    FILE = 4
    # NIXL's own names.
    BLK = 2
    OBJ = 3


class Operation(enum.IntEnum):
    """Direction of a transfer, seen from the side that posts it."""

    READ = 0
    """Remote to local."""
    WRITE = 1
    """Local to remote."""


class TransferState(enum.IntEnum):
    """Life of a transfer; from DONE on, end states: reached once, never left."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    TIMED_OUT = 4
    PEER_LOST = 5
    CANCELLED = 6

    @property
    def is_end(self) -> bool:
        """Whether it is an end state."""
        return self >= TransferState.DONE


@dataclass(frozen=True)
class MemorySpan:
    """A contiguous range of memory that an agent can register, and what keeps it alive.

    Parameters
    ----------
    address : int
        First byte, as a virtual address of this process.
    nbytes : int
        Length in bytes, at least 1.
    memory : MemoryType
        Kind of memory.
    device : int
        Device ordinal; 0 for host memory.
    keepalive : object
        Whatever owns the memory (a tensor, an array); held for as long as the span is.
    """

    address: int
    nbytes: int
    memory: MemoryType
    device: int
    keepalive: object = field(repr=False, compare=False, default=None)
