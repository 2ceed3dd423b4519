"""First contact: one engine serves the hello bytes of its ranks, another fetches them.

Before two engines can move blocks, each rank of one needs the hello bytes (`Agent.hello`) of those
ranks of the other that it reads from or writes to. `Handshake` serves them from one ZeroMQ listener
per engine, on a thread of its own; `fetch` asks for them, with a deadline.

A message is an envelope, whose fields never change their meaning, around a payload that may change
with the protocol version. Version, engine id and compatibility fields are compared before any of
the payload is decoded, by both sides, so that a mismatch is reported as what it is.

With a shared secret everything is encrypted and authenticated with ZeroMQ's CURVE: the key pairs of
both sides are derived from it, and whoever does not know it is told nothing. Without one, only
loopback addresses are served and asked, unless that is explicitly allowed. No clock time is sent.
"""

from __future__ import annotations

try:
    import zmq as _zmq  # noqa: F401
except ModuleNotFoundError as error:
    from pynixlkv.errors import LibraryNotFoundError

    raise LibraryNotFoundError(
        "pynixlkv.handshake needs ZeroMQ, which is not installed: pip install 'pynixlkv[connector]'"
    ) from error

from pynixlkv.handshake.client import RemoteEngine, fetch
from pynixlkv.handshake.message import PROTOCOL_VERSION, Rank
from pynixlkv.handshake.server import Handshake

__all__ = ["PROTOCOL_VERSION", "Handshake", "Rank", "RemoteEngine", "fetch"]
