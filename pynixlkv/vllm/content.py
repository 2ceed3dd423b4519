"""What decides the KV of a prompt, as one digest that is equal in every engine.

vLLM's block hashes do not serve: they start from a random value in each process, and depend on the
block size.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from vllm.multimodal.hasher import MultiModalHasher
from vllm.v1.utils import tensor_data

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request


def numbers_features(config: VllmConfig) -> bool:
    """Return whether vLLM numbers images instead of identifying them: without both its caches."""
    features = config.model_config.multimodal_config
    return (
        features is not None
        and features.mm_processor_cache_gb == 0
        and not config.cache_config.enable_prefix_caching
    )


def content_digest(request: Request, num_tokens: int, *, hash_features: bool = False) -> str:
    """Return a digest of what decides the KV of a request's first tokens.

    That is what `generate_block_hash_extra_keys` of vLLM's prefix cache adds to the tokens: the
    adapter, the images and other features, the cache salt, and embeddings. With `hash_features`,
    features are digested themselves instead of being trusted to have an identifier of their own.
    """
    lora, embeds, is_token = (
        request.lora_request, request.prompt_embeds, request.prompt_is_token_ids
    )  # fmt: skip
    facts = (
        num_tokens,
        lora and (lora.lora_name, lora.lora_path),
        request.cache_salt or None,
        [
            (
                _identity(f) if hash_features else f.identifier,
                f.mm_position.offset,
                f.mm_position.length,
            )
            for f in request.mm_features
            if f.mm_position.offset < num_tokens
        ],
        None if embeds is None else (str(embeds.dtype), embeds.shape[1:]),
        None if is_token is None else bytes(is_token[:num_tokens]),
    )
    digest = hashlib.sha256(msgspec.msgpack.encode(facts))
    digest.update(np.array(request.all_token_ids[:num_tokens], "<i8").tobytes())
    if embeds is not None:
        digest.update(tensor_data(embeds[:num_tokens]))
    return digest.hexdigest()


def _identity(feature: MultiModalFeatureSpec) -> str:
    identity: str = feature.identifier
    if feature.data is not None:
        identity = MultiModalHasher.hash_kwargs("sha256", **feature.data.get_data())
    return identity
