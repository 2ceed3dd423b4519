"""Notifications that the workers of two engines exchange through their agents.

They are msgpack behind a magic and a version, decoded into typed records. Any of them may be lost,
late, early, doubled or from a stranger, and none of these does harm: each names what it is about by
a token that is never used twice, ends are reached once, and whoever waits asks again by its next
heartbeat.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from pynixlkv.connector.metadata import BlockLists, Lease, ParallelSizes, Rank
from pynixlkv.errors import ProtocolVersionError, WireError

__all__ = [
    "MAX_ENTRIES",
    "PROTOCOL_VERSION",
    "ConsumerHello",
    "Heartbeat",
    "HeartbeatAck",
    "LeaseStatus",
    "Message",
    "Push",
    "PushDone",
    "ConsumerRank",
    "Release",
    "CancelPush",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 1
"""Version of these messages and of the hand-off. History: 1 = first."""

_MAGIC = b"PNKC"
MAX_ENTRIES = 1024
"""Most requests that one message lists; with the longest ids it can still be sent."""

_PushId = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class LeaseStatus(enum.IntEnum):
    """What a producer knows of a lease."""

    HELD = 0
    UNKNOWN = 1
    """Not heard of: not yet, or of an earlier life."""
    ENDED = 2
    """Released or expired: its blocks may have been reused."""


class ConsumerRank(msgspec.Struct, frozen=True):
    """The worker of a consumer that speaks.

    Parameters
    ----------
    engine_id : str
        Its engine.
    rank : tuple of (int, int)
        Its pipeline and tensor-parallel rank.
    parallel : ParallelSizes
        Sizes of its engine, from which the producer knows how many readers to wait for.
    """

    engine_id: str
    rank: Rank
    parallel: ParallelSizes


class ConsumerHello(msgspec.Struct, frozen=True, tag="consumer_hello"):
    """First message of a reader: how the producer reaches it."""

    consumer: ConsumerRank
    hello: bytes


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Heartbeat: the reader still wants these requests of the producer."""

    number: int
    requests: Annotated[list[tuple[str, Lease]], msgspec.Meta(max_length=MAX_ENTRIES)]


class HeartbeatAck(msgspec.Struct, frozen=True, tag="heartbeat_ack"):
    """Answer to a beat: which of its requests are not held, and how that stands."""

    number: int
    not_held: Annotated[list[tuple[str, Lease, LeaseStatus]], msgspec.Meta(max_length=MAX_ENTRIES)]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The reader is done with these requests of the producer, whether it read them or not."""

    consumer: ConsumerRank
    requests: Annotated[list[tuple[str, Lease | None]], msgspec.Meta(max_length=MAX_ENTRIES)]


class Push(msgspec.Struct, frozen=True, tag="push"):
    """The reader asks the producer to write a request into its blocks.

    `request_id` is the producer's name of the request. Without a lease the reader did not wait for
    the prefill's end: the request may still be running, or be queued. `push_id` is what the answer
    names; a reader uses it once, and asks again with the same while it has no answer.
    """

    consumer: ConsumerRank
    push_id: _PushId
    request_id: str
    lease: Lease | None
    blocks: BlockLists
    starts: tuple[int, ...]
    block_sizes: tuple[int, ...]
    num_tokens: int


class CancelPush(msgspec.Struct, frozen=True, tag="cancel_push"):
    """The reader does not want a push any more, and waits to hear that nothing of it moves."""

    push_id: _PushId


class PushDone(msgspec.Struct, frozen=True, tag="push_done"):
    """The producer has written a request, or never will; nothing of it moves any more.

    `error` is empty after success.
    """

    push_id: _PushId
    expired: bool
    error: str


Message: TypeAlias = (
    ConsumerHello | Heartbeat | HeartbeatAck | Release | Push | CancelPush | PushDone
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _MAGIC + bytes([PROTOCOL_VERSION]) + _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read what `encode` wrote. The bytes may come from anyone.

    Raises
    ------
    WireError
        If they are no message of ours, or damaged.
    ProtocolVersionError
        If they are one of another version.
    """
    if len(data) < 5 or data[:4] != _MAGIC:
        raise WireError(f"not a connector message: {len(data)} bytes that begin with {data[:4]!r}")
    if data[4] != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"a connector message has version {data[4]}, this side speaks {PROTOCOL_VERSION}",
            local_version=str(PROTOCOL_VERSION),
            remote_version=str(data[4]),
        )
    try:
        return _decoder.decode(data[5:])
    except msgspec.MsgspecError as error:
        raise WireError(f"a connector message of {len(data)} bytes is damaged: {error}") from error
