"""Bytes to move and to compare: each process can compute what another must have sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def random_bytes(nbytes: int, seed: int | Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return bytes that depend on the seed alone, no two stretches of which are alike."""
    words = np.random.default_rng(seed).integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:nbytes]
