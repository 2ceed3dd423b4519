"""The one check of integers that a caller gives: nothing is rounded or wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv.errors import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

    from pynixlkv.errors import ConfigError

MAX_POSITION = 2**48 - 1  # far beyond any context, and sums of positions stay far below 2**60
_BOOLS = frozenset((bool, np.bool_))


def integers(
    what: str,
    values: npt.ArrayLike,
    error: type[ConfigError],
    *,
    columns: int | None = None,
) -> npt.NDArray[np.integer[Any]]:
    """Return `values` as an array of integers, one-dimensional or with `columns` columns.

    An array is returned as it is, of whatever integer type: the caller checks the range (see
    `first_outside`) before it converts.
    """
    shape = "one dimension of integers" if columns is None else f"integers of shape (n, {columns})"
    if isinstance(values, (list, tuple)):
        _refuse_bools(what, values, error)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as cause:
        raise error(f"{what} cannot be read as an array of integers: {cause}") from cause
    if array.size and array.dtype.kind in {"f", "O"} and not isinstance(values, np.ndarray):
        array = _exact(array, values)
    if columns is not None and array.size == 0:
        array = array.reshape(0, columns)
    has_shape = array.ndim == 1 if columns is None else array.shape[1:] == (columns,)
    if not has_shape or (array.size and array.dtype.kind not in "iu"):
        raise error(f"{what} has shape {array.shape} and dtype {array.dtype}; expected {shape}")
    return array if array.size else array.astype(np.int64)


def _refuse_bools(what: str, values: list[Any] | tuple[Any, ...], error: type[ConfigError]) -> None:
    """Refuse what numpy would turn into 0 or 1; looks into rows only where there are any."""
    types = set(map(type, values))
    for place, value in enumerate(values) if types & {bool, np.bool_, list, tuple} else ():
        if isinstance(value, (list, tuple)):
            _refuse_bools(f"{what}[{place}]", value, error)
        elif type(value) in _BOOLS:
            raise error(f"{what} holds {value} at index {place}; expected integers")


def _exact(array: npt.NDArray[Any], values: object) -> npt.NDArray[Any]:
    """Undo numpy's choice of float for integers on both sides of 2**63."""
    exact = np.array(values, dtype=object)
    if all(isinstance(item, (int, np.integer)) and 0 <= item < 1 << 64 for item in exact.flat):
        return exact.astype(np.uint64)
    return array


def first_outside(
    array: npt.NDArray[np.integer[Any]], lowest: int, highest: int
) -> tuple[int, ...] | None:
    """Return the index of the first number outside ``lowest..highest``, or None."""
    limits = np.iinfo(array.dtype)
    low, high = max(lowest, limits.min), min(highest, limits.max)
    if array.size == 0 or (low, high) == (limits.min, limits.max):
        return None
    if int(array.min()) >= low and int(array.max()) <= high:
        return None
    wrong = (array < array.dtype.type(low)) | (array > array.dtype.type(high))
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def block_ids(what: str, table: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return a block table as int64."""
    array = integers(what, table, PlanError)
    at = first_outside(array, -(2**63), 2**63 - 1)
    if at is not None:
        raise PlanError(f"{what} holds {array[at]} at index {at[0]}, which is no block number")
    return np.ascontiguousarray(array, np.int64)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, which a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def position(what: str, value: int) -> int:
    """Return a token position, or a count of tokens, as int."""
    if not is_integer(value):
        raise PlanError(f"{what} is {value!r}; expected an integer number of tokens")
    if not 0 <= value <= MAX_POSITION:
        raise PlanError(f"{what} is {value}; expected 0 to {MAX_POSITION}")
    return int(value)
