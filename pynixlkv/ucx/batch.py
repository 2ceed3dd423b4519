"""Many gets or puts as one call, without Python between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pynixlkv import _arrays
from pynixlkv._native.ucx import Batch
from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from pynixlkv.ucx.binding import MemoryHandle, RemoteKey


def get_batch(
    local: MemoryHandle,
    remote: RemoteKey,
    places: npt.ArrayLike,
    nbytes: int,
    *,
    window: int = 64,
    timed: bool = False,
) -> Batch:
    """Prepare to copy pieces of a peer's memory into local memory; each is a `get_nbx`.

    Parameters
    ----------
    local : MemoryHandle
        Destination.
    remote : RemoteKey
        Source.
    places : array_like of int, shape (n, 2)
        Local and remote offset of each piece, in bytes.
    nbytes : int
        Length of each piece.
    window : int
        Most pieces in flight at a time, at least 1.
    timed : bool
        Whether to record when each piece is posted, for `Batch.piece_times`.

    Returns
    -------
    Batch
        Nothing moves before its `Batch.wait`.

    Raises
    ------
    ConfigError
        If a piece does not lie inside both memories; names the first that does not.
    ClosedError
        If memory or endpoint are closed.
    """
    return _make(local, remote, places, nbytes, window, timed, is_get=True)


def put_batch(
    local: MemoryHandle,
    remote: RemoteKey,
    places: npt.ArrayLike,
    nbytes: int,
    *,
    window: int = 64,
    timed: bool = False,
) -> Batch:
    """Prepare to copy local pieces into a peer's memory; as `get_batch`."""
    return _make(local, remote, places, nbytes, window, timed, is_get=False)


def _make(
    local: MemoryHandle,
    remote: RemoteKey,
    places: npt.ArrayLike,
    nbytes: int,
    window: int,
    timed: bool,
    *,
    is_get: bool,
) -> Batch:
    if window < 1 or nbytes < 1:
        raise ConfigError(f"window {window} and {nbytes} bytes must be at least 1")
    offsets = _arrays.integers("places", places, ConfigError, columns=2)
    for column, side, size in ((0, "local", local.nbytes), (1, "remote", remote.nbytes)):
        (wrong,) = np.nonzero((offsets[:, column] < 0) | (offsets[:, column] > size - nbytes))
        if len(wrong):
            raise ConfigError(
                f"piece {wrong[0]}, {nbytes} bytes at offset {offsets[wrong[0], column]}, does not "
                f"lie inside the {size} bytes of the {side} memory"
            )
    return Batch(
        local._native,
        remote._native,
        remote.address,
        np.ascontiguousarray(offsets, dtype=np.uint64),
        nbytes,
        is_get,
        window,
        timed,
    )
