"""Where one may listen and ask without encryption, and the keys that a shared secret stands for."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from pynixlkv._secret import check_secret
from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from typing import Any

__all__ = ["Keys", "find_keys", "resolve"]


@dataclass(frozen=True, repr=False)
class Keys:
    """The CURVE key pairs that all holders of a secret agree on.

    The listener has one, whoever asks has the other; each side proves to hold its own.

    Parameters
    ----------
    server_public, server_secret, client_public, client_secret : bytes
        In Z85, as ZeroMQ takes them.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def apply_to_server(self, options: zmq.Socket[Any]) -> None:
        """Make a socket, before it is bound, demand the client's key."""
        options.curve_server = True
        options.curve_publickey = self.server_public
        options.curve_secretkey = self.server_secret

    def apply_to_client(self, options: zmq.Socket[Any]) -> None:
        """Make a socket, before it is connected, demand the server's key."""
        options.curve_serverkey = self.server_public
        options.curve_publickey = self.client_public
        options.curve_secretkey = self.client_secret

    def admits(self, credentials: bytes) -> bool:
        """Return whether a public key, as 32 raw bytes, is the client's."""
        return credentials == z85.decode(self.client_public)


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
    """Return the keys of a secret or, if it is None, of the environment's; None without one."""
    raw = check_secret(secret)
    return None if raw is None else _derive_keys(raw)


def resolve(host: str, port: int, *, keys: Keys | None, allow_insecure: bool) -> tuple[str, bool]:
    """Turn a host and port into a ZeroMQ endpoint, if it may be used with these keys.

    Parameters
    ----------
    host : str
        Name or numeric address.
    port : int
        0 to 65535.
    keys : Keys, optional
        Keys of the shared secret, if there is one.
    allow_insecure : bool
        Whether a missing secret is accepted on addresses that others can reach.

    Returns
    -------
    endpoint : str
        With a numeric address, so that ZeroMQ's own threads never wait for a name server.
    is_wildcard : bool
        Whether the address stands for all interfaces.

    Raises
    ------
    ConfigError
        If the host or port is none, or others could read what is sent there.

    Notes
    -----
    Blocks for as long as the system's resolver does, if the host is a name.
    """
    if type(port) is not int or not 0 <= port <= 65535:
        raise ConfigError(f"port is {port!r}; expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}") from error
    # ZeroMQ tries one address only; a name such as "localhost" that has both means IPv4 to most.
    is_ipv6, text = min((each[0] != socket.AF_INET, str(each[4][0])) for each in found)
    address = ipaddress.ip_address(text)
    if keys is None and not allow_insecure and not address.is_loopback:
        raise ConfigError(
            f"{host!r} ({address}) is not a loopback address, and without a shared secret anybody "
            "there can read or forge hellos; set PYNIXLKV_SECRET or PYNIXLKV_SECRET_FILE on both "
            "sides or pass secret=, or pass allow_insecure=True in a network that you trust wholly"
        )
    return f"tcp://[{text}]:{port}" if is_ipv6 else f"tcp://{text}:{port}", address.is_unspecified
