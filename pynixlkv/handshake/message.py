"""What goes over the wire: an envelope that all versions can read, and the payloads inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec

from pynixlkv.errors import (
    CompatMismatch,
    ConfigError,
    EngineIdMismatch,
    ProtocolVersionError,
    WireError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "MAX_REPLY_BYTES",
    "MAX_REQUEST_BYTES",
    "PROTOCOL_VERSION",
    "Answer",
    "Envelope",
    "Question",
    "Rank",
    "Refusal",
    "check_identity",
    "check_rank",
    "compare",
    "decode_envelope",
    "decode_question",
    "decode_reply",
    "encode",
]

PROTOCOL_VERSION = 1
"""Version of the payloads. History: 1 = first."""

MAX_REQUEST_BYTES = 1 << 20
"""Longest question that is read; it has some hundred bytes, and more only for many ranks."""

MAX_REPLY_BYTES = 256 << 20
"""Longest reply that is given or read."""

Rank = tuple[int, int]
"""Pipeline-parallel and tensor-parallel rank."""

_T = TypeVar("_T")
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_WireRank = tuple[_Number, _Number]


class Envelope(msgspec.Struct, frozen=True):
    """The part of a message whose fields keep their names and meaning in all versions.

    Parameters
    ----------
    protocol : int
        Version of the payload.
    engine_id : str
        The engine that the message is about.
    compatibility : dict of str to str
        Named facts that must be equal on both sides.
    payload : bytes
        A `Question`, or an `Answer` or `Refusal`; only decoded once the rest fits.
    """

    protocol: int
    engine_id: str
    compatibility: dict[str, str]
    payload: bytes = b""


class Question(msgspec.Struct, frozen=True):
    """Which hellos are wanted.

    Parameters
    ----------
    ranks : list of (int, int), or None
        None for all; none at all asks only which ranks there are.
    """

    ranks: list[_WireRank] | None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What was asked for.

    Parameters
    ----------
    served : list of (int, int)
        Every rank that there is, ascending.
    hellos : list of ((int, int), bytes)
        The hellos that were asked for.
    """

    served: list[_WireRank]
    hellos: list[tuple[_WireRank, bytes]]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why there is no answer.

    Parameters
    ----------
    kind : str
        What did not fit.
    message : str
        The same for people.
    served : list of (int, int)
        Where the ranks did not fit, those that there are.
    """

    kind: Literal["malformed", "mismatch", "ranks", "size", "internal"]
    message: str
    served: list[_WireRank] = []


encode = msgspec.msgpack.Encoder().encode
_envelopes = msgspec.msgpack.Decoder(Envelope)
_questions = msgspec.msgpack.Decoder(Question)
_replies: msgspec.msgpack.Decoder[Answer | Refusal] = msgspec.msgpack.Decoder(Answer | Refusal)


def decode_envelope(data: bytes) -> Envelope:
    """Decode an envelope from anyone; raises `WireError` if it is none."""
    return _decode(_envelopes.decode, data, "a handshake message")


def decode_question(payload: bytes) -> Question:
    """Decode the payload of a request; raises `WireError` if it is none."""
    return _decode(_questions.decode, payload, "a handshake question")


def decode_reply(payload: bytes) -> Answer | Refusal:
    """Decode the payload of a reply; raises `WireError` if it is none."""
    return _decode(_replies.decode, payload, "a handshake reply")


def _decode(decode: Callable[[bytes], _T], data: bytes, what: str) -> _T:
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{what} of {len(data)} bytes does not decode: {error}") from error


def check_identity(engine_id: str, compatibility: Mapping[str, str]) -> Envelope:
    """Return the envelope, still without payload, that one side sends; `ConfigError` if wrong."""
    if not _is_text(engine_id) or not engine_id:
        raise ConfigError(f"engine_id is {engine_id!r}; expected a non-empty str")
    for field, value in compatibility.items():
        if not _is_text(field) or not _is_text(value):
            raise ConfigError(f"compatibility field {field!r} is {value!r}; expected str and str")
    return Envelope(PROTOCOL_VERSION, engine_id, dict(compatibility))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def check_rank(rank: object) -> Rank:
    """Return the rank if it is one; raises `ConfigError` otherwise."""
    try:
        checked: Rank = msgspec.convert(rank, _WireRank)
        return checked
    except msgspec.ValidationError:
        raise ConfigError(f"rank is {rank!r}; expected (pp rank, tp rank), ints >= 0") from None


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
