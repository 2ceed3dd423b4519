"""The facts that two vLLM engines must agree on for the bytes of their caches to mean the same.

Sizes of pools, blocks and parallel groups, the order of axes in memory and settings that change
speed alone are not among them.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import vllm

from pynixlkv import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import ModelConfig, VllmConfig

_ROPE = ("rope", "rotary")
_ATTENTION = ("attention", "attn", "window", "layer_types", "chunk", "softcap", "sink")
"""Parts of the names of settings that decide which keys a query meets, and how."""

_UNRELATED = {
    *("_name_or_path", "name_or_path", "transformers_version", "quantization_config"),
    *("dtype", "torch_dtype", "use_cache", "id2label", "label2id", "_attn_implementation"),
}
"""Settings of a model that do not decide what its keys and values mean, or are facts themselves."""

_MAX_SHOWN = 200


def compatibility(config: VllmConfig) -> dict[str, str]:
    """Return the facts of an engine by name; `pynixlkv.handshake` compares them."""
    from vllm.platforms import current_platform

    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    facts: dict[str, object] = {
        "vllm": vllm.__version__,
        "pynixlkv": ".".join(__version__.split(".")[:2]),
        **_model_facts(model, cache.cache_dtype),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layers": model.get_total_num_hidden_layers(),
        "mla": model.use_mla,
        "unquantized_layers": ",".join(sorted(cache.kv_cache_dtype_skip_layers)),
        "speculative_method": None,
        "hybrid_kv_cache_manager": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "transfer_mode": config.kv_transfer_config.get_from_extra_config("transfer_mode", "pull"),
    }
    if speculative is not None and speculative.uses_draft_kv_cache():
        facts["speculative_method"] = speculative.method
        draft_dtype = speculative.kv_cache_dtype or cache.cache_dtype
        draft = _model_facts(speculative.draft_model_config, draft_dtype)
        facts |= {f"draft_{name}": value for name, value in draft.items()}
    if current_platform.is_cpu():
        import torch

        # The order inside a page depends on the instruction set of the kernels.
        facts["cpu"] = torch.backends.cpu.get_cpu_capability()
    return {name: str(value) for name, value in facts.items()}


def fp8_format(cache_dtype: str) -> str:
    """Return the element type of fp8 caches, which vLLM stores as uint8."""
    from vllm.platforms import current_platform

    if cache_dtype == "fp8_e5m2":
        return "float8_e5m2"
    return _type_name(current_platform.fp8_dtype())


def _type_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _cache_facts(cache_dtype: str, model: ModelConfig) -> dict[str, object]:
    """Return the exact format of the elements of a cache, and where their scales are."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, resolve_kv_cache_dtype_string
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    resolved = resolve_kv_cache_dtype_string(cache_dtype, model)
    mode = get_kv_quant_mode(resolved).name
    if mode == "NONE":
        dtype = _type_name(kv_cache_dtype_str_to_dtype(resolved, model))
        return {"cache_dtype": dtype, "quantization_mode": mode}
    fp8, is_plain = fp8_format(resolved), resolved in ("fp8", "fp8_e4m3", "fp8_e5m2")
    return {
        "cache_dtype": fp8 if is_plain else resolved,
        "quantization_mode": mode,
        "fp8_format": fp8,
        "scales": f"with the weights ({model.quantization})" if is_plain else "in the pages",
    }


def _model_facts(model: ModelConfig, cache_dtype: str) -> dict[str, object]:
    """Return the identity of a model's weights, its settings and the format of its cache."""
    settings = dict(_settings(model.hf_config.to_dict()))
    rope = {name for name in settings if any(part in name for part in _ROPE)}
    attention = {name for name in settings if any(part in name for part in _ATTENTION)} - rope
    return {
        "model": model.model,
        "revision": getattr(model.hf_config, "_commit_hash", None) or model.revision,
        "code_revision": model.code_revision,
        "dtype": _type_name(model.dtype),
        **_cache_facts(cache_dtype, model),
        "rope": _text({name: settings[name] for name in rope}),
        "attention": _text({name: settings[name] for name in attention}),
        "model_config": _text({name: settings[name] for name in {*settings} - rope - attention}),
    }


def _settings(nested: dict[Any, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each setting of a nested configuration by its path."""
    for key, value in nested.items():
        if key in _UNRELATED:
            continue
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _text(settings: dict[str, object]) -> str:
    """Return settings as text: in full if they are few, otherwise with a digest for their rest."""
    text = json.dumps(settings, sort_keys=True, default=str)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
