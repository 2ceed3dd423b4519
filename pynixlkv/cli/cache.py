"""A rank's KV cache in numpy arrays, and its expected contents.

Contents are a function of an element's place in the model (layer, K or V, head, token, element) and
of the request, so each process computes them without knowing how the bytes travelled. Nothing here
uses plans: places are found by indexing arrays.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pynixlkv.errors import LayoutError
from pynixlkv.testing.contents import random_bytes
from pynixlkv.topology import held_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pynixlkv.cli.models import Model

_NAMED_AXES = {"HND": "KBHND", "NHD": "KBNHD", "MLA": "BND"}
_CANONICAL = "BKHND"


def dimension_letters(axes: str, model: Model) -> str:
    """Return the letter of each dimension of a model's tensors; ``HND`` becomes ``KBHND``."""
    letters = _NAMED_AXES.get(axes, axes)
    needed = [set("BND")] if model.kv_heads is None else [set("KBHND"), set("BHNC")]
    if len(set(letters)) != len(letters) or set(letters) - {"L"} not in needed:
        examples = "BND" if model.kv_heads is None else "KBHND, KBNHD, BKNHD or BHNC"
        raise LayoutError(
            f"axes {axes!r} do not name each axis of the {model.name} cache once; "
            f"write for example {examples}, with L in front for one tensor of all layers"
        )
    return letters


class Contents:
    """The contents of the blocks of one request, or of an unused pool, in every layer and head.

    Each page (the tokens of a block in one head of K or V of one layer) is one random page
    combined with a random key of its own, so no two pages agree and no two places of a page do.
    """

    def __init__(self, seed: Sequence[int], model: Model, num_blocks: int) -> None:
        self._model = model
        shape = (model.layers, num_blocks, model.num_kv, model.kv_heads or 1)
        page_words = model.page_elems * 2 // 8
        words = random_bytes((page_words + math.prod(shape)) * 8, seed).view(np.uint64)
        self._page, self._keys = words[:page_words], words[page_words:].reshape(shape)

    def pages(self, layer: int, heads: range) -> NDArray[np.uint16]:
        """Return the blocks in one layer, as (block, kv, head, token, dim) of bfloat16 bits."""
        keys = self._keys[layer, :, :, heads.start : heads.stop]
        words: NDArray[np.uint64] = self._page ^ keys[..., np.newaxis]
        elems = (self._model.block_size, self._model.dim)
        return words.view(np.uint16).reshape(*keys.shape, *elems)


class RankCache:
    """The tensors of one rank: one for each layer, or one in all if its axes have an ``L``."""

    def __init__(self, model: Model, axes: str, rank: int, size: int, num_blocks: int) -> None:
        self.letters = dimension_letters(axes, model)
        self._model = model
        self.heads = held_heads(rank, size, model.kv_heads)
        extents = {
            "L": model.layers,
            "K": model.num_kv,
            "B": num_blocks,
            "H": len(self.heads),
            "N": model.block_size,
            "D": model.dim,
            "C": model.num_kv * model.dim,
        }
        shape = [extents[letter] for letter in self.letters]
        count = 1 if "L" in self.letters else model.layers
        self.tensors = [np.empty(shape, dtype=np.uint16) for _ in range(count)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def layer(self, layer: int) -> NDArray[np.uint16]:
        """Return a writable view of one layer, as (block, kv, head, token, dim)."""
        letters = self.letters
        if "L" in letters:
            view = np.moveaxis(self.tensors[0], letters.index("L"), 0)[layer]
            letters = letters.replace("L", "")
        else:
            view = self.tensors[layer]
        if "C" in letters:
            at = letters.index("C")
            shape = (*view.shape[:at], self._model.num_kv, self._model.dim, *view.shape[at + 1 :])
            view = view.reshape(shape)
            letters = letters.replace("C", "KD")
        view = view.transpose([letters.index(axis) for axis in _CANONICAL if axis in letters])
        missing = [i for i, axis in enumerate(_CANONICAL) if axis not in letters]
        return np.expand_dims(view, missing)

    def compare(self, layer: int, expected: NDArray[np.uint16]) -> tuple[int, str]:
        """Return how many bytes of one layer differ, and describe the first."""
        found = self.layer(layer)
        if np.array_equal(found, expected):
            return 0, ""
        place = tuple(int(i[0]) for i in np.nonzero(found != expected))
        wrong = int(np.count_nonzero((found ^ expected).view(np.uint8)))
        block, part, head, token, elem = place
        return wrong, (
            f"layer {layer}, block {block}, {'KV'[part] if self._model.num_kv == 2 else 'latent'}, "
            f"head {self.heads[head]}, token {token}, element {elem}: "
            f"found {found[place]:#06x}, expected {expected[place]:#06x}"
        )
