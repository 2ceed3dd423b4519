"""Enums, id types and records that all layers share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, NewType

import msgspec

from pynixlkv._closeable import Uncopied

__all__ = [
    "AgentName",
    "DigestMismatch",
    "MemorySpan",
    "MemoryType",
    "Operation",
    "Rank",
    "TransferState",
]

AgentName = NewType("AgentName", str)
"""Name of an agent, unique among the agents that talk to each other."""

Rank = tuple[int, int]
"""Pipeline and tensor-parallel rank within an engine."""


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


class MemorySpan(
    Uncopied, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """A contiguous range of memory, registered as a whole. The maker keeps the memory."""

    address: Annotated[int, msgspec.Meta(ge=0, lt=2**60)]
    """First byte, as a virtual address of the process that has the memory."""
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=2**60)]
    memory: MemoryType
    device: Annotated[int, msgspec.Meta(ge=0)]
    """Device ordinal; 0 for host memory."""
    read_only: bool = False
    """Whether it is a source only: transfers read from it, and none writes to it."""
    is_exportable: bool = True
    """Whether other processes of its host can open it; set by `Agent.register`."""
    is_rdma_capable: bool = True
    """Whether network cards can reach it; set by `Agent.register`."""


@dataclass(frozen=True)
class DigestMismatch:
    """A place where the digests of two caches differ."""

    group: str
    layer: int
    kv: str
    """``"K"`` or ``"V"``; empty for a latent and for state."""
    head: int
    """Global KV head."""
    tokens: range
    here: int
    """Digest of the local bytes."""
    there: int
    """Digest of the other side."""

    def __str__(self) -> str:
        kv = f"{self.kv} " if self.kv else ""
        return (
            f"group {self.group!r} layer {self.layer} {kv}head {self.head} tokens "
            f"{self.tokens.start} to {self.tokens.stop - 1}: {self.here:#018x} here, "
            f"{self.there:#018x} there"
        )
