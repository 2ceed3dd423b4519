"""Geometries of well-known models, as data; every size is computed from them."""

from __future__ import annotations

from dataclasses import dataclass

from pynixlkv.errors import ConfigError
from pynixlkv.topology import held_heads


@dataclass(frozen=True)
class Model:
    """The geometry of a model's KV cache, in bfloat16; `kv_heads` is None for a latent (MLA)."""

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
        """Return the bytes of one block in all layers on one rank of a group of `size`."""
        heads = len(held_heads(rank, size, self.kv_heads))
        return self.layers * self.num_kv * heads * self.page_elems * 2


MODELS = (
    Model("Llama-3.1-8B", layers=32, kv_heads=8, dim=128),
    Model("Llama-3.1-70B", layers=80, kv_heads=8, dim=128),
    Model("Qwen3-32B", layers=64, kv_heads=8, dim=128),
    Model("DeepSeek-V3", layers=61, kv_heads=None, dim=512 + 64, axes="BND"),
)


def find_model(name: str) -> Model:
    """Return the model of a name, whose case does not matter."""
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    names = ", ".join(model.name for model in MODELS)
    raise ConfigError(f"there is no geometry for model {name!r}; choose one of {names}")
