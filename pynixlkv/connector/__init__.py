"""The half of a KV connector that every engine would write again.

`ConnectorScheduler` lives with an engine's scheduler, one `ConnectorWorker` with each of its ranks.
The engine passes a `ConnectorMetadata` from one to the others in each step, and reports back what
has `Finished`. `KVTransferParams` is what travels from producer to consumer with a request.
"""

from __future__ import annotations

from pynixlkv.connector.config import ConnectorConfig
from pynixlkv.connector.metadata import (
    AgentMetadata,
    ConnectorMetadata,
    EndState,
    KVTransferParams,
    Lease,
    ParallelSizes,
    ReqMeta,
    RequestInfo,
)
from pynixlkv.connector.receiver import DeviceEvent, RequestEnd
from pynixlkv.connector.scheduler import ConnectorScheduler, GroupSpec
from pynixlkv.connector.worker import ConnectorWorker, Finished

__all__ = [
    "AgentMetadata",
    "ConnectorConfig",
    "ConnectorMetadata",
    "ConnectorScheduler",
    "ConnectorWorker",
    "EndState",
    "ParallelSizes",
    "DeviceEvent",
    "Finished",
    "GroupSpec",
    "KVTransferParams",
    "Lease",
    "ReqMeta",
    "RequestEnd",
    "RequestInfo",
]
