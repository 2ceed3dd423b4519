"""What the demo and its rank processes say to each other: one reply to each command, in msgpack."""

from __future__ import annotations

import os
from enum import Enum
from typing import Literal

import msgspec

from pynixlkv.errors import PynixlkvError

__all__ = [
    "Await",
    "Check",
    "Checked",
    "Connect",
    "Connected",
    "RunError",
    "Failed",
    "Fault",
    "Finish",
    "Finished",
    "Move",
    "Message",
    "Moved",
    "Notified",
    "Operation",
    "Progress",
    "RankSpec",
    "Ready",
    "Side",
    "Tables",
    "decode",
    "encode",
]

Side = Literal["prefill", "decode"]
Operation = Literal["read", "write"]
# Physical block numbers on one side of what is read and written, in token order.
Tables = dict[Operation, list[int]]


class Fault(str, Enum):
    """What decode rank 0 spoils on purpose: a block that was moved, an unused one, or itself."""

    read = "read"
    write = "write"
    guard = "guard"
    crash = "crash"
    hang = "hang"


class RunError(PynixlkvError):
    """A command failed: a process of it ended early, a deadline passed, or bytes differ."""


class RankSpec(msgspec.Struct, frozen=True, tag=True):
    """All that a rank process needs to know to build its cache and its expectations."""

    side: Side
    rank: int
    sizes: dict[Side, int]
    axes: str
    model: str
    engine: str
    num_blocks: int
    tables: dict[Side, Tables]
    seed: int
    timeout_s: float
    fault: Fault | None

    @property
    def name(self) -> str:
        """Name of the process and of its agent."""
        return f"{self.side}-{self.rank}"

    @property
    def environment(self) -> dict[str, str]:
        """Make UCX say at its end which transports it used."""
        return {"UCX_PROTO_INFO": os.environ.get("UCX_PROTO_INFO", "used")}

    @property
    def other_side(self) -> Side:
        """The side that this rank's peers are on."""
        return "decode" if self.side == "prefill" else "prefill"


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect to the peers and plan; `hellos` are the other side's, by rank."""

    hellos: list[bytes]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Read from every peer (decode) or write to it (prefill), notify it, and wait for the end."""


class Await(msgspec.Struct, frozen=True, tag=True):
    """Wait for the notification of every peer."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare every byte of the pool; `holds` names the tables whose contents must be there."""

    holds: list[Operation]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Close everything and exit."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far the command in hand has come; not a reply."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The cache is filled and registered."""

    hello: bytes
    cache_bytes: int


class Connected(msgspec.Struct, frozen=True, tag=True):
    """All peers are known and planned for."""

    peers: list[str]


class Moved(msgspec.Struct, frozen=True, tag=True):
    """What this rank moved: sums over its peers, and the longest of their times."""

    num_bytes: int
    descriptors_unmerged: int
    descriptors: int
    plan_s: float
    post_s: float
    transfer_s: float
    elapsed_s: float


class Notified(msgspec.Struct, frozen=True, tag=True):
    """Every notification arrived, once, and no other."""

    num_notes: int


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Result of a comparison; `difference` describes the first one, if any."""

    moved_bytes: int
    guard_bytes: int
    wrong_bytes: int
    difference: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Everything is closed."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank gives up; comes instead of any reply."""

    reason: str
    traceback: str


Message = (
    RankSpec
    | Connect
    | Move
    | Await
    | Check
    | Finish
    | Progress
    | Ready
    | Connected
    | Moved
    | Notified
    | Checked
    | Finished
    | Failed
)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message.

    Parameters
    ----------
    message : msgspec.Struct
        Any class of this module.

    Returns
    -------
    bytes
        Its msgpack form, with its type.
    """
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in some bytes.

    Parameters
    ----------
    data : bytes
        What `encode` made.

    Returns
    -------
    Message
        The message.

    Raises
    ------
    msgspec.ValidationError
        If the bytes hold no message of this module.
    """
    return _decoder.decode(data)
