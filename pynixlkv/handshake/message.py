"""The messages: an envelope that all versions can read, and the payloads inside it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from pynixlkv import wire
from pynixlkv.errors import (
    CompatMismatch,
    ConfigError,
    EngineIdMismatch,
    ProtocolVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pynixlkv.types import Rank

MAX_REQUEST_BYTES = 1 << 20
"""Longest question that is read; usual ones have some hundred bytes."""

MAX_REPLY_BYTES = 256 << 20
"""Longest reply that is sent or read."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_WireRank = tuple[_Number, _Number]


class Envelope(msgspec.Struct, frozen=True):
    """The part of a message whose fields keep their names and meaning in all versions."""

    protocol: int
    engine_id: str
    compatibility: dict[str, str]
    payload: bytes = b""  # only decoded if the fields above fit


class Question(msgspec.Struct, frozen=True):
    """Asks for the hellos of some ranks, or of all (None)."""

    ranks: list[_WireRank] | None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """All ranks of the engine, ascending, and the hellos that were asked for."""

    served: list[_WireRank]
    hellos: list[tuple[_WireRank, bytes]]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why there is no answer; `served` lists the ranks if an unknown one was asked for."""

    kind: Literal["malformed", "mismatch", "ranks", "size", "internal"]
    message: str
    served: list[_WireRank] = []


Reply: TypeAlias = Answer | Refusal


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:  # noqa: ANN401
    return msgspec.msgpack.Decoder(kind)


encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, kind: Any) -> Any:  # noqa: ANN401
    """Decode an untrusted `Envelope`, `Question` or `Reply`; raise `WireError` if malformed."""
    return wire.decode(_decoder(kind), data, "handshake message")


def check_identity(engine_id: object, compatibility: Mapping[Any, Any]) -> Envelope:
    """Return one side's envelope, without a payload."""
    if not isinstance(engine_id, str) or not engine_id:
        raise ConfigError(f"engine_id is {engine_id!r}; expected a non-empty str")
    for field, value in compatibility.items():
        if not isinstance(field, str) or not isinstance(value, str):
            raise ConfigError(f"compatibility field {field!r} is {value!r}; expected str and str")
    return Envelope(wire.VERSION, engine_id, dict(compatibility))


def check_rank(rank: object) -> Rank:
    """Return the rank if valid; raises `ConfigError` otherwise."""
    try:
        checked: Rank = msgspec.convert(rank, _WireRank)
    except msgspec.ValidationError:
        raise ConfigError(f"rank is {rank!r}; expected (pp rank, tp rank), ints >= 0") from None
    return checked


def compare(mine: Envelope, theirs: Envelope, peer: str) -> None:
    """Raise unless both sides speak the same protocol, of the same engine, configured alike."""
    if theirs.protocol != mine.protocol:
        raise ProtocolVersionError(
            f"{peer} speaks handshake version {theirs.protocol}, this side {mine.protocol}; run "
            "the same pynixlkv release on both sides",
            peer=peer,
            local_version=str(mine.protocol),
            remote_version=str(theirs.protocol),
        )
    if theirs.engine_id != mine.engine_id:
        raise EngineIdMismatch(
            f"{peer} is about engine {theirs.engine_id!r}, this side about {mine.engine_id!r}: the "
            "address is another engine's, or the engine was restarted under a new id",
            wanted=mine.engine_id,
            seen=theirs.engine_id,
            peer=peer,
        )
    here, there = mine.compatibility, theirs.compatibility
    differences = [
        (field, here.get(field), there.get(field))
        for field in sorted({*here, *there})
        if here.get(field) != there.get(field)
    ]
    if differences:
        listed = "; ".join(f"{field} is {a!r} here, {b!r} there" for field, a, b in differences)
        raise CompatMismatch(
            f"{peer} is configured differently: {listed}", differences=differences, peer=peer
        )
