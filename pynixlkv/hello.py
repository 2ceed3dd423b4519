"""The hello: an agent's metadata, native and ours, as it is sent to a peer."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pynixlkv import wire
from pynixlkv.geometry import Geometry
from pynixlkv.types import MemorySpan


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent tells its peers about itself (agent metadata, in NIXL's words).

    `incarnation` is random for each agent object and tells a successor of the same name apart.
    Native `metadata` is opaque, only understood by the same `transfer_backend`, and written in the
    machine's `byte_order`. A difference in the first two numbers of `backend_version` is refused.
    """

    agent: Annotated[str, msgspec.Meta(min_length=1)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    transfer_backend: str
    backend_version: str
    metadata: bytes
    byte_order: str
    spans: Annotated[list[MemorySpan], msgspec.Meta(max_length=1 << 20)]
    geometries: list[Geometry]

    def seal(self, secret: bytes | None = None) -> bytes:
        """Encode it; the secret is the key of the MAC."""
        return wire.seal(self, "hello", secret=secret)

    @classmethod
    def unseal(cls, data: bytes, secret: bytes | None = None) -> Hello:
        """Verify and decode untrusted bytes; see `pynixlkv.wire.unseal`."""
        return wire.unseal(data, cls, "hello", secret=secret)
