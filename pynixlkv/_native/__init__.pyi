from __future__ import annotations

import typing

from . import kv, nixl, transfer, ucx

__all__: list[str] = ["ArrayMemory", "kv", "live_counts", "nixl", "transfer", "ucx"]

class ArrayMemory:
    def __init__(self, source: typing.Any) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def live_counts() -> dict[str, int]: ...
