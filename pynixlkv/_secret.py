"""The secret that authenticates hellos and handshakes: given, or named by the environment."""

from __future__ import annotations

import os
from pathlib import Path

from pynixlkv.errors import ConfigError


def check_secret(secret: bytes | str | None) -> bytes | None:
    """Return the secret as bytes; without one, that of the environment, or None.

    The environment names it as ``PYNIXLKV_SECRET``, or as a file in ``PYNIXLKV_SECRET_FILE``
    (newlines at the file's end do not count).
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
