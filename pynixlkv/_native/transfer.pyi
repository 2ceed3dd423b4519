from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

import pynixlkv._native.kv
import pynixlkv._native.nixl
import pynixlkv._native.ucx

__all__: list[str] = [
    "Agent",
    "FakeNetwork",
    "Peer",
    "Registration",
    "Transfer",
    "device_driver",
    "device_memory_kind",
    "fake_agent",
    "nixl_agent",
    "ucx_agent",
]

class Agent:
    def cancel(self, transfer: Transfer) -> None: ...
    def check_registered(
        self, rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64]
    ) -> None: ...
    def close(self, timeout: typing.SupportsFloat | typing.SupportsIndex) -> bool: ...
    def connect(
        self,
        name: str,
        incarnation: bytes,
        metadata: bytes,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memories: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        read_only: collections.abc.Sequence[bool],
    ) -> Peer: ...
    def deregister(self, registration: Registration) -> None: ...
    def disconnect(self, peer: Peer) -> None: ...
    def is_alive(self, peer: Peer) -> bool: ...
    def metadata(self) -> bytes: ...
    def notify(self, peer: Peer, message: bytes) -> None: ...
    def open_file(
        self,
        name: str,
        fd: typing.SupportsInt | typing.SupportsIndex,
        address: typing.SupportsInt | typing.SupportsIndex,
        nbytes: typing.SupportsInt | typing.SupportsIndex,
        read_only: bool,
    ) -> Peer: ...
    def register_memory(
        self,
        rows: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        memories: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        read_only: collections.abc.Sequence[bool],
    ) -> Registration: ...
    def stop(self, timeout: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def submit_descriptors(
        self,
        op: typing.SupportsInt | typing.SupportsIndex,
        peer: Peer,
        local: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        remote: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        notify: bytes | None,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> Transfer: ...
    def submit_plan(
        self,
        op: typing.SupportsInt | typing.SupportsIndex,
        peer: Peer,
        tables: pynixlkv._native.kv.BlockTables,
        notify: bytes | None,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> Transfer: ...
    def take_completed(self) -> list[int]: ...
    def take_notifications(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex
    ) -> list[tuple[str, bytes]]: ...
    def wait_activity(
        self,
        seen: typing.SupportsInt | typing.SupportsIndex,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> int: ...
    def wake_waiters(self) -> None: ...
    def watch(self, transfer: Transfer) -> None: ...
    @property
    def completion_fd(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def running(self) -> int: ...

class FakeNetwork:
    def __init__(self) -> None: ...
    def drop_notifications(
        self, agent: str, count: typing.SupportsInt | typing.SupportsIndex = 1
    ) -> None: ...
    def fail_next(
        self, agent: str, count: typing.SupportsInt | typing.SupportsIndex = 1
    ) -> None: ...
    def kill(self, agent: str) -> None: ...
    def pause(self, agent: str) -> None: ...
    def resume(self, agent: str) -> None: ...
    def set_delay(
        self, agent: str, seconds: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...

class Peer:
    @property
    def generation(self) -> int: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> int: ...
    @property
    def transports(self) -> list[str]: ...

class Registration:
    @property
    def is_open(self) -> bool: ...
    @property
    def read_only(self) -> list[bool]: ...
    @property
    def uses(self) -> int: ...

class Transfer:
    def wait(
        self, timeout: typing.SupportsFloat | typing.SupportsIndex, for_quiet: bool = False
    ) -> bool: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def cause(self) -> tuple[str, str, str, int, str, str] | None: ...
    @property
    def id(self) -> int: ...
    @property
    def is_quiet(self) -> bool: ...
    @property
    def message(self) -> str: ...
    @property
    def result(self) -> tuple[int, int, int, bool, float, float, float, float, float]: ...
    @property
    def state(self) -> int: ...

def device_driver() -> tuple[str, bool]: ...
def device_memory_kind(
    address: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[str, str, bool, bool] | None: ...
def fake_agent(name: str, incarnation: bytes, network: FakeNetwork) -> Agent: ...
def nixl_agent(
    name: str,
    incarnation: bytes,
    library: pynixlkv._native.nixl.Library,
    backend: str,
    backend_params: collections.abc.Mapping[str, str],
    storage: str,
    storage_params: collections.abc.Mapping[str, str],
    progress_delay_us: typing.SupportsInt | typing.SupportsIndex,
) -> Agent: ...
def ucx_agent(
    name: str,
    incarnation: bytes,
    context: pynixlkv._native.ucx.Context,
    error_handling: bool,
    copy_threads: typing.SupportsInt | typing.SupportsIndex,
) -> Agent: ...
