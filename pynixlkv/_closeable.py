"""Objects with an end, and objects that only this process can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pynixlkv.errors import StateError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Never, Self


class Uncopied:
    """An object that names memory of this process; copying and pickling it raises `StateError`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse: a copy would name memory that it does not keep."""
        raise StateError(
            f"a {type(self).__name__} names memory of this process and is neither copied nor "
            "pickled; send a hello, or geometry.to_bytes(), and make a new object there"
        )


class Closeable(Uncopied):
    """An object that can be closed, by `close` or by leaving its ``with`` block."""

    __slots__ = ()

    def close(self) -> object:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
