from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing

__all__: list[str] = ["BlockTables", "Geometry", "Plan"]

class BlockTables:
    def check_written_once(self, remote: bool) -> None: ...
    def descriptors(
        self,
    ) -> tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64]]: ...
    def descriptors_into(
        self, local: numpy.typing.NDArray[numpy.uint64], remote: numpy.typing.NDArray[numpy.uint64]
    ) -> int: ...
    def remote_blocks(self) -> list[list[int]]: ...
    def totals(self) -> tuple[int, int]: ...

class Geometry:
    def __init__(self, geometry: typing.Any) -> None: ...
    def digests(
        self,
        group: typing.SupportsInt | typing.SupportsIndex,
        blocks: typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
        start: typing.SupportsInt | typing.SupportsIndex,
        scope: typing.Any,
        tokens: tuple[
            typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex
        ],
    ) -> numpy.typing.NDArray[numpy.uint64]: ...

class Plan:
    def __init__(
        self,
        local: Geometry,
        remote: Geometry,
        local_groups: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        remote_groups: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        max_bytes: typing.SupportsInt | typing.SupportsIndex | None,
        heads: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex
            ]
        ]
        | None,
        layers: collections.abc.Sequence[
            collections.abc.Sequence[
                tuple[
                    typing.SupportsInt | typing.SupportsIndex,
                    typing.SupportsInt | typing.SupportsIndex,
                ]
            ]
        ],
    ) -> None: ...
    def block_runs(self, group: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    def overlap(
        self,
        group: typing.SupportsInt | typing.SupportsIndex,
        tables: tuple[
            typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
            typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ],
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]: ...
    def tables(
        self,
        groups: collections.abc.Sequence[
            tuple[
                typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
                typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ],
    ) -> BlockTables: ...
