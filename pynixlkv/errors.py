"""The exception tree: everything that pynixlkv raises on purpose derives from `PynixlkvError`.

Messages say what failed, on what, what was seen, and what to do about it. Facts that a program may
act on are attributes. `from_native` is the one place where native status codes become exceptions.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pynixlkv.types import DigestMismatch

__all__ = [
    "AlreadyRegisteredError",
    "ClosedError",
    "CompatMismatch",
    "ConfigError",
    "ContentMismatch",
    "DuplicatePeerError",
    "EngineIdMismatch",
    "ForkError",
    "HandshakeError",
    "HandshakeTimeout",
    "IncompatibleLayoutError",
    "InvalidBlocksError",
    "KVCorruptError",
    "LayoutError",
    "LeaseExpired",
    "LibraryNotFoundError",
    "LibraryVersionError",
    "NativeError",
    "NixlBackendError",
    "NixlError",
    "NixlInvalidParamError",
    "NixlNotFoundError",
    "NixlStateError",
    "NixlTelemetryError",
    "NotRegisteredError",
    "PeerLostError",
    "PlanError",
    "PoolExhausted",
    "ProtocolVersionError",
    "PynixlkvError",
    "RankNotFound",
    "RegistrationError",
    "RegistrationInUseError",
    "ResourceExhausted",
    "StalePeerError",
    "StateError",
    "StorageError",
    "TransferCancelled",
    "TransferError",
    "TransferTimeout",
    "UcxError",
    "UnknownPeerError",
    "WireError",
]


class PynixlkvError(Exception):
    """Base of every exception that pynixlkv raises on purpose.

    Parameters
    ----------
    message : str
        What failed, on what, what was seen, and what to do.
    **facts : object
        Attributes of the class to set; each has a default.
    """

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)


class ConfigError(PynixlkvError, ValueError):
    """A wrong argument, an impossible combination, or a bad option."""


class LayoutError(ConfigError):
    """A shape, stride, dtype, axes string or TP combination that cannot be mapped."""


class PlanError(ConfigError):
    """Block tables that do not fit the plan, or geometries that cannot be planned together."""


class ContentMismatch(ConfigError):
    """A hand-off holds the KV of other content than the request's; nothing was loaded."""

    expected: str = ""
    """Digest of the request's content; empty if the request has fewer tokens."""
    seen: str = ""
    """Digest in the hand-off; empty if the hand-off has none."""


class RegistrationError(ConfigError):
    """Memory whose registration does not allow the operation."""


class NotRegisteredError(RegistrationError):
    """An address range that is not, or not wholly, inside registered memory."""


class AlreadyRegisteredError(RegistrationError):
    """Memory that this agent has registered before."""


class RegistrationInUseError(RegistrationError):
    """Memory that cannot be deregistered because transfers still use it."""


class UnknownPeerError(ConfigError):
    """A peer name that this agent has not connected to."""


class DuplicatePeerError(ConfigError):
    """Another live agent already uses the name."""


class StateError(PynixlkvError, RuntimeError):
    """The state of an object does not allow the call (never posted, still running)."""


class StalePeerError(StateError):
    """A handle made for an earlier generation of a peer."""


class ClosedError(StateError):
    """An object used after `close()` or release."""


class ForkError(ClosedError):
    """An object of the parent process used in a forked child."""


class PoolExhausted(PynixlkvError):
    """A pool had too few free blocks until the deadline, and kept them."""


class ResourceExhausted(PynixlkvError):
    """A limit of this process, such as its file descriptors, leaves no room for a new object."""


class NativeError(PynixlkvError):
    """A native library reported a failure."""

    library: str = ""
    """``"nixl"`` or ``"ucx"``."""
    status: int = 0
    """The native status code, in the numbering of that library's C interface."""
    call: str = ""
    """Name of the native function."""
    detail: str = ""
    """What was being done, on what; may be empty."""


class NixlError(NativeError):
    """NIXL reported a failure."""


class NixlInvalidParamError(NixlError):
    """NIXL refused an argument."""


class NixlBackendError(NixlError):
    """A NIXL backend failed; at run time this usually means that the connection is gone."""


class NixlStateError(NixlError):
    """The state of an object of NIXL does not allow the call."""


class NixlNotFoundError(NixlError):
    """NIXL does not know the agent, memory or plugin."""


class NixlTelemetryError(NixlError):
    """NIXL has no telemetry for the request; switch it on in the agent's configuration."""


class UcxError(NativeError):
    """UCX reported a failure."""


class TransferError(PynixlkvError):
    """A transfer ended without success."""

    peer: str = ""
    """Name of the remote agent."""
    transfer_id: int = 0
    """The transfer's number within its agent."""
    bytes_done: int = 0
    """Bytes known to have arrived; 0 if the agent cannot tell."""


class TransferTimeout(TransferError, TimeoutError):
    """A transfer did not end by its deadline; its buffers stay quarantined until it is quiet."""


class TransferCancelled(TransferError):
    """The owner of a transfer cancelled it."""


class PeerLostError(TransferError, ConnectionError):
    """The connection to the peer is gone; connecting again makes a new generation of the peer."""


class LeaseExpired(TransferError):
    """The producer no longer held the blocks during the read; the bytes may be wrong."""


class KVCorruptError(TransferError):
    """KV that arrived has other digests than its producer's; it must not be used."""

    mismatches: Sequence[DigestMismatch] = ()
    """The first places that differ, at most 64."""
    num_mismatches: int = 0
    """Number of digests that differ."""


class StorageError(TransferError):
    """A file of blocks could not be made, opened, read or written."""

    path: str = ""
    """Path of the file."""
    blocks: Mapping[str, Sequence[int]] = MappingProxyType({})
    """Blocks that are concerned, by group; empty if the whole file is."""
    errno: int | None = None
    """Number of the system's error, if there was one."""


class InvalidBlocksError(StorageError):
    """Blocks of a file that are not whole, or are being written; use nothing that was read."""


class HandshakeError(PynixlkvError):
    """Two sides could not connect."""

    peer: str = ""
    """Name of the other side, if known."""
    local_version: str = ""
    """Version of this side, if versions differ."""
    remote_version: str = ""
    """Version of the other side, if versions differ."""


class WireError(HandshakeError, ValueError):
    """Bytes from outside are damaged, truncated, forged, or of another program; none were used."""


class ProtocolVersionError(HandshakeError):
    """The other side has another version of a format or library."""


class HandshakeTimeout(HandshakeError, TimeoutError):
    """The other side did not answer by the deadline."""


class EngineIdMismatch(HandshakeError):
    """The wrong engine answered, for instance a successor on the same port."""

    wanted: str = ""
    """Engine id asked for."""
    seen: str = ""
    """Id of the engine that answered."""


class RankNotFound(HandshakeError):
    """The engine does not serve a requested rank."""

    missing: Sequence[tuple[int, int]] = ()
    """Pipeline and tensor-parallel ranks that do not exist."""
    available: Sequence[tuple[int, int]] = ()
    """Ranks that exist."""


class CompatMismatch(HandshakeError):
    """Two engines differ in configuration that must agree."""

    differences: Sequence[tuple[str, str | None, str | None]] = ()
    """Field name, local value, remote value; None where a side does not have the field."""

    @property
    def fields(self) -> list[str]:
        """Names of the fields that differ."""
        return [field for field, _, _ in self.differences]


class IncompatibleLayoutError(HandshakeError):
    """The other side's cache cannot be planned against ours."""

    differences: Sequence[tuple[str, object, object]] = ()
    """Field name, local value, remote value."""


class LibraryNotFoundError(PynixlkvError, ImportError):
    """A native library is not installed; the message lists every path tried and the remedy."""


class LibraryVersionError(LibraryNotFoundError):
    """A native library was found but is too old, a stub, or lacks a symbol."""


_NIXL_KINDS: dict[str, type[NixlError]] = {
    "invalid_param": NixlInvalidParamError,
    "backend": NixlBackendError,
    "state": NixlStateError,
    "not_found": NixlNotFoundError,
    "telemetry": NixlTelemetryError,
}


def from_native(
    kind: str, message: str, library: str, status: int, call: str, detail: str
) -> PynixlkvError:
    """Make the exception for a failure that native code reports; never raises.

    `kind` is the name of a class of this module, or NIXL's name of a status. `library` is empty
    unless a native library failed. An unknown kind becomes a plain `NativeError`.
    """
    if library:
        if library == "nixl":
            cls: type[NativeError] = _NIXL_KINDS.get(kind, NixlError)
        else:
            cls = UcxError if library == "ucx" else NativeError
        return cls(message, library=library, status=status, call=call, detail=detail)
    named = globals().get(kind)
    if isinstance(named, type) and issubclass(named, PynixlkvError):
        return named(message)
    return NativeError(f"{kind}: {message}")
