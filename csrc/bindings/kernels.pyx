# cython: language_level=3, boundscheck=False, wraparound=False
"""Array kernels of pynixlkv: arrays in, arrays out, no state."""

from libc.stdint cimport int64_t, uint64_t

import numpy as np


def physical_blocks(const int64_t[::1] blocks not None, int64_t ratio):
    """Return b * ratio to b * ratio + ratio - 1 for each block b, as (n * ratio,) int64."""
    cdef Py_ssize_t i
    cdef int64_t j
    expanded = np.empty(blocks.shape[0] * ratio, np.int64)
    cdef int64_t[::1] view = expanded
    with nogil:
        for i in range(blocks.shape[0]):
            for j in range(ratio):
                view[i * ratio + j] = blocks[i] * ratio + j
    return expanded


def number_rows(list tuples not None, Py_ssize_t width):
    """Return the first three numbers of each tuple, as (n, 3) uint64.

    None unless all are tuples of this width that begin with three ints from 0 to 2**64 - 1.
    """
    cdef Py_ssize_t i, j
    cdef object number
    rows = np.empty((len(tuples), 3), np.uint64)
    cdef uint64_t[:, ::1] view = rows
    for i in range(view.shape[0]):
        item = tuples[i]
        if type(item) is not tuple or len(<tuple>item) != width:
            return None
        for j in range(3):
            number = (<tuple>item)[j]
            if type(number) is not int:
                return None
            try:
                view[i, j] = number
            except OverflowError:
                return None
    return rows
