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
    "Memory",
    "RemoteKey",
    "Request",
    "Worker",
    "move",
    "status_table",
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
    def wait(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex = 30.0, *, spin: bool = False
    ) -> None: ...
    @property
    def piece_times(self) -> numpy.typing.NDArray[numpy.float64]: ...

class Context:
    def __init__(self, library: Library, config: collections.abc.Mapping[str, str]) -> None: ...
    def info(self) -> str: ...
    @property
    def config(self) -> dict[str, str]: ...

class Endpoint:
    def __init__(self, worker: Worker, address: bytes, error_handling: bool) -> None: ...
    def close(self) -> None: ...
    def flush(self) -> Request: ...
    @property
    def failure(self) -> str: ...

class Library:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...

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
    def pack(self) -> bytes: ...
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class RemoteKey:
    def __init__(self, endpoint: Endpoint, packed: bytes) -> None: ...
    def is_direct(self, address: typing.SupportsInt | typing.SupportsIndex) -> bool: ...

class Request:
    def poll(self) -> bool: ...
    def wait(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex = 30.0, *, spin: bool = False
    ) -> None: ...

class Worker:
    def __init__(self, context: Context) -> None: ...
    def address(self) -> bytes: ...
    def arm(self) -> bool: ...
    def progress(self) -> int: ...
    def spin(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
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
def status_table() -> list[tuple[int, str, str]]: ...
