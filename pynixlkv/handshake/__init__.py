"""First contact: one engine serves the hello bytes of its ranks, another fetches them.

Before two engines can move blocks, each rank of one needs the hello bytes (`Agent.hello`) of the
ranks that it reads from or writes to. `Handshake` serves them from one ZeroMQ listener per engine,
on a thread of its own; `fetch` asks for them, with a deadline.

A message is an envelope, whose fields keep their meaning in all versions, around a payload that may
change with the protocol version. Both sides compare version, engine id and compatibility fields
before they decode any of the payload, so that an error names what differs.

With a shared secret everything is encrypted and authenticated by ZeroMQ's CURVE: the key pairs of
both sides are derived from the secret, and a client without it learns nothing. Without a secret,
only loopback addresses are served and asked, unless `allow_insecure` says otherwise.
"""

from __future__ import annotations

try:
    import zmq as _zmq  # noqa: F401
except ModuleNotFoundError as error:
    from pynixlkv.errors import LibraryNotFoundError

    raise LibraryNotFoundError(
        "pynixlkv.handshake needs ZeroMQ, which is not installed: pip install 'pynixlkv[connector]'"
    ) from error

from pynixlkv.handshake.client import HandshakeReply, fetch
from pynixlkv.handshake.server import Handshake
from pynixlkv.types import Rank

__all__ = ["Handshake", "HandshakeReply", "Rank", "fetch"]
