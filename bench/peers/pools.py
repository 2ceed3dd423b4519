"""The pool that each side of a pull benchmark has: one tensor per layer, filled from a seed."""

import numpy as np

LAYERS, HEADS, TOKENS, DIM = 32, 8, 16, 128
NUM_BLOCKS = 64
# One block of one head-group of K or of V in one layer: what one descriptor moves.
PAGE_BYTES = HEADS * TOKENS * DIM * 2


def make_pool(seed=None):
    """Return the layers' tensors (K/V, block, head, token, dim), zeros without a seed."""
    shape = (LAYERS, 2, NUM_BLOCKS, HEADS, TOKENS, DIM)
    if seed is None:
        return list(np.zeros(shape, np.uint16))
    words = np.random.default_rng(seed).integers(0, 2**64, np.prod(shape) // 4, dtype=np.uint64)
    return list(words.view(np.uint16).reshape(shape))


def spans(tensors):
    """Return address and bytes of each tensor."""
    return [(tensor.ctypes.data, tensor.nbytes) for tensor in tensors]


def page_rows(addresses):
    """Return rows of address, bytes, device: every page, by layer, K/V, block."""
    offsets = np.arange(2 * NUM_BLOCKS, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    starts = (np.asarray(addresses, np.uint64)[:, None] + offsets).ravel()
    return np.stack([starts, np.full_like(starts, PAGE_BYTES), np.zeros_like(starts)], axis=1)


def page_indices(blocks):
    """Return which rows of `page_rows` some blocks are in, in one order for both sides."""
    parts = np.arange(LAYERS * 2)[:, None] * NUM_BLOCKS
    return (parts + np.asarray(blocks)).ravel().astype(np.int32)
