"""vLLM's description of its KV cache, as geometry.

vLLM gives every attention layer a tensor with the axes block, head, token and content, in any order
of strides. The content is K and V of a head and token, or a latent; this module need not tell K
from V, so content is one axis. Backends may give pages another inside and keep these axes for their
size only: a page is sliced where its order is known, and is opaque otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pynixlkv.connector.scheduler import GroupSpec
from pynixlkv.errors import ConfigError, LayoutError
from pynixlkv.geometry import KVCache

if TYPE_CHECKING:
    from collections.abc import Mapping

_KINDS = (
    "AttentionSpec",
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
)
"""Classes of `vllm.v1.kv_cache_interface` that are supported; their subclasses are not, because a
subclass may use its blocks in another way."""

_INLINE_SCALES = ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD")
"""Quantisation modes whose content of one head and token holds its own scales."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class ParallelPlace:
    """The place of a worker in vLLM's parallel groups: ranks and sizes."""

    tp: tuple[int, int]
    dcp: tuple[int, int] = (0, 1)
    interleave: int = 1
    """Consecutive tokens of one rank under decode context parallelism."""


def group_specs(kv_cache_config: Any, dcp_size: int) -> list[GroupSpec]:  # noqa: ANN401
    """Return how to read the block table of each group that takes part in transfers."""
    specs = []
    for group in kv_cache_config.transfer_groups:
        _check_kind(group)
        first = _layer_specs(group)[group.layer_names[0]] if group.layer_names else None
        spec = first if first is not None else group.kv_cache_spec
        shares = dcp_size if spec.dcp_sharded else 1
        specs.append(GroupSpec(spec.block_size * shares, window=_window(group), null_block=0))
    return specs


def kv_cache(
    tensors: Mapping[str, Any],
    kv_cache_config: Any,  # noqa: ANN401
    total_kv_heads: int,
    place: ParallelPlace,
    *,
    is_opaque: bool,
    fp8_format: str = "uint8",
    backends: Mapping[str, str] | None = None,
) -> tuple[KVCache, dict[str, int]]:
    """Describe the tensors that vLLM registers, each of shape (blocks, heads, tokens, content).

    Returns the cache, whose groups are layers that differ only in their numbers, and which of
    vLLM's block tables each group uses. If `is_opaque`, the inside of a head's page has an order of
    its own, as for vLLM's CPU kernels: pages move whole, or by whole heads. `fp8_format` names the
    element type of fp8 caches, which vLLM stores as uint8; `backends` names the attention backend
    of each layer, which decides the inside of packed pages.
    """
    alike: dict[tuple[int, str, tuple[int, ...], str, str, int | None], dict[str, Any]] = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        _check_kind(group)
        specs = _layer_specs(group)
        for name in group.layer_names:
            if name not in tensors:
                continue  # on another stage, or shares the cache of another layer
            tensor = tensors[name]
            if tensor.ndim != 4:
                raise LayoutError(
                    f"layer {name!r} has a tensor of shape {tuple(tensor.shape)}; expected "
                    "(blocks, heads, tokens, content)"
                )
            heads = _total_heads(specs[name], tensor.shape[1], total_kv_heads, place)
            dtype, opaque = _page(specs[name], tensor, fp8_format, (backends or {}).get(name))
            if is_opaque and not opaque:
                opaque = "N"
            key = (index, _NUMBER.sub("#", name), tuple(tensor.shape), dtype, opaque, heads)
            alike.setdefault(key, {})[name] = tensor
    if not alike:
        raise ConfigError("vLLM registered no layer of a group that takes part in transfers")
    caches, block_table_index = [], {}
    for (index, template, _, dtype, opaque, heads), members in alike.items():
        name = f"{index}:{template}"
        while name in block_table_index:  # one name pattern, several shapes
            name += "'"
        block_table_index[name] = index
        spec = _layer_specs(kv_cache_config.transfer_groups[index])[next(iter(members))]
        caches.append(
            KVCache.from_tensors(
                members,
                axes="BHND",
                kv_heads=heads,
                tp=place.tp,
                layers=[layer_number(layer) for layer in members],
                group=name,
                dcp=place.dcp if spec.dcp_sharded else (0, 1),
                interleave=place.interleave if spec.dcp_sharded and place.dcp[1] > 1 else 1,
                dtype=dtype,
                opaque_axes=opaque,
            )
        )
    return KVCache.combine(*caches), block_table_index


def _layer_specs(group: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Return the spec of each layer; layers of a uniform group may differ."""
    spec = group.kv_cache_spec
    own: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return own if own is not None else dict.fromkeys(group.layer_names, spec)


def _check_kind(group: Any) -> None:  # noqa: ANN401
    from vllm.v1 import kv_cache_interface

    known = {getattr(kv_cache_interface, kind, None) for kind in _KINDS}
    for name, spec in _layer_specs(group).items():
        if type(spec) not in known:
            raise ConfigError(
                f"layer {name!r} has a cache of kind {type(spec).__name__}; PyNixlKVConnector "
                f"moves attention layers of these kinds only: {', '.join(_KINDS)}"
            )
        if spec.tokens_per_state != 1:
            raise ConfigError(
                f"layer {name!r} stores {spec.tokens_per_state} tokens in one state; "
                "PyNixlKVConnector needs one each"
            )


def _window(group: Any) -> int | None:  # noqa: ANN401
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    windows = {
        spec.sliding_window + spec.extra_retained_tokens
        if isinstance(spec, SlidingWindowSpec)
        else None
        for spec in _layer_specs(group).values()
    }
    return windows.pop() if len(windows) == 1 else None


def _page(
    spec: Any,  # noqa: ANN401
    tensor: Any,  # noqa: ANN401
    fp8_format: str,
    backend: str | None,
) -> tuple[str, str]:
    """Return the element type of a layer's pages, its packing included, and their opaque axes."""
    mode = getattr(spec, "kv_quant_mode", None)
    name = "NONE" if mode is None else str(mode.name)
    element = str(tensor.dtype).removeprefix("torch.")
    # Bytes without a quantisation mode, and an indexer's cache, have scales that no field tells of.
    is_told = element != "uint8" if name == "NONE" else name == "FP8_PER_TENSOR"
    role = getattr(getattr(spec, "cache_role", None), "name", "SPARSE")
    if element == "uint8" and name.startswith("FP8"):
        element = fp8_format
    if _has_head_slots(spec) or getattr(spec, "state_content_bytes", None) is not None:
        is_told = False
    if is_told and role == "SPARSE":
        return element, ""
    packed = f"{element}:{'packed' if name == 'NONE' else name.lower()}"
    if name in _INLINE_SCALES and not _has_head_slots(spec):
        return packed, ""
    return f"{packed} of {backend}" if backend else packed, "HND"


def _has_head_slots(spec: Any) -> bool:  # noqa: ANN401
    """Return whether the head axis counts slots of a backend's own, such as K and V planes."""
    return getattr(spec, "num_head_slots", None) is not None


def _total_heads(
    spec: Any,  # noqa: ANN401
    held: int,
    total: int,
    place: ParallelPlace,
) -> int | None:
    """Return the KV heads of a layer in the whole model; None if every rank holds all of it."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    size = place.tp[1]
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        return None
    if _has_head_slots(spec):
        return held * size
    if spec.max_tp_shards is not None:
        return int(held * min(size, spec.max_tp_shards))
    if held == max(1, total // size):
        return total
    return held * size  # packed heads, or a layer with its own number


def layer_number(name: str) -> int:
    """Return the number of a layer in the model: the only number in vLLM's name of it."""
    found = [int(number) for number in _NUMBER.findall(name)]
    if len(found) != 1:
        raise LayoutError(
            f"layer {name!r} has {len(found)} numbers in its name; expected one, the layer's"
        )
    return found[0]
