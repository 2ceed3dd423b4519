"""The envelope around bytes from another process: magic, version, length, digest, body.

Native metadata loaders abort the process on some damaged bytes and accept others silently, so
nothing reaches them that has not passed `unseal`. The digest is BLAKE2b over header and body; with
a shared secret it is keyed, which makes it a MAC. The body is msgpack, decoded into a typed record.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

from pynixlkv.errors import ProtocolVersionError, WireError

MAGIC = b"PNKV"
VERSION = 4
"""The one version of everything that two processes exchange: envelopes, handshakes, notifications.
History: 1 = first; 2 = geometries of a hello without an envelope, `transfer_backend`; 3 =
readers of leases, digests."""

MAX_BYTES = 64 << 20
"""Longest message that is looked at: a hello of 1,000 regions on NIXL needs about 100 KB."""

_HEADER = struct.Struct("<4sHHQ")  # magic, version, flags, body length
_DIGEST_BYTES = 32
_FLAG_MAC = 1
_MAX_SECRET_BYTES = 64  # the longest key of BLAKE2b; longer secrets are hashed first

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Decoded = TypeVar("_Decoded")
_encode = msgspec.msgpack.Encoder().encode


def seal(body: object, what: str, *, secret: bytes | None = None) -> bytes:
    """Encode a record; `what` names its kind, and `unseal` accepts no other.

    The secret is the key of the MAC; without it the digest only guards against damage.
    """
    encoded = _encode(body)
    header = _HEADER.pack(MAGIC, VERSION, _FLAG_MAC if secret else 0, len(encoded))
    return header + _digest(header, encoded, what, secret) + encoded


def unseal(
    data: bytes | bytearray | memoryview,
    kind: type[_Body],
    what: str,
    *,
    secret: bytes | None = None,
) -> _Body:
    """Verify and decode untrusted bytes.

    Raises `ProtocolVersionError` if another version wrote them, `WireError` if they are truncated,
    padded, damaged, no record of this kind, or if their MAC does not fit.
    """
    view = memoryview(data).cast("B")
    if len(view) > MAX_BYTES:
        raise WireError(f"a {what} of {len(view)} bytes exceeds the limit of {MAX_BYTES}")
    if len(view) < _HEADER.size + _DIGEST_BYTES:
        raise WireError(
            f"{len(view)} bytes are too few for a {what}; its header and digest alone are "
            f"{_HEADER.size + _DIGEST_BYTES}"
        )
    header = bytes(view[: _HEADER.size])
    magic, version, flags, length = _HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError(f"not a pynixlkv {what}: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise ProtocolVersionError(
            f"the peer speaks {what} version {version}, this side {VERSION}; "
            "run the same pynixlkv release on both sides",
            local_version=str(VERSION),
            remote_version=str(version),
        )
    body = view[_HEADER.size + _DIGEST_BYTES :]
    if length != len(body):
        raise WireError(f"the {what} announces {length} body bytes but carries {len(body)}")
    if flags not in (0, _FLAG_MAC):
        raise WireError(f"the {what} has unknown flags {flags:#x}")
    if flags == _FLAG_MAC and secret is None:
        raise WireError(f"the {what} is authenticated; give this side the shared secret too")
    if flags == 0 and secret is not None:
        raise WireError(f"the {what} is not authenticated, but this side demands the shared secret")
    seen = bytes(view[_HEADER.size : _HEADER.size + _DIGEST_BYTES])
    if not hmac.compare_digest(seen, _digest(header, body, what, secret)):
        raise WireError(
            f"the {what}'s digest does not fit its bytes: they were damaged on the way"
            + ("" if secret is None else ", or the other side has another secret")
        )
    return decode(msgspec.msgpack.Decoder(kind), body, f"{what}'s body")


def decode(
    decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes | memoryview, what: str
) -> _Decoded:
    """Decode untrusted bytes; raise `WireError`, which names `what`, if they are malformed."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the {what} of {len(data)} bytes does not decode: {error}") from error


def _digest(header: bytes, body: bytes | memoryview, what: str, secret: bytes | None) -> bytes:
    key = secret or b""
    if len(key) > _MAX_SECRET_BYTES:
        key = hashlib.blake2b(key).digest()
    person = f"pynixlkv-{what}".encode()[: hashlib.blake2b.PERSON_SIZE]
    h = hashlib.blake2b(header, digest_size=_DIGEST_BYTES, key=key, person=person)
    h.update(body)
    return h.digest()
