"""A KV connector for vLLM's disaggregated prefill and decode, on `pynixlkv.connector`.

Name it in vLLM's ``--kv-transfer-config``: ``{"kv_connector": "PyNixlKVConnector", "kv_role":
"kv_producer"}`` (or ``"kv_consumer"``). vLLM finds the name through the entry point that this
package registers; where plugins are switched off, add ``"kv_connector_module_path":
"pynixlkv.vllm"``.

Other connectors can use `kv_cache` and `group_specs`, which describe vLLM's caches.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pynixlkv.vllm.caches import CACHE_KINDS, ParallelPlace, group_specs, kv_cache
    from pynixlkv.vllm.connector import PyNixlKVConnector

__all__ = [
    "CACHE_KINDS",
    "ParallelPlace",
    "PyNixlKVConnector",
    "group_specs",
    "kv_cache",
    "register",
]

_NAME = "PyNixlKVConnector"


def log_as_vllm() -> None:
    """Send the records of this package to vLLM's handlers, unless the package has handlers."""
    own = logging.getLogger("pynixlkv")
    if not own.handlers:
        own.parent = logging.getLogger("vllm")  # vLLM may exchange its handlers later


def register() -> None:
    """Tell vLLM's factory where the connector is; vLLM calls it in each process, maybe twice."""
    log_as_vllm()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "pynixlkv.vllm.connector", _NAME)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'connector' if name == _NAME else 'caches'}"), name)
