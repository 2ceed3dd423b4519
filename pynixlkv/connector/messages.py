"""Notifications that the workers of two engines exchange through their agents.

They are msgpack, decoded into tagged records. They carry no version of their own: handshake and
hello have compared `pynixlkv.wire.VERSION`, which covers them, before the first is sent. Any of
them may be lost, late, early, duplicated or forged without harm: each names its subject by a token
that is never reused, ends are reached once, and the waiting side asks again with its next
heartbeat.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from pynixlkv import wire
from pynixlkv.connector.metadata import BlockLists, Lease, Number, NumReaders, ParallelSizes
from pynixlkv.digest import DigestScope
from pynixlkv.types import Rank

_Id = Annotated[str, msgspec.Meta(max_length=512)]

MAX_ENTRIES = 1024
"""Most requests in one message; with the longest ids it still fits a notification."""

MAX_DIGESTS = 1 << 16
"""Most digests in one answer; they fit a notification."""
MAX_SCOPES = 256
"""Most scopes of one answer: groups, for each set of heads that they move."""


class LeaseStatus(enum.IntEnum):
    """What a producer knows of a lease."""

    HELD = 0
    UNKNOWN = 1
    """Not granted yet, or of an earlier life of the producer."""
    ENDED = 2
    """Released or expired: its blocks may have been reused."""


class ConsumerRank(msgspec.Struct, frozen=True):
    """A worker of a consumer. Its engine's sizes say how many ranks the producer waits for."""

    engine_id: _Id
    rank: Rank
    parallel: ParallelSizes


class ConsumerHello(msgspec.Struct, frozen=True, tag="consumer_hello"):
    """First message of a consumer's rank: how the producer reaches it."""

    consumer: ConsumerRank
    hello: bytes


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """A request of a consumer that reads a lease. Its first message attaches it to the lease."""

    request_id: _Id
    """The producer's."""
    lease: Lease | None
    """None if the consumer did not wait for the prefill."""
    number: Number = 0
    """Drawn by the consumer's scheduler, so that no other consumer can end this reader."""
    num_readers: NumReaders = 1
    """How many readers the lease has in all, as far as this one knows; 0 if it does not."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The consumer's requests still read these leases, or begin to."""

    requests: Annotated[list[Reader], msgspec.Meta(max_length=MAX_ENTRIES)]
    wants_ack: bool = True


class HeartbeatAck(msgspec.Struct, frozen=True, tag="heartbeat_ack"):
    """Answer to a heartbeat: those of its requests that are not held."""

    not_held: Annotated[list[tuple[str, Lease, LeaseStatus]], msgspec.Meta(max_length=MAX_ENTRIES)]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The consumer's rank is done with these requests, whether it read them or not."""

    consumer: ConsumerRank
    requests: Annotated[list[Reader], msgspec.Meta(max_length=MAX_ENTRIES)]


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Asks the producer to write a request into the consumer's blocks.

    `request_id` is the producer's. There is no lease if the consumer did not wait for the prefill:
    the request may be running or queued. The answer names `push_id`; a consumer uses each id for
    one request, and repeats it until it has an answer.
    """

    consumer: ConsumerRank
    push_id: Number
    request_id: _Id
    lease: Lease | None
    blocks: BlockLists
    starts: tuple[int, ...]
    block_sizes: tuple[int, ...]
    num_tokens: int
    is_verified: bool = False
    """The consumer asks for digests afterwards: its release ends the lease, not the `PushDone`."""
    reader_number: Number = 0
    num_readers: NumReaders = 1
    content: str | None = None
    """Digest of the consumer's prompt, if it has no hand-off to compare with."""

    @property
    def reader(self) -> Reader:
        """The reader that asks."""
        return Reader(self.request_id, self.lease, self.reader_number, self.num_readers)


class CancelPush(msgspec.Struct, frozen=True, tag="cancel_push"):
    """The consumer gives a push up, and waits for the `PushDone` that says it is quiet."""

    push_id: Number


class PushDone(msgspec.Struct, frozen=True, tag="push_done"):
    """A push has ended and is quiet: written if `error` is empty, otherwise failed."""

    push_id: Number
    expired: bool
    error: str


class DigestRequest(msgspec.Struct, frozen=True, tag="digest_request"):
    """Asks a producer's rank for digests of what it gives this consumer's rank of a request.

    Sent when the bytes are on their way or have arrived, and repeated until it is answered.
    """

    digest_id: Number
    reader: Reader
    scopes: Annotated[tuple[DigestScope, ...], msgspec.Meta(min_length=1, max_length=MAX_SCOPES)]
    """They have at most `MAX_DIGESTS` digests in all."""


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Answer to a `DigestRequest`: for each scope, 64 bits for each digest; or why not."""

    digest_id: Number
    values: Annotated[list[bytes], msgspec.Meta(max_length=MAX_SCOPES)] = []
    expired: bool = False
    error: str = ""


Message: TypeAlias = (
    ConsumerHello
    | Heartbeat
    | HeartbeatAck
    | Release
    | Push
    | CancelPush
    | PushDone
    | DigestRequest
    | Digests
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read what `encode` wrote; raise `WireError` for all other bytes, which any peer may send."""
    return wire.decode(_decoder, data, "connector message")
