"""Addresses that are allowed without a secret, and the CURVE keys derived from a secret."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import operator
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from pynixlkv._secret import check_secret
from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@dataclass(frozen=True)
class Address:
    """A numeric address, so that ZeroMQ's own threads never wait for a name server."""

    host: str
    """With a scope where it needs one."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The form that ZeroMQ takes."""
        return f"tcp://{self}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it means all interfaces."""
        return ipaddress.ip_address(self.host).is_unspecified


def resolve(
    host: object, port: object, *, keys: Keys | None, allow_insecure: bool
) -> list[Address]:
    """Return all addresses of a host, IPv4 first; may wait for a name server.

    Raises `ConfigError` for an address that is invalid, or not safe to use without keys.
    """
    if not isinstance(host, str) or not host:
        raise ConfigError(f"host is {host!r}; expected a name or an address")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = _port(port)
    try:
        found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}") from error
    places = [each[4] for each in sorted(found, key=lambda each: each[0] != socket.AF_INET)]
    addresses = [Address(text, number) for text in dict.fromkeys(map(_numeric, places))]
    for address in addresses:
        is_loopback = ipaddress.ip_address(address.host).is_loopback
        if keys is None and not allow_insecure and not is_loopback:
            raise ConfigError(
                f"{host!r} ({address.host}) is not a loopback address, and without a shared secret "
                "anybody there can read or forge hellos; set PYNIXLKV_SECRET or "
                "PYNIXLKV_SECRET_FILE on both sides or pass secret=, or pass allow_insecure=True "
                "in a network that you trust wholly"
            )
    return addresses


def _numeric(place: Sequence[object]) -> str:
    """Return the address in a socket's place, with its scope if it has one."""
    text, scope = str(place[0]), place[3] if len(place) > 3 else 0
    if not scope or "%" in text:
        return text
    return f"{text}%{socket.if_indextoname(scope)}"  # type: ignore[arg-type]


def _port(port: object) -> int:
    try:
        number = int(port) if isinstance(port, str) else operator.index(port)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1
    if isinstance(port, bool) or not 0 <= number <= 65535:
        raise ConfigError(f"port is {port!r}; expected 0 to 65535")
    return number
