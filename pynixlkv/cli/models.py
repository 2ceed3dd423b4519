"""Geometries of well-known models, as data; every size is computed from them."""

from __future__ import annotations

from dataclasses import dataclass

from pynixlkv.errors import ConfigError
from pynixlkv.topology import held_heads

__all__ = ["MODELS", "Model", "find_model"]


@dataclass(frozen=True)
class Model:
    """What a model's KV cache is made of; elements are bfloat16.

    Parameters
    ----------
    name : str
        Name as its publisher writes it.
    layers : int
        Layers that keep a cache.
    kv_heads : int or None
        KV heads of the whole model; None for a latent that every rank holds whole (MLA).
    dim : int
        Elements of a head, or of the latent, for one token.
    axes : str
        Order of the dimensions of a layer's tensor unless one is asked for.
    block_size : int
        Tokens in a block.
    """

    name: str
    layers: int
    kv_heads: int | None
    dim: int
    axes: str = "KBHND"
    block_size: int = 16

    @property
    def num_kv(self) -> int:
        """Parts of a token's entry: K and V, or one latent."""
        return 1 if self.kv_heads is None else 2

    @property
    def page_elems(self) -> int:
        """Elements of one block of one head of K or of V in one layer."""
        return self.block_size * self.dim

    def block_bytes(self, rank: int, size: int) -> int:
        """Return the bytes of one block over all layers on one rank of a group of `size`.

        Parameters
        ----------
        rank, size : int
            Tensor-parallel rank and size of its group.

        Returns
        -------
        int
            Bytes.

        Raises
        ------
        LayoutError
            If the heads cannot be cut into `size` ranks.
        """
        heads = len(held_heads(rank, size, self.kv_heads))
        return self.layers * self.num_kv * heads * self.page_elems * 2


MODELS = (
    Model("Llama-3.1-8B", layers=32, kv_heads=8, dim=128),
    Model("Llama-3.1-70B", layers=80, kv_heads=8, dim=128),
    Model("Qwen3-32B", layers=64, kv_heads=8, dim=128),
    Model("DeepSeek-V3", layers=61, kv_heads=None, dim=512 + 64, axes="BND"),
)


def find_model(name: str) -> Model:
    """Return the model of a name, in any case.

    Parameters
    ----------
    name : str
        One of the names in `MODELS`.

    Returns
    -------
    Model
        Its geometry.

    Raises
    ------
    ConfigError
        If there is none; the message lists the names.
    """
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    names = ", ".join(model.name for model in MODELS)
    raise ConfigError(f"there is no geometry for model {name!r}; choose one of {names}")
