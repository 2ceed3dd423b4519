"""
NIXL's verbs.
"""

from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

__all__: list[str] = [
    "Agent",
    "Backend",
    "Library",
    "PreparedList",
    "Registration",
    "Request",
    "STATUS_TABLE",
]

class Agent:
    num_abandoned: typing.ClassVar[int] = 0
    def __init__(
        self,
        library: Library,
        name: str,
        *,
        progress_thread: bool,
        listen_thread: bool,
        listen_port: typing.SupportsInt | typing.SupportsIndex,
        thread_sync: typing.SupportsInt | typing.SupportsIndex,
        progress_delay_us: typing.SupportsInt | typing.SupportsIndex,
        listen_delay_us: typing.SupportsInt | typing.SupportsIndex,
        telemetry: bool,
    ) -> None: ...
    def available_plugins(self) -> list[str]: ...
    def backend_info(self, backend: Backend) -> tuple[list[int], dict[str, str]]: ...
    def check_remote_metadata(
        self,
        peer: str,
        memory: typing.SupportsInt | typing.SupportsIndex,
        rows: numpy.typing.NDArray[numpy.uint64],
    ) -> bool: ...
    def close(self, patience: typing.SupportsFloat | typing.SupportsIndex) -> bool: ...
    def create_backend(self, type: str, params: collections.abc.Mapping[str, str]) -> Backend: ...
    def create_request(
        self,
        operation: typing.SupportsInt | typing.SupportsIndex,
        local_memory: typing.SupportsInt | typing.SupportsIndex,
        local: numpy.typing.NDArray[numpy.uint64],
        remote_memory: typing.SupportsInt | typing.SupportsIndex,
        remote: numpy.typing.NDArray[numpy.uint64],
        peer: str,
        notification: str | None,
        custom_param: str,
        backends: collections.abc.Sequence[Backend],
    ) -> Request: ...
    def drain(self, patience: typing.SupportsFloat | typing.SupportsIndex) -> int: ...
    def fetch_remote_metadata(
        self, peer: str, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def generation(self, peer: str) -> int: ...
    def invalidate_local_metadata(
        self, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def invalidate_remote_metadata(self, peer: str) -> None: ...
    def load_remote_metadata(self, metadata: str) -> str: ...
    def local_metadata(self) -> bytes: ...
    def local_partial_metadata(
        self,
        memory: typing.SupportsInt | typing.SupportsIndex,
        rows: numpy.typing.NDArray[numpy.uint64],
        backends: collections.abc.Sequence[Backend],
    ) -> bytes: ...
    def make_connection(self, peer: str, backends: collections.abc.Sequence[Backend]) -> None: ...
    def make_request(
        self,
        operation: typing.SupportsInt | typing.SupportsIndex,
        local: PreparedList,
        local_indices: numpy.typing.NDArray[numpy.int32],
        remote: PreparedList,
        remote_indices: numpy.typing.NDArray[numpy.int32],
        notification: str | None,
        skip_merge: bool,
        custom_param: str,
        backends: collections.abc.Sequence[Backend],
    ) -> Request: ...
    def notify(
        self, peer: str, message: str, backends: collections.abc.Sequence[Backend]
    ) -> None: ...
    def plugin_info(self, plugin: str) -> tuple[list[int], dict[str, str]]: ...
    def prepare(
        self,
        peer: str,
        memory: typing.SupportsInt | typing.SupportsIndex,
        rows: numpy.typing.NDArray[numpy.uint64],
        backends: collections.abc.Sequence[Backend],
    ) -> PreparedList: ...
    def query_memory(
        self,
        memory: typing.SupportsInt | typing.SupportsIndex,
        rows: numpy.typing.NDArray[numpy.uint64],
        metadata: collections.abc.Sequence[str],
        backends: collections.abc.Sequence[Backend],
    ) -> list[dict[str, str] | None]: ...
    def register_memory(
        self,
        memory: typing.SupportsInt | typing.SupportsIndex,
        rows: numpy.typing.NDArray[numpy.uint64],
        metadata: collections.abc.Sequence[str],
        keepalive: typing.Any,
        backends: collections.abc.Sequence[Backend],
    ) -> Registration: ...
    def send_local_metadata(
        self, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def send_local_partial_metadata(
        self,
        memory: typing.SupportsInt | typing.SupportsIndex,
        rows: numpy.typing.NDArray[numpy.uint64],
        ip: str,
        port: typing.SupportsInt | typing.SupportsIndex,
        backends: collections.abc.Sequence[Backend],
    ) -> None: ...
    def take_notifications(self, backends: collections.abc.Sequence[Backend]) -> list: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_here(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def num_parked(self) -> int: ...

class Backend:
    @property
    def type(self) -> str: ...

class Library:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...

class PreparedList:
    def __len__(self) -> int: ...
    def release(self) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_released(self) -> bool: ...
    @property
    def num_users(self) -> int: ...
    @property
    def peer(self) -> str: ...

class Registration:
    def release(self) -> None: ...
    @property
    def is_active(self) -> bool: ...
    @property
    def num_users(self) -> int: ...

class Request:
    def backend(self) -> Backend: ...
    def estimate_cost(self) -> tuple[int, int, int]: ...
    def poll(self) -> int: ...
    def post(self, notification: str | None) -> int: ...
    def release(self, patience: typing.SupportsFloat | typing.SupportsIndex) -> bool: ...
    def telemetry(self) -> tuple[int, int, int, int, int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_descriptors(self) -> int: ...
    @property
    def operation(self) -> int: ...
    @property
    def peer(self) -> str: ...
    @property
    def state(self) -> int: ...

STATUS_TABLE: tuple = (
    (1, "IN_PROG", ""),
    (0, "SUCCESS", ""),
    (-1, "INVALID_PARAM", "invalid_param"),
    (-2, "BACKEND", "backend"),
    (-3, "INVALID_STATE", "state"),
    (-4, "EXCEPTION", "other"),
    (-5, "NO_TELEMETRY", "telemetry"),
    (-6, "NOT_FOUND", "not_found"),
    (-7, "NOT_POSTED", "state"),
    (-8, "MISMATCH", "invalid_param"),
    (-9, "NOT_ALLOWED", "state"),
    (-10, "REPOST_ACTIVE", "state"),
    (-11, "UNKNOWN", "other"),
    (-12, "NOT_SUPPORTED", "other"),
    (-13, "REMOTE_DISCONNECT", "backend"),
    (-14, "CANCELED", "backend"),
)
