"""The facts that two vLLM engines must agree on for the bytes of their caches to mean the same.

Sizes of pools, blocks and parallel groups, the order of axes in memory and settings that change
speed alone are not among them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pynixlkv import __version__
from pynixlkv.vllm import releases
from pynixlkv.vllm.content import numbers_features

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_UNRELATED = {
    *("_name_or_path", "name_or_path", "transformers_version", "_attn_implementation"),
    *("dtype", "torch_dtype", "quantization_config", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
    *("return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
}
"""Settings of a model that do not decide its keys and values, or that are facts of their own."""

_LONGEST = 200
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files of weights, in vLLM's order of preference."""
_SAMPLES, _SAMPLE_BYTES = 1024, 4096


def compatibility(config: VllmConfig) -> dict[str, str]:
    """Return the facts of an engine by name; `pynixlkv.handshake` compares them."""
    from vllm.platforms import current_platform

    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    facts: dict[str, object] = {
        "pynixlkv": ".".join(__version__.split(".")[:2]),
        **_model_facts(model, cache.cache_dtype, config.load_config),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "layers": model.get_total_num_hidden_layers(),
        "mla": model.use_mla,
        "unquantized_layers": ",".join(sorted(cache.kv_cache_dtype_skip_layers)),
        "numbered_features": numbers_features(config),
        "speculative_method": None,
        "hybrid_kv_cache_manager": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "transfer_mode": config.kv_transfer_config.get_from_extra_config("transfer_mode", "pull"),
    }
    if speculative is not None and releases.uses_draft_cache(speculative):
        facts["speculative_method"] = speculative.method
        draft_dtype = speculative.kv_cache_dtype or cache.cache_dtype
        draft = _model_facts(speculative.draft_model_config, draft_dtype, config.load_config)
        facts |= {f"draft_{name}": value for name, value in draft.items()}
    if current_platform.is_cpu():
        import torch

        # The order inside a page depends on the kernels and their instruction set.
        facts["cpu"] = torch.backends.cpu.get_cpu_capability()
        facts["cpu_pages"] = releases.cpu_pages()
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


def _model_facts(model: ModelConfig, cache_dtype: str, load: LoadConfig) -> dict[str, object]:
    """Return the identity of a model's weights, the format of its cache and its settings.

    The settings are those of rope, attention and all else that decides keys and values.
    """
    files = None if load.load_format == "dummy" else _weight_files(model, load.download_dir)
    return {
        "weights": _digest(files) if files else f"{model.model}, revision {model.revision}",
        "code_revision": model.code_revision,
        "dtype": _type_name(model.dtype),
        **_cache_facts(cache_dtype, model),
        **dict(_settings(model.hf_config.to_dict(), "config")),
    }


def _weight_files(model: ModelConfig, download_dir: str | None) -> list[Path]:
    """Return the files of a model's weights, wherever its folder is; none if it is not here."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(model.model)
    if not folder.is_dir():
        try:
            found = try_to_load_from_cache(
                model.model, "config.json", cache_dir=download_dir, revision=model.revision
            )
        except ValueError:  # not a name of the hub
            found = None
        if not isinstance(found, str):
            return []
        folder = Path(found).parent
    for pattern in _WEIGHTS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def _digest(files: list[Path]) -> str:
    """Return a digest of weights: of the sizes of their files, and of samples from all over them.

    Reading all of them would take as long as loading the model.
    """
    digest = hashlib.sha256()
    samples = max(_SAMPLES // len(files), 4)
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for number in range(samples):
                file.seek(max(size - _SAMPLE_BYTES, 0) * number // (samples - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _settings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the settings of a nested configuration by their paths."""
    if isinstance(value, dict) and value:
        for key, setting in value.items():
            if key not in _UNRELATED and setting is not None:
                yield from _settings(setting, f"{path}.{key}")
        return
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) > _LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{text[:_LONGEST]}... sha256 {digest}"
    yield path, text
