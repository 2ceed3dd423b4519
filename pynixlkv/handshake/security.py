"""Addresses that are allowed without a secret, and the CURVE keys derived from a secret."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import socket
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from pynixlkv._secret import check_secret
from pynixlkv.errors import ConfigError


@dataclass(frozen=True, repr=False)
class Keys:
    """The CURVE key pairs, in Z85: one of the listener, one shared by all clients."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


@functools.lru_cache(maxsize=8)
def _derive_keys(secret: bytes) -> Keys:
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE; install a pyzmq wheel")
    keys = []
    for label in (b"pynixlkv-server", b"pynixlkv-client"):
        private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=label).digest())
        keys += [zmq.curve_public(private), private]
    return Keys(*keys)


def find_keys(secret: bytes | str | None) -> Keys | None:
    """Return the keys of the secret or, if None, of the one that the environment names."""
    raw = check_secret(secret)
    return None if raw is None else _derive_keys(raw)


def resolve(host: str, port: int, *, keys: Keys | None, allow_insecure: bool) -> tuple[str, bool]:
    """Return a host and port as a ZeroMQ endpoint, and whether they mean all interfaces.

    The endpoint is numeric, so that ZeroMQ's own threads never wait for a name server; this call
    may. Raises `ConfigError` for an address that is invalid, or not safe to use without keys.
    """
    if type(port) is not int or not 0 <= port <= 65535:
        raise ConfigError(f"port is {port!r}; expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}") from error
    # ZeroMQ tries one address only; prefer IPv4 for names that have both, such as "localhost".
    is_ipv6, text = min((each[0] != socket.AF_INET, str(each[4][0])) for each in found)
    address = ipaddress.ip_address(text)
    if keys is None and not allow_insecure and not address.is_loopback:
        raise ConfigError(
            f"{host!r} ({address}) is not a loopback address, and without a shared secret anybody "
            "there can read or forge hellos; set PYNIXLKV_SECRET or PYNIXLKV_SECRET_FILE on both "
            "sides or pass secret=, or pass allow_insecure=True in a network that you trust wholly"
        )
    return f"tcp://[{text}]:{port}" if is_ipv6 else f"tcp://{text}:{port}", address.is_unspecified
