"""What ``pynixlkv bench`` and its two processes say to each other, in msgpack."""

from __future__ import annotations

import msgspec

from pynixlkv.cli.bench.cases import TRANSPORTS, Case
from pynixlkv.cli.messages import Failed

__all__ = [
    "Close",
    "Done",
    "Finish",
    "Message",
    "Offer",
    "Offered",
    "Open",
    "Ran",
    "Rest",
    "Rested",
    "Run",
    "Serve",
    "SideSpec",
    "decode",
]


class SideSpec(msgspec.Struct, frozen=True, tag=True):
    """All that a process needs to know at its start.

    It stays on one processor if one is named.
    """

    name: str
    transport: str
    timeout_s: float
    processor: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Settings of UCX for the transport; none for ``"all"``."""
        return {} if self.transport == "all" else TRANSPORTS[self.transport].environment


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Target: make memory and whatever moves bytes for every series of a case."""

    case: Case


class Offered(msgspec.Struct, frozen=True, tag=True):
    """What the initiator needs to reach the memory, by series."""

    offers: dict[str, bytes]


class Open(msgspec.Struct, frozen=True, tag=True):
    """Initiator: connect to what the target offers."""

    case: Case
    offers: dict[str, bytes]


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Target: take part in a series until the next command; `clear` its memory before."""

    series: str
    clear: bool


class Run(msgspec.Struct, frozen=True, tag=True):
    """Initiator: move everything once; `compare` what has arrived here."""

    series: str
    compare: bool


class Ran(msgspec.Struct, frozen=True, tag=True):
    """How long it took, the bytes that are wrong, and the error if it failed."""

    seconds: float = 0.0
    wrong_bytes: int = 0
    error: str = ""


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Target: stop taking part; `compare` what has arrived there."""

    compare: bool


class Rested(msgspec.Struct, frozen=True, tag=True):
    """The bytes that are wrong at the target."""

    wrong_bytes: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """Give back everything of the case."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Exit."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command has been carried out."""


Message = (
    SideSpec | Offer | Offered | Open | Serve | Run | Ran | Rest | Rested | Close | Finish | Done
    | Failed
)  # fmt: skip
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Return the message in some bytes.

    Parameters
    ----------
    data : bytes
        What `pynixlkv.cli.messages.encode` made.

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
