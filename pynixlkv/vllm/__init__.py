"""A KV connector for vLLM's disaggregated prefill and decode, on `pynixlkv.connector`.

Name it in vLLM's ``--kv-transfer-config``: ``{"kv_connector": "PyNixlKVConnector", "kv_role":
"kv_producer"}`` (or ``"kv_consumer"``). vLLM finds the name through the entry point that this
package registers; where plugins are switched off, add ``"kv_connector_module_path":
"pynixlkv.vllm"``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pynixlkv.vllm.connector import PyNixlKVConnector

__all__ = ["PyNixlKVConnector", "register"]

_NAME = "PyNixlKVConnector"


def log_as_vllm() -> None:
    """Let vLLM's handlers have the records of this package, unless it has handlers of its own."""
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
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pynixlkv.vllm.connector import PyNixlKVConnector

    return PyNixlKVConnector
