# cython: language_level=3, boundscheck=False, wraparound=False
"""Array kernels of pynixlkv: arrays in, arrays out, no state."""

from libc.stdint cimport int64_t

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
