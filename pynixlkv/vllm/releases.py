"""The differences between the releases of vLLM that `PyNixlKVConnector` serves: all are here.

The rest of the adapter is written for the newest. Where only names are younger than a release, this
module adds them to its classes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface

from pynixlkv.errors import ConfigError, LibraryVersionError

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 27), (0, 33)
"""Minor releases: the oldest that is served, and the newest that is tested."""

_NOT_IN_ALL = frozenset(
    {"get_transfer_results", "get_loaded_kv_cache_group_ids", "supports_sleep_mode"}
)
"""Methods of the connector that some releases never call."""

TransferResults = getattr(base, "KVConnectorTransferResults", None)
"""vLLM's type for the requests that have ended; None up to 0.29, which takes failures by block."""


def _release() -> tuple[int, ...]:
    numbers = vllm.__version__.split(".")[:2]
    return tuple(int(number) if number.isdecimal() else -1 for number in numbers)


def check(connector: type) -> None:
    """Raise unless this vLLM is recent enough and has the interface that the connector needs."""
    release, served = _release(), f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if release < OLDEST:
        raise LibraryVersionError(
            f"vLLM {vllm.__version__} is older than all that PyNixlKVConnector works with "
            f"({served}); use a newer vLLM"
        )
    overridden = {name for name, value in vars(connector).items() if callable(value)}
    lacking = [
        name
        for name in sorted(overridden - _NOT_IN_ALL)
        if not (name.startswith("_") or hasattr(base.SupportsHMA, name))
        and not hasattr(base.KVConnectorBase_V1, name)
    ]
    missing = [f"{name}() is not in vLLM's KVConnectorBase_V1" for name in lacking]
    abstract: frozenset[str] = getattr(connector, "__abstractmethods__", frozenset())
    missing += [f"{name}() is not in PyNixlKVConnector" for name in sorted(abstract)]
    if missing:
        raise LibraryVersionError(
            f"the connector interface of vLLM {vllm.__version__} is another than that of "
            f"{served}: {'; '.join(missing)}. Use one of these releases, or a newer pynixlkv"
        )
    if release > NEWEST:
        _log.warning(
            "vLLM %s is newer than the releases that PyNixlKVConnector is tested with (%s)",
            vllm.__version__, served,
        )  # fmt: skip


def cache_hit_source() -> object:
    """Return vLLM's label for tokens that came from another engine; None before 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def cpu_pages() -> str:
    """Return the name of the order inside the pages of vLLM's CPU kernels.

    No release promises the order of another one.
    """
    return "vLLM " + ".".join(map(str, _release()))


def heads_before_tokens() -> str:
    """Return vLLM's name of the layout in which a slice of a page's heads is contiguous."""
    return "LBHNC" if _release() >= (0, 29) else "HND"


def _select_tables(config: Any, block_ids: Sequence[list[int]]) -> tuple[list[int], ...]:  # noqa: ANN401
    return tuple(block_ids[i] for i in config.transfer_group_ids)


def _lookahead(config: Any) -> int:  # noqa: ANN401
    speculative = config.speculative_config
    return int(speculative is not None and speculative.use_eagle())


_YOUNGER: dict[type, dict[str, object]] = {
    kv_cache_interface.KVCacheSpec: {
        "dcp_sharded": True,
        "extra_retained_tokens": 0,
        "max_tp_shards": None,
        "tokens_per_state": 1,
        "tp_replicated": False,
    },
    VllmConfig: {"num_prefill_lookahead_tokens": property(_lookahead)},
    kv_cache_interface.KVCacheConfig: {
        "transfer_group_ids": property(lambda config: tuple(range(len(config.kv_cache_groups)))),
        "transfer_groups": property(lambda config: tuple(config.kv_cache_groups)),
        "select_transfer_block_ids": _select_tables,
    },
}
"""Names that are younger than `OLDEST`, and what holds in releases without them."""

for _type, _names in _YOUNGER.items():
    for _name, _value in _names.items():
        if not hasattr(_type, _name):
            setattr(_type, _name, _value)


def blocks_of(
    manager: Any,  # noqa: ANN401
    pool: Any,  # noqa: ANN401
    request_id: str,
    block_ids: Sequence[Sequence[int]],
) -> list[Any]:
    """Return the blocks of a request; before 0.30, which has no `manager`, there is one pool."""
    if manager is None:
        return [pool.blocks[i] for table in block_ids for i in table]
    return [block for table in manager.get_blocks(request_id).blocks for block in table]


def uses_draft_cache(speculative: Any) -> bool:  # noqa: ANN401
    """Return whether a method of speculation has a KV cache of its own."""
    asked = getattr(speculative, "uses_draft_kv_cache", None)
    if asked is not None:
        return bool(asked())
    return bool(
        speculative.use_eagle()
        or speculative.uses_draft_model()
        or speculative.uses_extract_hidden_states()
    )


def refuse_what_is_missing(vllm_config: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
    """Raise for a configuration that this release cannot serve."""
    model = vllm_config.model_config
    if model is not None and getattr(model, "enable_sleep_mode", False):
        raise ConfigError(
            "PyNixlKVConnector does not support --enable-sleep-mode: a sleeping engine maps its "
            "cache anew, and registered memory would be that of the old one; leave it out"
        )
    if _release() < (0, 29) and getattr(model, "use_mla", False):
        raise ConfigError(
            f"the MLA caches of vLLM {vllm.__version__} are of a form that PyNixlKVConnector does "
            "not know; use vLLM 0.29 or newer"
        )
    if TransferResults is None and len(kv_cache_config.kv_cache_groups) > 1:
        raise ConfigError(
            f"vLLM {vllm.__version__} stops when a load fails in a model with several block "
            f"tables (this one has {len(kv_cache_config.kv_cache_groups)}); use vLLM 0.30 or "
            "newer, or --disable-hybrid-kv-cache-manager"
        )
