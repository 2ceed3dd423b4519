"""A rank's KV cache in numpy arrays, and what must be in it.

What a block holds is a function of where its elements belong in the model (layer, K or V, head,
token, element) and of the request, so each process can compute what it must find without knowing
how the bytes travelled. Nothing here uses plans: places are found by indexing arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pynixlkv.errors import LayoutError
from pynixlkv.topology import held_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pynixlkv.cli.models import Model

__all__ = ["Contents", "Placement", "RankCache", "dimension_letters"]

_NAMED_AXES = {"HND": "KBHND", "NHD": "KBNHD", "MLA": "BND"}
_CANONICAL = "BKHND"


def dimension_letters(axes: str, model: Model) -> str:
    """Return the letter of each dimension of a model's tensors.

    Parameters
    ----------
    axes : str
        Letters out of ``LKBHNDC`` in the order of the dimensions, or ``HND``, ``NHD``, ``MLA``.
    model : Model
        The model; a latent has neither ``K`` nor ``H`` nor ``C``.

    Returns
    -------
    str
        The letters.

    Raises
    ------
    LayoutError
        If the letters do not name each axis of the model once.
    """
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
    """What the blocks of one request, or of an unused pool, hold in every layer and head.

    Each page (the tokens of a block in one head of K or V of one layer) is one random page
    combined with a random key of its own, so no two pages agree and no two places of a page do.

    Parameters
    ----------
    seed : sequence of int
        Equal seeds give equal contents in every process.
    model : Model
        Geometry.
    num_blocks : int
        Blocks of the request.
    """

    def __init__(self, seed: Sequence[int], model: Model, num_blocks: int) -> None:
        rng = np.random.default_rng(list(seed))
        self._model = model
        words = model.page_elems * 2 // 8
        self._page = rng.integers(0, 2**64, words, dtype=np.uint64)
        shape = (model.layers, num_blocks, model.num_kv, model.kv_heads or 1)
        self._keys = rng.integers(0, 2**64, shape, dtype=np.uint64)

    def pages(self, layer: int, heads: range, blocks: NDArray[np.intp]) -> NDArray[np.uint16]:
        """Return the elements of some blocks in one layer.

        Parameters
        ----------
        layer : int
            Global layer.
        heads : range
            Global heads.
        blocks : ndarray of intp, shape (n,)
            Which blocks of the request.

        Returns
        -------
        ndarray of uint16, shape (n, kv, heads, tokens, dim)
            Bits of the bfloat16 elements.
        """
        keys = self._keys[layer, blocks, :, heads.start : heads.stop]
        words: NDArray[np.uint64] = self._page ^ keys[..., np.newaxis]
        elems = (self._model.block_size, self._model.dim)
        return words.view(np.uint16).reshape(*keys.shape, *elems)


@dataclass(frozen=True)
class Placement:
    """Which blocks of which contents are in which blocks of the pool.

    Parameters
    ----------
    contents : Contents
        What is there.
    numbers : ndarray of intp, shape (n,)
        Blocks of the contents.
    blocks : ndarray of intp, shape (n,)
        Physical blocks that hold them.
    """

    contents: Contents
    numbers: NDArray[np.intp]
    blocks: NDArray[np.intp]


class RankCache:
    """The tensors of one rank: one for each layer, or one in all if its axes have an ``L``.

    Parameters
    ----------
    model : Model
        Geometry.
    axes : str
        See `dimension_letters`.
    rank, size : int
        Tensor-parallel rank and size of its group.
    num_blocks : int
        Blocks of the pool.
    """

    def __init__(self, model: Model, axes: str, rank: int, size: int, num_blocks: int) -> None:
        self.letters = dimension_letters(axes, model)
        self.num_blocks = num_blocks
        self._model = model
        self._heads = held_heads(rank, size, model.kv_heads)
        extents = {
            "L": model.layers,
            "K": model.num_kv,
            "B": num_blocks,
            "H": len(self._heads),
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
        """Return one layer, without copying.

        Parameters
        ----------
        layer : int
            Global layer.

        Returns
        -------
        ndarray of uint16, shape (blocks, kv, heads, tokens, dim)
            A writable view.
        """
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

    def fill(self, layer: int, placement: Placement) -> None:
        """Put contents into one layer.

        Parameters
        ----------
        layer : int
            Global layer.
        placement : Placement
            What to put where.
        """
        pages = placement.contents.pages(layer, self._heads, placement.numbers)
        self.layer(layer)[placement.blocks] = pages

    def compare(self, layer: int, placement: Placement) -> tuple[int, str]:
        """Compare one layer of some blocks with what must be there.

        Parameters
        ----------
        layer : int
            Global layer.
        placement : Placement
            What must be where.

        Returns
        -------
        wrong_bytes : int
            Bytes that differ.
        difference : str
            Where the first one is, and what is there; empty if there is none.
        """
        expected = placement.contents.pages(layer, self._heads, placement.numbers)
        found = self.layer(layer)[placement.blocks]
        if np.array_equal(found, expected):
            return 0, ""
        place = tuple(int(i[0]) for i in np.nonzero(found != expected))
        wrong = int(np.count_nonzero((found ^ expected).view(np.uint8)))
        index, part, head, token, elem = place
        return wrong, (
            f"layer {layer}, block {placement.blocks[index]}, "
            f"{'KV'[part] if self._model.num_kv == 2 else 'latent'}, "
            f"head {self._heads[head]}, token {token}, element {elem}: "
            f"found {found[place]:#06x}, expected {expected[place]:#06x}"
        )
