"""vLLM's description of its KV cache, as geometry: for this package's connector, and for others.

vLLM gives every attention layer a tensor with the axes block, head, token and content, in any order
of strides. The content is K and V of a head and token, or a latent; this module need not tell K
from V, so content is one axis. Backends may give pages another inside and keep these axes for their
size only: a page is sliced where its order is known, and is opaque otherwise. A layer with state
has pages of bytes, in which a convolution's last inputs and a recurrent state follow each other.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pynixlkv.connector.scheduler import GroupSpec
from pynixlkv.errors import ConfigError, LayoutError
from pynixlkv.geometry import KVCache, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "CACHE_KINDS",
    "CacheKind",
    "ParallelPlace",
    "group_specs",
    "kv_cache",
    "layer_number",
    "withheld_tokens",
]


def _by_position(spec: Any) -> dict[str, int]:  # noqa: ANN401, ARG001
    return {}


@dataclass(frozen=True)
class CacheKind:
    """What becomes of the layers of one class of vLLM's cache specs."""

    models: str
    """Models that have such layers."""
    moves: str = ""
    """What a hand-off moves; empty if such layers are refused."""
    refused: str = ""
    """Why they are refused."""
    table: Callable[[Any], Mapping[str, Any]] = field(default_factory=lambda: _by_position)
    """Returns the fields of `GroupSpec` that a spec changes."""


def _window(spec: Any) -> dict[str, int]:  # noqa: ANN401
    return {"window": spec.sliding_window + spec.extra_retained_tokens}


_REPLICA = "vLLM rebuilds it from another group"

CACHE_KINDS: Mapping[str, CacheKind] = {
    "FullAttentionSpec": CacheKind("most", "every block"),
    "MLAAttentionSpec": CacheKind("DeepSeek, Kimi, LongCat", "every block, an indexer's included"),
    "RSWASpec": CacheKind("with reference windows", "every block, as no window cuts a prompt"),
    "SinkFullAttentionSpec": CacheKind("with static sinks", "every block but the sinks"),
    "SlidingWindowSpec": CacheKind(
        "Gemma, gpt-oss", "the blocks that the window reaches", table=_window
    ),
    "SlidingWindowMLASpec": CacheKind(
        "DeepSeek V4", "the blocks that the window reaches", table=_window
    ),
    "ChunkedLocalAttentionSpec": CacheKind(
        "Llama 4",
        "the blocks of the last chunk",
        table=lambda spec: {"chunk": spec.attention_chunk_size},
    ),
    "CircularBufferSpec": CacheKind(
        "GLM 5.3 Flash, DeepSeek V4.1",
        "the request's one block, between equal TP sizes",
        table=lambda spec: {"block_size": 0},  # noqa: ARG005
    ),
    "MambaSpec": CacheKind(
        "Nemotron-H, Granite 4, Jamba, Qwen3-Next, LFM2",
        "the state before the last token",
        table=lambda spec: {"block_size": 0, "state_tokens": spec.block_size},
    ),
    "AttentionSpec": CacheKind("none", refused="it does not say how blocks are used"),
    "CrossAttentionSpec": CacheKind(
        "Whisper", refused="decode allocates no blocks for what an encoder has made"
    ),
    "EncoderOnlyAttentionSpec": CacheKind("BERT", refused="an encoder keeps no cache"),
    "HiddenStateCacheSpec": CacheKind(
        "hidden states to extract", refused="decode does not read hidden states"
    ),
    "HiSparseHotSpec": CacheKind("HiSparse", refused=_REPLICA),
    "HiSparseResidentSpec": CacheKind("HiSparse", refused=_REPLICA),
}
"""Classes of ``vllm.v1.kv_cache_interface``. Others, and subclasses, are refused as well: they may
use their blocks in another way."""

_STATES: Mapping[str, tuple[str, ...]] = {
    "MAMBA1": ("x",),
    "MAMBA2": ("x", "B", "C"),
    "GDN_ATTN": ("q", "k", "v"),
    "SHORT_CONV": ("x",),
    "LINEAR": (),
}
"""By type of state: the parts of the channels of its convolution, in their order. x and v have the
heads of the recurrent state."""

_ALONE = ("SHORT_CONV", "LINEAR")
"""Types that have only one of the two states."""

_CHANNELS = 8
"""Channels without heads are shared out by this many."""

_INLINE_SCALES = ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD")
"""Quantisation modes whose content of one head and token holds its own scales."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MODULES = 4096


@dataclass(frozen=True)
class ParallelPlace:
    """The place of a worker in vLLM's parallel groups: ranks and sizes."""

    tp: tuple[int, int]
    dcp: tuple[int, int] = (0, 1)
    interleave: int = 1
    """Consecutive tokens of one rank under decode context parallelism."""


def group_specs(kv_cache_config: Any, dcp_size: int) -> list[GroupSpec]:  # noqa: ANN401
    """Return how to read the block table of each group that takes part in transfers.

    Raises
    ------
    ConfigError
        If the cache of a layer is of a kind that cannot be moved (see `CACHE_KINDS`).
    """
    specs = []
    for group in kv_cache_config.transfer_groups:
        rules = []
        for name, spec in (_layer_specs(group) or {"of no layer": group.kv_cache_spec}).items():
            shares = dcp_size if spec.dcp_sharded else 1
            rule: dict[str, Any] = {"block_size": spec.block_size * shares, "null_block": 0}
            rules.append(GroupSpec(**{**rule, **_kind(name, spec).table(spec)}))
        if any(rule != rules[0] for rule in rules):
            raise ConfigError(
                f"the layers {', '.join(group.layer_names)} share a block table, but use it in "
                f"unlike ways: {rules}"
            )
        specs.append(rules[0])
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
) -> KVCache:
    """Describe the tensors that vLLM registers with a connector.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        The argument of a connector's ``register_kv_caches``: by layer, each of shape (blocks,
        heads, tokens, content).
    kv_cache_config : vllm.v1.kv_cache_interface.KVCacheConfig
        The argument of a connector's constructor.
    total_kv_heads : int
        KV heads of the model, by vLLM's own number; used under decode context parallelism only.
    place : ParallelPlace
        The worker's place in the parallel groups.
    is_opaque : bool
        Whether the inside of a head's page has an order of its own, as for vLLM's CPU kernels:
        pages move whole, or by whole heads.
    fp8_format : str
        Element type of fp8 caches, which vLLM stores as uint8.
    backends : mapping of str to str, optional
        Name of the attention backend of each layer, which decides the inside of packed pages.

    Returns
    -------
    KVCache
        The cache; its groups are layers that differ in their numbers only. The table of a group is
        named by its index in ``transfer_groups``.

    Raises
    ------
    ConfigError
        If the cache of a layer is of a kind that cannot be moved.
    LayoutError
        If a tensor does not fit its description.
    """
    alike: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for name, spec in _layer_specs(group).items():
            tensor = tensors.get(name)
            if tensor is None:
                continue  # on another stage
            _kind(name, spec)
            shape = tuple(getattr(tensor, "shape", ()))
            if len(shape) != 4:
                raise LayoutError(
                    f"layer {name!r} has a {type(tensor).__name__} of shape {shape}; expected a "
                    "tensor of shape (blocks, heads, tokens, content)"
                )
            if (tensor.data_ptr(), shape) in seen:
                continue  # it uses the cache of a layer before it
            seen.add((tensor.data_ptr(), shape))
            key = index, _NUMBER.sub("#", name), shape, spec, (backends or {}).get(name)
            alike.setdefault(key, {})[name] = tensor
    if not alike:
        raise ConfigError("vLLM registered no layer of a group that takes part in transfers")
    caches: list[KVCache] = []
    names: set[str] = set()
    for (index, kind, shape, spec, backend), members in alike.items():
        name = f"{index}:{kind}"
        while name in names:  # one pattern, several shapes
            name += "'"
        names.add(name)
        options: dict[str, Any] = {
            "group": name,
            "kind": kind,
            "table": str(index),
            "layers": [layer_number(layer) for layer in members],
            "tp": place.tp,
        }
        if hasattr(spec, "mamba_type"):
            caches.append(_state(members, spec, options))
        else:
            page = _page(spec, shape, next(iter(members.values())).dtype, fp8_format, backend)
            caches.append(
                _attention(members, spec, page, total_kv_heads, place, is_opaque, options)
            )
    return KVCache.combine(*caches)


def _layer_specs(group: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """Return the spec of each layer; layers of a uniform group may differ."""
    spec = group.kv_cache_spec
    own: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return own if own is not None else dict.fromkeys(group.layer_names, spec)


def _kind(name: str, spec: Any) -> CacheKind:  # noqa: ANN401
    """Return what becomes of a layer, or refuse it."""
    from vllm.v1 import kv_cache_interface

    what = type(spec).__name__
    kind = CACHE_KINDS.get(what)
    if kind is None or type(spec) is not getattr(kv_cache_interface, what, None):
        kind = CacheKind("", refused="this release does not know how it uses its blocks")
    refused = kind.refused
    if not refused and not isinstance(spec.tokens_per_state, int):
        refused = f"it has {1 / spec.tokens_per_state} states for each token"
    state = getattr(spec, "mamba_type", None)
    if state is not None and not refused:
        parts = _STATES.get(state.name)
        expected = 1 if state.name in _ALONE else 2
        if parts is None:
            refused = f"nothing is known of state of type {state.name}"
        elif len(spec.shapes) != expected:
            refused = (
                f"its state of type {state.name} has {len(spec.shapes)} parts, not {expected}: a "
                "record of recent tokens, whose position is not in the cache"
            )
    if refused:
        raise ConfigError(
            f"layer {name!r} has a cache of kind {what}, which PyNixlKVConnector does not move: "
            f"{refused}"
        )
    return kind


def withheld_tokens(kv_cache_config: Any, num_lookahead_tokens: int = 0) -> int:  # noqa: ANN401
    """Return how many of a prompt's last tokens prefill must leave to decode.

    Decode computes the last token of a prompt in any case. State cannot go back to the one before,
    what a window or a chunk has left behind is freed, and the layers of a draft have seen tokens
    that were not yet accepted.
    """
    tables = group_specs(kv_cache_config, 1)
    goes_back = all(table.block_size and not table.is_partial for table in tables)
    return max(0 if goes_back else 1, num_lookahead_tokens - 1)


def _attention(
    members: Mapping[str, Any],
    spec: Any,  # noqa: ANN401
    page: _Page,
    total_kv_heads: int,
    place: ParallelPlace,
    is_opaque: bool,
    options: dict[str, Any],
) -> KVCache:
    """Describe layers of attention: a head and token has its content in one piece, or in parts."""
    _, held, tokens, content = next(iter(members.values())).shape
    if page.scales:
        held //= 2
    heads, is_exact = _total_heads(spec, held, total_kv_heads, place)
    options = {**options, "has_exact_heads": is_exact, "opaque_axes": page.opaque}
    if type(spec).__name__ == "CircularBufferSpec":
        options["opaque_axes"] = "HKD"
        return KVCache.from_tensors(
            members, axes="BHKD", kv_heads=heads, dtype=f"{page.dtype}:ring", **options
        )
    if is_opaque and not page.opaque:
        options["opaque_axes"] = "N"
    options["tokens_per_state"] = spec.tokens_per_state
    if spec.dcp_sharded and place.dcp[1] > 1:
        options |= {"dcp": place.dcp, "interleave": place.interleave}
    if not page.scales:
        return KVCache.from_tensors(
            members, axes="BHND", kv_heads=heads, dtype=page.dtype, **options
        )
    order = "HND" if _is_dense(members) else "NHD"
    parts = [
        Part(f"{side} {what}", order, {"N": tokens, "D": size}, heads, dtype=f"{page.dtype} {what}")
        for side in ("K", "V")
        for what, size in (("data", content - page.scales), ("scales", page.scales))
    ]
    if order == "NHD":
        members = {name: tensor.transpose(1, 2) for name, tensor in members.items()}
    return KVCache.from_parts(members, axes="BPPP", parts=parts, **options)


def _is_dense(members: Mapping[str, Any]) -> bool:
    """Return whether the pages of layers are in the order of their axes."""
    return all(bool(tensor[0].is_contiguous()) for tensor in members.values())


@dataclass(frozen=True)
class _Page:
    """The inside of a layer's pages."""

    dtype: str
    """Element type, its packing included."""
    opaque: str
    """Axes along which nothing is known of the order."""
    scales: int = 0
    """Bytes of scales for each head and token, which follow all data of K, and of V."""


def _page(
    spec: Any,  # noqa: ANN401
    shape: Sequence[int],
    dtype: Any,  # noqa: ANN401
    fp8_format: str,
    backend: str | None,
) -> _Page:
    mode = getattr(spec, "kv_quant_mode", None)
    name = "NONE" if mode is None else str(mode.name)
    element = str(dtype).removeprefix("torch.")
    # Bytes without a quantisation mode, and an indexer's cache, have scales that no field tells of.
    is_told = element != "uint8" if name == "NONE" else name == "FP8_PER_TENSOR"
    role = getattr(getattr(spec, "cache_role", None), "name", "SPARSE")
    if element == "uint8" and name.startswith("FP8"):
        element = fp8_format
    if _has_head_slots(spec) or getattr(spec, "state_content_bytes", None) is not None:
        is_told = False
    if is_told and role == "SPARSE":
        return _Page(element, "")
    packed = f"{element}:{'packed' if name == 'NONE' else name.lower()}"
    if name in _INLINE_SCALES and not _has_head_slots(spec):
        return _Page(packed, "")
    packed = f"{packed} of {backend}" if backend else packed
    if (name, backend) == ("NVFP4", "FLASHINFER") and shape[1] == 2 * spec.num_kv_heads:
        # The order of scales inside a head is the kernels' own.
        return _Page(packed, "N", scales=shape[3] // 9)
    return _Page(packed, "HND")


def _has_head_slots(spec: Any) -> bool:  # noqa: ANN401
    """Return whether the head axis counts slots of a backend's own, such as K and V planes."""
    return getattr(spec, "num_head_slots", None) is not None


def _total_heads(
    spec: Any,  # noqa: ANN401
    held: int,
    total: int,
    place: ParallelPlace,
) -> tuple[int | None, bool]:
    """Return the KV heads of a layer in the whole model, and whether it may not be fewer.

    None if every rank holds all of it. A rank that holds one head cannot tell whether others hold
    the same.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    size = place.tp[1]
    if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)):
        return None, True
    if spec.max_tp_shards is not None:
        return int(held * min(size, spec.max_tp_shards)), True
    if held > 1 or size == 1:
        return held * size, True
    if place.dcp[1] > 1:  # the ranks that hold one head are known to share its tokens
        return min(total, size), True
    return size, False


@dataclass(frozen=True)
class _Shards:
    """Equal slices of one axis of a state, such as heads, which ranks share out among them."""

    name: str
    count: int
    """Slices that a rank holds."""
    size: int
    """Elements of each along the axis."""
    begin: int = 0
    """The first element."""
    is_shared: bool = False
    """Whether other ranks may hold the same."""


def _shards(spec: Any, channels: int, size: int) -> list[_Shards]:  # noqa: ANN401
    """Return the parts of a convolution's channels, and those of the recurrent state last."""
    names = _STATES[spec.mamba_type.name]
    if spec.tp_replicated:
        return [_Shards(name, 1, n) for name, n in (("x", channels), ("state", spec.shapes[-1][0]))]
    if names == ("x",):
        unit = math.gcd(channels * size, _CHANNELS)
        return [_Shards(name, channels // unit, unit) for name in ("x", "state")]
    heads, width, unit = spec.shapes[-1]
    side = (channels - heads * width) // 2
    unit = math.gcd(side * size, unit)
    found, begin = [], 0
    for name in names:
        count, each = (heads, width) if name in ("x", "v") else (side // unit, unit)
        is_shared = name in ("B", "C") and count == 1 < size
        found.append(_Shards(name, count, each, begin, is_shared))
        begin += count * each
    if begin != channels:
        raise LayoutError(
            f"a convolution's state has {channels} channels; expected {begin} for {heads} heads "
            f"of {width}"
        )
    return [*(each for each in found if each.count), _Shards("state", heads, 1)]


def _state(members: Mapping[str, Any], spec: Any, options: dict[str, Any]) -> KVCache:  # noqa: ANN401
    """Describe layers of state: pages of a convolution's last inputs, and of a recurrence."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    states, begin = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        end = begin + math.prod(shape) * dtype.itemsize
        pages = {name: tensor.flatten(1)[:, begin:end] for name, tensor in members.items()}
        states.append({name: page.view(dtype).unflatten(1, shape) for name, page in pages.items()})
        begin = end
    names, size = _STATES[spec.mamba_type.name], options["tp"][1]
    along, axes = (1, "BHDK") if is_conv_state_dim_first() else (2, "BKHD")
    channels = spec.shapes[0][along - 1] if names else 0
    *inputs, state = _shards(spec, channels, size)
    parts = [(part, states[0], along, axes) for part in inputs]
    if spec.mamba_type.name != "SHORT_CONV":
        flat = {name: tensor.flatten(2) for name, tensor in states[-1].items()}
        parts.append((state, flat, 1, "BHKD"))
    caches = []
    for part, tensors, at, letters in parts:
        heads = None if spec.tp_replicated else size if part.is_shared else part.count * size
        views = {
            name: tensor.narrow(at, part.begin, part.count * part.size).unflatten(
                at, (part.count, part.size)
            )
            for name, tensor in tensors.items()
        }
        ends = {key: f"{options[key]} {part.name}" for key in ("group", "kind")}
        caches.append(
            KVCache.from_tensors(
                views,
                axes=letters,
                kv_heads=heads,
                has_exact_heads=not part.is_shared,
                **{**options, **ends},
            )
        )
    return KVCache.combine(*caches)


def layer_number(name: str) -> int:
    """Return a number for a layer: its number in vLLM's name of it.

    A name with several numbers is of a module in a layer, whose numbers are combined; one without
    any has 0. Layers whose names differ in more than their numbers may have the same one.
    """
    number = 0
    for at, found in enumerate(map(int, _NUMBER.findall(name))):
        if found >= _MODULES:
            raise LayoutError(f"layer {name!r} has number {found}; expected less than {_MODULES}")
        number = number * (_MODULES if at else 1) + found
    return number
