"""The connectors that the tests of this folder run with."""

from engines import Connector

NIXL = Connector("NixlConnector")
"""vLLM's own, on NIXL's own package."""

NIXL_API = NIXL.with_(env={"PYNIXLKV_NIXL_API": "1"})
"""vLLM's own, on `pynixlkv.nixl_api`."""

OURS = Connector("PyNixlKVConnector")
"""pynixlkv's; vLLM finds it by its entry point."""

STAGED = OURS.with_(extra={"host_buffer_blocks": 16})
PUSH = OURS.with_(extra={"transfer_mode": "push"})
UCX = OURS.with_(extra={"transfer_backend": "ucx"})
UCX_PUSH = UCX.with_(extra={"transfer_mode": "push"})
LAYERWISE = PUSH.with_(extra={"layerwise": True})
