"""The envelope around everything that leaves a process: magic, version, length, digest, body.

Native metadata loaders abort the process on some damaged bytes and accept others silently, so
nothing reaches them that has not passed `unseal`. The digest is BLAKE2b over header and body; with
a shared secret it is keyed, which makes it a MAC. The body is msgpack, decoded into typed records.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pynixlkv.errors import ConfigError, ProtocolVersionError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HELLO_VERSION", "MAX_HELLO_BYTES", "Hello", "SpanRecord", "seal", "unseal"]

MAGIC = b"PNKV"
HELLO_VERSION = 1
"""Version of the hello format. History: 1 = first."""

MAX_HELLO_BYTES = 64 << 20
"""Longest hello that is looked at: a model of 1,000 regions on NIXL needs about 100 KB."""

_HEADER = struct.Struct("<4sHHQ")  # magic, version, flags, body length
_DIGEST_BYTES = 32
_FLAG_MAC = 1
_MAX_SECRET_BYTES = 64  # the longest key of BLAKE2b; longer secrets are hashed first
_MAX_SPANS = 1 << 20


class SpanRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered range of memory, as told to a peer."""

    address: int
    nbytes: int
    device: int
    memory: int


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent tells its peers about itself.

    Parameters
    ----------
    agent : str
        Name of the agent.
    incarnation : bytes, 16 long
        Random for each agent object, so that a successor of the same name is told apart.
    engine : str
        ``"nixl"``, ``"ucx"``, ``"fake"``: native metadata is only understood by its own kind.
    engine_version : str
        Version of the native library; a difference in the first two numbers is refused.
    metadata : bytes
        Native metadata, opaque.
    byte_order : str
        ``"little"`` or ``"big"``, of the machine: native metadata are written in it.
    spans : list of SpanRecord
        The memory that may be reached.
    geometries : list of bytes
        Serialised `pynixlkv.geometry.Geometry` objects.
    """

    agent: str
    incarnation: bytes
    engine: str
    engine_version: str
    metadata: bytes
    byte_order: str
    spans: list[SpanRecord]
    geometries: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello)


def _key(secret: bytes | None) -> bytes:
    if secret is None:
        return b""
    if len(secret) > _MAX_SECRET_BYTES:
        return hashlib.blake2b(secret).digest()
    return secret


def _digest(header: bytes, body: bytes | memoryview, secret: bytes | None) -> bytes:
    h = hashlib.blake2b(
        header, digest_size=_DIGEST_BYTES, key=_key(secret), person=b"pynixlkv-hello"
    )
    h.update(body)
    return h.digest()


def _environment_secret() -> bytes | str | None:
    secret = os.environ.get("PYNIXLKV_SECRET")
    file = os.environ.get("PYNIXLKV_SECRET_FILE")
    if file is None:
        return secret
    if secret is not None:
        raise ConfigError("PYNIXLKV_SECRET and PYNIXLKV_SECRET_FILE are both set; unset one")
    try:
        return Path(file).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"PYNIXLKV_SECRET_FILE {file!r} cannot be read: {error}") from error


def check_secret(secret: bytes | str | None) -> bytes | None:
    """Return the secret as bytes, or the one that the environment names, or None without one.

    The environment names it as ``PYNIXLKV_SECRET``, or as a file in ``PYNIXLKV_SECRET_FILE``, of
    which a newline at the end is left out.

    Raises
    ------
    ConfigError
        If the secret is given but empty, the file cannot be read, or both variables are set.
    """
    if secret is None:
        secret = _environment_secret()
        if secret is None:
            return None
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if not raw:
        raise ConfigError(
            "the shared secret is empty; leave it out, or give at least one byte, better 16"
        )
    return raw


def seal(hello: Hello, *, secret: bytes | None = None) -> bytes:
    """Encode a hello.

    Parameters
    ----------
    hello : Hello
        What to tell.
    secret : bytes, optional
        Key of the MAC; without it the digest only guards against damage.

    Returns
    -------
    bytes
        What `unseal` of the other side takes.
    """
    body = _encoder.encode(hello)
    header = _HEADER.pack(MAGIC, HELLO_VERSION, _FLAG_MAC if secret else 0, len(body))
    return header + _digest(header, body, secret) + body


def unseal(data: bytes | bytearray | memoryview, *, secret: bytes | None = None) -> Hello:
    """Verify and decode a hello from outside.

    Parameters
    ----------
    data : bytes-like
        Untrusted.
    secret : bytes, optional
        Key of the MAC that the bytes must carry.

    Returns
    -------
    Hello
        Verified: every byte is what a holder of the secret (or, without one, somebody who knows
        this format) wrote.

    Raises
    ------
    WireError
        If the bytes are truncated, padded, damaged, not a hello, or their MAC does not fit.
    ProtocolVersionError
        If they are a hello of another version.
    """
    view = memoryview(data).cast("B")
    if len(view) > MAX_HELLO_BYTES:
        raise WireError(f"a hello of {len(view)} bytes exceeds the limit of {MAX_HELLO_BYTES}")
    if len(view) < _HEADER.size + _DIGEST_BYTES:
        raise WireError(
            f"{len(view)} bytes are too few for a hello; its header and digest alone are "
            f"{_HEADER.size + _DIGEST_BYTES}"
        )
    header = bytes(view[: _HEADER.size])
    magic, version, flags, length = _HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError(f"not a pynixlkv hello: it begins with {magic!r}, not {MAGIC!r}")
    if version != HELLO_VERSION:
        raise ProtocolVersionError(
            f"the peer speaks hello version {version}, this side {HELLO_VERSION}; "
            "run the same pynixlkv release on both sides",
            local_version=str(HELLO_VERSION),
            remote_version=str(version),
        )
    body = view[_HEADER.size + _DIGEST_BYTES :]
    if length != len(body):
        raise WireError(f"the hello announces {length} body bytes but carries {len(body)}")
    if flags not in (0, _FLAG_MAC):
        raise WireError(f"the hello has unknown flags {flags:#x}")
    if flags == _FLAG_MAC and secret is None:
        raise WireError("the hello is authenticated; give this agent the shared secret too")
    if flags == 0 and secret is not None:
        raise WireError("the hello is not authenticated, but this agent demands the shared secret")
    seen = bytes(view[_HEADER.size : _HEADER.size + _DIGEST_BYTES])
    if not hmac.compare_digest(seen, _digest(header, body, secret)):
        raise WireError(
            "the hello's digest does not fit its bytes: they were damaged on the way"
            + ("" if secret is None else ", or the other side has another secret")
        )
    try:
        hello = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"the hello's body does not decode: {error}") from error
    _check_fields(hello)
    return hello


def _check_fields(hello: Hello) -> None:
    if not hello.agent:
        raise WireError("the hello has an empty agent name")
    if len(hello.incarnation) != 16:
        raise WireError(f"the hello's incarnation has {len(hello.incarnation)} bytes, not 16")
    if len(hello.spans) > _MAX_SPANS:
        raise WireError(f"the hello lists {len(hello.spans)} spans; the limit is {_MAX_SPANS}")
    _check_spans(hello.spans)


def _check_spans(spans: Sequence[SpanRecord]) -> None:
    for i, span in enumerate(spans):
        fits = (
            span.address >= 0
            and span.nbytes > 0
            and span.address + span.nbytes <= 1 << 64
            and 0 <= span.device < 1 << 64
            and 0 <= span.memory <= 4
        )
        if not fits:
            raise WireError(f"span {i} of the hello is impossible: {span}")
