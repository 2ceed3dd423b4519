"""The memory of one end of a transfer, on the host or on a device of torch."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["Memory"]

_TORCH = "torch:"
_CLEAR = 0xA5


class Memory:
    """Memory of numpy (`device` ``"cpu"``) or torch (``"torch:cuda:0"``), or a given array."""

    def __init__(
        self, nbytes: int, device: str = "cpu", array: npt.NDArray[Any] | None = None
    ) -> None:
        self._tensor: Any = None
        self._array: npt.NDArray[np.uint8]
        if device.startswith(_TORCH):
            import torch

            name = device.removeprefix(_TORCH)
            self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=name)
            self.address = int(self._tensor.data_ptr())
            return
        if array is None:
            # At the start of a page, as pools are.
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            array = np.frombuffer(pages, dtype=np.uint8)
        self._array = array.view(np.uint8)
        self.address = int(array.ctypes.data)

    @property
    def buffer(self) -> Any:  # noqa: ANN401
        """What agents register."""
        return self._array if self._tensor is None else self._tensor

    def fill(self, values: npt.NDArray[np.uint8] | int = _CLEAR) -> None:
        """Set all bytes, by default to one value."""
        if self._tensor is not None and not isinstance(values, int):
            import torch

            self._tensor.copy_(torch.from_numpy(values.copy()))
        else:
            self.buffer[:] = values
        self._synchronize()

    def corrupt(self) -> None:
        """Flip a bit of the last byte."""
        self.buffer[-1] ^= 1

    def count_wrong(self, expected: npt.NDArray[np.uint8]) -> int:
        """Return how many bytes differ from the expected ones."""
        found = self._array if self._tensor is None else self._tensor.cpu().numpy()
        return int(np.count_nonzero(found != expected))

    def _synchronize(self) -> None:
        if self._tensor is not None and self._tensor.device.type != "cpu":
            import torch

            torch.cuda.synchronize(self._tensor.device)

    def make_copier(
        self, source: Memory, order: npt.NDArray[np.int64], piece_bytes: int
    ) -> Callable[[], Any]:
        """Return a function that copies pieces of memory on the same device to this, in order."""
        if self._tensor is None:
            there = source._array.reshape(-1, piece_bytes)
            here = self._array.reshape(-1, piece_bytes)
            # Without a mode that needs no check, numpy copies through a buffer of its own.
            return lambda: np.take(there, order, axis=0, out=here, mode="clip")
        import torch

        index = torch.from_numpy(order).to(self._tensor.device)
        # torch copies bytes one at a time, words faster.
        words = torch.int64 if piece_bytes % 8 == 0 else torch.uint8
        remote, local = (
            m._tensor.view(words).view(len(m._tensor) // piece_bytes, -1) for m in (source, self)
        )

        def copy() -> None:
            torch.index_select(remote, 0, index, out=local)
            self._synchronize()

        return copy
