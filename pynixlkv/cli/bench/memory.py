"""The memory of one side, on the host or on a device of torch."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.cli.messages import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

__all__ = ["Memory", "address_of", "contents", "mapping_of", "small_pages"]

_TORCH = "torch:"
_CLEAR = 0xA5
_PR_SET_THP_DISABLE = 41


@contextmanager
def small_pages() -> Iterator[None]:
    """Keep this process, and those that it starts, from getting huge pages by themselves.

    Who gets some is up to allocators and to chance, and copies from and to them are up to twice as
    fast: without this one would compare pages.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_THP_DISABLE) failed")
    try:
        yield
    finally:
        prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def contents(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return bytes that depend on the seed alone, and no two stretches of which are alike.

    Parameters
    ----------
    nbytes : int
        How many.
    seed : int
        Any number.

    Returns
    -------
    ndarray of uint8, shape (nbytes,)
        The bytes.
    """
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), dtype=np.uint8)


def mapping_of(address: int) -> tuple[str, int]:
    """Return which shared memory an address of this process is in.

    Parameters
    ----------
    address : int
        Any mapped address.

    Returns
    -------
    identity : str
        Device and inode, the same in every process that maps it.
    offset : int
        Of the address, in bytes.
    """
    for begin, end, offset, identity in _mappings():
        if begin <= address < end:
            return identity, address - begin + offset
    raise RunError(f"nothing is mapped at 0x{address:x}")


def address_of(identity: str, offset: int) -> int:
    """Return where this process has some shared memory; as `mapping_of`, the other way round.

    Parameters
    ----------
    identity : str
        Device and inode.
    offset : int
        In bytes.

    Returns
    -------
    int
        The address.
    """
    for begin, end, first, found in _mappings():
        if found == identity and first <= offset < first + end - begin:
            return begin + offset - first
    raise RunError(f"the shared memory {identity} is not mapped here")


def _mappings() -> Iterator[tuple[int, int, int, str]]:
    """Yield begin, end, offset and identity of each mapping of this process."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        addresses, _, offset, device, inode = line.split()[:5]
        begin, _, end = addresses.partition("-")
        yield int(begin, 16), int(end, 16), int(offset, 16), f"{device}:{inode}"


class Memory:
    """Some bytes to move.

    Parameters
    ----------
    nbytes : int
        How many.
    device : str
        ``"cpu"`` for numpy, or ``"torch:"`` and a device of torch.
    array : ndarray of uint8, optional
        Host memory to use instead of new memory.
    """

    def __init__(
        self, nbytes: int, device: str = "cpu", array: npt.NDArray[Any] | None = None
    ) -> None:
        self.nbytes = nbytes
        self._tensor: Any = None
        self._array: npt.NDArray[np.uint8]
        if device.startswith(_TORCH):
            import torch

            self._tensor = torch.zeros(
                nbytes, dtype=torch.uint8, device=device.removeprefix(_TORCH)
            )
            self.address = int(self._tensor.data_ptr())
        elif array is not None:
            self._array = array.view(np.uint8)
            self.address = int(array.ctypes.data)
        else:
            # At the start of a page, as pools are.
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._array = np.frombuffer(pages, dtype=np.uint8)
            self.address = int(self._array.ctypes.data)

    @property
    def is_host(self) -> bool:
        """Whether the host can reach it."""
        return self._tensor is None or self._tensor.device.type == "cpu"

    @property
    def buffer(self) -> Any:  # noqa: ANN401
        """What agents register."""
        return self._array if self._tensor is None else self._tensor

    def put(self, values: npt.NDArray[np.uint8]) -> None:
        """Set all bytes."""
        if self._tensor is None:
            self._array[:] = values
            return
        import torch

        self._tensor.copy_(torch.from_numpy(values.copy()))
        self.synchronize()

    def clear(self) -> None:
        """Set all bytes to a value that contents are not full of."""
        if self._tensor is None:
            self._array[:] = _CLEAR
            return
        self._tensor.fill_(_CLEAR)
        self.synchronize()

    def corrupt(self) -> None:
        """Flip a bit of the last byte."""
        self.buffer[-1] ^= 1

    def count_wrong(self, expected: npt.NDArray[np.uint8]) -> int:
        """Return how many bytes differ from what is expected."""
        found = self._array if self._tensor is None else self._tensor.cpu().numpy()
        return int(np.count_nonzero(found != expected))

    def synchronize(self) -> None:
        """Wait until the device has done what it was told to."""
        if not self.is_host:
            import torch

            torch.cuda.synchronize(self._tensor.device)

    def make_copier(
        self, source: Memory, places: npt.NDArray[np.int64], piece_bytes: int
    ) -> Callable[[], Any]:
        """Return a function that copies pieces of other memory of this process to this, in order.

        Parameters
        ----------
        source : Memory
            On the same device.
        places : ndarray of int64, shape (n,)
            Which piece of the source each is.
        piece_bytes : int
            Length of each.

        Returns
        -------
        callable
            Returns when the bytes are there.
        """
        if self._tensor is None:
            there = source._array.reshape(-1, piece_bytes)
            here = self._array.reshape(-1, piece_bytes)
            # Without a mode that needs no check, numpy copies through a buffer of its own.
            return lambda: np.take(there, places, axis=0, out=here, mode="clip")
        import torch

        index = torch.from_numpy(places).to(self._tensor.device)
        # Words: of bytes torch would copy one at a time.
        words = torch.int64 if piece_bytes % 8 == 0 else torch.uint8
        remote, local = (
            m._tensor.view(words).view(len(m._tensor) // piece_bytes, -1) for m in (source, self)
        )

        def copy() -> None:
            torch.index_select(remote, 0, index, out=local)
            self.synchronize()

        return copy
