from __future__ import annotations

import typing

import typing_extensions

from . import kv, nixl, transfer, ucx

__all__: list[str] = ["Buffer", "kv", "live_counts", "nixl", "transfer", "ucx"]

class Buffer:
    def __init__(self: typing_extensions.Buffer, source: typing.Any) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def live_counts() -> dict[str, int]: ...
