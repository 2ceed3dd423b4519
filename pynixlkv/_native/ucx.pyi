from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

__all__: list[str] = [
    "Batch",
    "Context",
    "Endpoint",
    "Library",
    "Listener",
    "Memory",
    "RemoteKey",
    "Request",
    "STATUS_TABLE",
    "Worker",
    "move",
]

class Batch:
    def __init__(
        self,
        local: Memory,
        key: RemoteKey,
        remote: typing.SupportsInt | typing.SupportsIndex,
        places: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        length: typing.SupportsInt | typing.SupportsIndex,
        is_get: bool,
        window: typing.SupportsInt | typing.SupportsIndex,
        is_timed: bool,
    ) -> None: ...
    def times(self) -> numpy.typing.NDArray[numpy.int64]: ...
    def wait(self, timeout: typing.SupportsFloat | typing.SupportsIndex, spin: bool) -> bool: ...

class Context:
    def __init__(self, library: Library, config: collections.abc.Mapping[str, str]) -> None: ...
    @property
    def config(self) -> dict[str, str]: ...

class Endpoint:
    @staticmethod
    def connect(
        worker: Worker, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> Endpoint: ...
    def __init__(self, worker: Worker, address: str, error_handling: bool) -> None: ...
    def close(self) -> None: ...
    def flush(self) -> Request: ...
    def send(
        self, id: typing.SupportsInt | typing.SupportsIndex, header: str, data: str
    ) -> Request: ...
    @property
    def failure(self) -> str: ...
    @property
    def num_parked(self) -> int: ...

class Library:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...

class Listener:
    def __init__(
        self, worker: Worker, ip: str, port: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def accept(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex
    ) -> pynixlkv._native.ucx.Endpoint | None: ...
    def close(self) -> None: ...
    @property
    def port(self) -> int: ...

class Memory:
    @staticmethod
    def allocate(context: Context, length: typing.SupportsInt | typing.SupportsIndex) -> Memory: ...
    @staticmethod
    def map(
        context: Context,
        address: typing.SupportsInt | typing.SupportsIndex,
        length: typing.SupportsInt | typing.SupportsIndex,
        memory: typing.SupportsInt | typing.SupportsIndex,
        keepalive: typing.Any,
    ) -> Memory: ...
    def advise(
        self,
        offset: typing.SupportsInt | typing.SupportsIndex,
        length: typing.SupportsInt | typing.SupportsIndex,
        will_need: bool,
    ) -> None: ...
    def pack(self) -> bytes: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class RemoteKey:
    def __init__(self, endpoint: Endpoint, packed: str) -> None: ...
    def is_direct(self, address: typing.SupportsInt | typing.SupportsIndex) -> bool: ...

class Request:
    def cancel(self) -> None: ...
    def check(self) -> bool: ...
    def wait(self, timeout: typing.SupportsFloat | typing.SupportsIndex, spin: bool) -> bool: ...
    @property
    def is_done(self) -> bool: ...

class Worker:
    def __init__(self, context: Context, single_thread: bool) -> None: ...
    def address(self) -> bytes: ...
    def arm(self) -> bool: ...
    def open_inbox(self, id: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def progress(self) -> int: ...
    def signal(self) -> None: ...
    def spin(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def take(
        self,
        id: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> list: ...
    @property
    def event_fd(self) -> int: ...

def move(
    local: Memory,
    offset: typing.SupportsInt | typing.SupportsIndex,
    key: RemoteKey,
    remote: typing.SupportsInt | typing.SupportsIndex,
    length: typing.SupportsInt | typing.SupportsIndex,
    is_get: bool,
) -> Request: ...

STATUS_TABLE: tuple = (
    (0, "OK", ""),
    (1, "INPROGRESS", ""),
    (-1, "NO_MESSAGE", "other"),
    (-2, "NO_RESOURCE", "other"),
    (-3, "IO_ERROR", "connection"),
    (-4, "NO_MEMORY", "other"),
    (-5, "INVALID_PARAM", "other"),
    (-6, "UNREACHABLE", "connection"),
    (-7, "INVALID_ADDR", "other"),
    (-8, "NOT_IMPLEMENTED", "other"),
    (-9, "MESSAGE_TRUNCATED", "other"),
    (-10, "NO_PROGRESS", "other"),
    (-11, "BUFFER_TOO_SMALL", "other"),
    (-12, "NO_ELEM", "other"),
    (-13, "SOME_CONNECTS_FAILED", "connection"),
    (-14, "NO_DEVICE", "other"),
    (-15, "BUSY", "other"),
    (-16, "CANCELED", "connection"),
    (-17, "SHMEM_SEGMENT", "other"),
    (-18, "ALREADY_EXISTS", "other"),
    (-19, "OUT_OF_RANGE", "other"),
    (-20, "TIMED_OUT", "connection"),
    (-21, "EXCEEDS_LIMIT", "other"),
    (-22, "UNSUPPORTED", "other"),
    (-23, "REJECTED", "connection"),
    (-24, "NOT_CONNECTED", "connection"),
    (-25, "CONNECTION_RESET", "connection"),
    (-40, "FIRST_LINK_FAILURE", "connection"),
    (-59, "LAST_LINK_FAILURE", "connection"),
    (-60, "FIRST_ENDPOINT_FAILURE", "connection"),
    (-80, "ENDPOINT_TIMEOUT", "connection"),
    (-89, "LAST_ENDPOINT_FAILURE", "connection"),
    (-100, "LAST", "other"),
)
