"""
NIXL's verbs.
"""

from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

import pynixlkv.nixl._enums
import pynixlkv.types

__all__: list[str] = [
    "Backend",
    "Library",
    "NativeAgent",
    "PluginParams",
    "PreparedList",
    "Registration",
    "TransferCost",
    "TransferTelemetry",
    "XferRequest",
    "status_table",
]

class Backend:
    """
    A transport or storage engine of an agent; made by `Agent.create_backend`.
    """
    def __repr__(self) -> str: ...
    @property
    def type(self) -> str:
        """
        Name of its plugin; empty where NIXL does not tell which backend it chose.
        """

class Library:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...

class NativeAgent:
    def __init__(
        self,
        library: Library,
        name: str,
        *,
        progress_thread: bool = False,
        listen_thread: bool = False,
        listen_port: typing.SupportsInt | typing.SupportsIndex = 0,
        thread_sync: typing.SupportsInt | typing.SupportsIndex = 0,
        progress_delay_us: typing.SupportsInt | typing.SupportsIndex = 1000,
        listen_delay_us: typing.SupportsInt | typing.SupportsIndex = 100000,
        telemetry: bool = False,
    ) -> None: ...
    def _check_remote_md(
        self,
        peer: str,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memory: pynixlkv.types.MemoryType | str,
    ) -> bool: ...
    def _close(self) -> bool: ...
    def _create_xfer_req(
        self,
        operation: pynixlkv.types.Operation | str,
        local: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        local_memory: pynixlkv.types.MemoryType | str,
        remote: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        remote_memory: pynixlkv.types.MemoryType | str,
        peer: str,
        notification: bytes | None,
        backends: collections.abc.Sequence[Backend],
    ) -> XferRequest: ...
    def _drain(self, timeout: typing.SupportsFloat | typing.SupportsIndex) -> int: ...
    def _fetch_remote_md(
        self, peer: str, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def _gen_notif(
        self, peer: str, message: bytes, backends: collections.abc.Sequence[Backend]
    ) -> None: ...
    def _get_local_partial_md(
        self,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memory: pynixlkv.types.MemoryType | str,
        backends: collections.abc.Sequence[Backend],
    ) -> bytes: ...
    def _get_notifs(
        self, backends: collections.abc.Sequence[Backend]
    ) -> list[tuple[str, bytes]]: ...
    def _invalidate_local_md(
        self, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def _load_remote_md(self, metadata: bytes) -> str: ...
    def _make_xfer_req(
        self,
        operation: pynixlkv.types.Operation | str,
        local: PreparedList,
        local_indices: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        remote: PreparedList,
        remote_indices: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        notification: bytes | None,
        skip_merge: bool,
        backends: collections.abc.Sequence[Backend],
    ) -> XferRequest: ...
    def _prep_xfer_dlist(
        self,
        peer: str,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memory: pynixlkv.types.MemoryType | str,
        backends: collections.abc.Sequence[Backend],
    ) -> PreparedList: ...
    def _query_mem(
        self,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memory: pynixlkv.types.MemoryType | str,
        metadata: collections.abc.Sequence[bytes],
        backends: collections.abc.Sequence[Backend],
    ) -> list[dict[str, str] | None]: ...
    def _register_mem(
        self,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memory: pynixlkv.types.MemoryType | str,
        metadata: collections.abc.Sequence[bytes],
        keepalive: typing.Any,
        backends: collections.abc.Sequence[Backend],
    ) -> Registration: ...
    def _send_local_md(self, ip: str, port: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def _send_local_partial_md(
        self,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memory: pynixlkv.types.MemoryType | str,
        ip: str,
        port: typing.SupportsInt | typing.SupportsIndex,
        backends: collections.abc.Sequence[Backend],
    ) -> None: ...
    def create_backend(
        self, plugin: str, params: collections.abc.Mapping[str, str] | None = None
    ) -> Backend:
        """
        Create a backend, one of each type per agent, with parameters over the defaults.
        """
    def deregister_mem(self, registration: Registration) -> None:
        """
        Deregister memory, once and not while prepared lists or requests use it.
        """
    def estimate_xfer_cost(self, request: XferRequest) -> TransferCost:
        """
        Return NIXL's estimate of how long a request takes; works before it is posted.
        """
    def get_available_plugins(self) -> list[str]:
        """
        Return the names of the plugins that NIXL knows; not all need to load here.
        """
    def get_backend_params(self, backend: Backend) -> PluginParams:
        """
        Return memory types and parameters of a backend.
        """
    def get_local_md(self) -> bytes:
        """
        Return what a peer must load to reach this agent and its registered memory.
        """
    def get_plugin_params(self, plugin: str) -> PluginParams:
        """
        Return memory types and default parameters of a plugin.
        """
    def get_xfer_status(self, request: XferRequest) -> pynixlkv.nixl._enums.XferState:
        """
        Poll a transfer; returns NOT_POSTED, PENDING or DONE, and raises if it has failed.
        """
    def get_xfer_telemetry(self, request: XferRequest) -> TransferTelemetry:
        """
        Return what NIXL measured of a transfer that is done; needs `AgentConfig.telemetry`.
        """
    def invalidate_remote_md(self, peer: str) -> None:
        """
        Forget a peer and its connection. Lists and requests made for it become stale and still have to be released. Load its metadata again for a new connection.
        """
    def make_connection(
        self, peer: str, *, backends: collections.abc.Sequence[Backend] = []
    ) -> None:
        """
        Connect ahead of the first transfer. Success does not mean that the peer is alive.
        """
    def post_xfer_req(
        self, request: XferRequest, notification: bytes | None = None
    ) -> pynixlkv.nixl._enums.XferState:
        """
        Start a transfer, or start it again after its end, perhaps with another notification. Returns PENDING or DONE. Blocks, without the GIL, for as long as the backend takes: between processes of one host that is the whole copy.
        """
    def query_xfer_backend(self, request: XferRequest) -> Backend:
        """
        Return the backend that NIXL chose.
        """
    def release_dlist_handle(self, prepared: PreparedList) -> None:
        """
        Release a prepared list, once and not while requests made from it are not released.
        """
    def release_xfer_req(
        self, request: XferRequest, timeout: typing.SupportsFloat | typing.SupportsIndex = 0.0
    ) -> bool:
        """
        Release a request; wait up to the timeout in seconds for one that is running. False if it was still running and has been quarantined: its bytes may still move, and its memory cannot be deregistered yet.
        """
    @property
    def backends(self) -> list[Backend]:
        """
        The backends that were created.
        """
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_here(self) -> bool:
        """
        False in a forked child of the process that made it.
        """
    @property
    def name(self) -> str: ...
    @property
    def num_quarantined(self) -> int:
        """
        Requests that were given up while running and are not quiet yet.
        """

class PluginParams:
    """
    What a plugin or a backend says about itself.
    """
    @property
    def memory_types(self) -> tuple[pynixlkv.types.MemoryType, ...]:
        """
        Kinds of memory that it can transfer.
        """
    @property
    def params(self) -> dict[str, str]: ...

class PreparedList:
    """
    Descriptors that NIXL has prepared; made by `Agent.prep_xfer_dlist`.
    """
    def __enter__(self) -> PreparedList: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, traceback: typing.Any) -> None: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def close(self) -> None:
        """
        Release the list; a second call does nothing.
        """
    @property
    def is_closed(self) -> bool:
        """
        Whether it was released, or its agent closed.
        """
    @property
    def peer(self) -> str | None:
        """
        Agent whose memory it is; None for the agent's own side.
        """

class Registration:
    """
    Registered memory; made by `Agent.register_mem` and `Agent.register_buffers`. Dropping it deregisters the memory too, with a `ResourceWarning`.
    """
    def __enter__(self) -> Registration: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, traceback: typing.Any) -> None: ...
    def __repr__(self) -> str: ...
    def close(self) -> None:
        """
        Deregister the memory; a second call does nothing. Over TCP and same-host copies a peer that knows the memory can still read and write it: tell the peers to stop before you reuse it.
        """
    @property
    def descriptors(self) -> numpy.typing.NDArray[numpy.uint64]:
        """
        What was registered, as (n, 3) uint64: address, length in bytes, device.
        """
    @property
    def is_closed(self) -> bool:
        """
        Whether it was released, or its agent closed.
        """
    @property
    def memory_type(self) -> pynixlkv.types.MemoryType: ...
    @property
    def num_users(self) -> int:
        """
        Prepared lists and requests that use the memory and forbid to deregister it.
        """

class TransferCost:
    """
    NIXL's estimate of a request; rough for small descriptors, which it rounds down to 1 µs.
    """
    @property
    def duration_us(self) -> int: ...
    @property
    def margin_us(self) -> int: ...
    @property
    def method(self) -> int:
        """
        NIXL's number for how it estimated.
        """

class TransferTelemetry:
    """
    What NIXL measured of a transfer that is done.
    """
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_descriptors(self) -> int:
        """
        After merging.
        """
    @property
    def post_us(self) -> int: ...
    @property
    def start_us(self) -> int:
        """
        Start, on the steady clock.
        """
    @property
    def transfer_us(self) -> int:
        """
        Until the poll that saw the end.
        """

class XferRequest:
    """
    One transfer; made by `Agent.make_xfer_req` and `Agent.create_xfer_req`.
    """
    def __enter__(self) -> XferRequest: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, traceback: typing.Any) -> None: ...
    def __repr__(self) -> str: ...
    def close(self, timeout: typing.SupportsFloat | typing.SupportsIndex = 0.0) -> None:
        """
        Release it as `Agent.release_xfer_req` does; a second call does nothing.
        """
    @property
    def is_closed(self) -> bool:
        """
        Whether it was released, or its agent closed.
        """
    @property
    def num_bytes(self) -> int:
        """
        Bytes that one post moves.
        """
    @property
    def num_descriptors(self) -> int:
        """
        Descriptors as given, before NIXL merged any.
        """
    @property
    def operation(self) -> pynixlkv.types.Operation: ...
    @property
    def peer(self) -> str: ...
    @property
    def state(self) -> pynixlkv.nixl._enums.XferState:
        """
        State as of the last call; does not poll.
        """

def status_table() -> list[tuple[int, str, str]]: ...
