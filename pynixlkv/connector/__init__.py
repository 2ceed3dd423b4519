"""The half of a KV connector that every engine would write again.

A `ConnectorScheduler` lives with an engine's scheduler, and a `ConnectorWorker` with each of its
ranks. In each step the engine passes a `ConnectorMetadata` from the scheduler to the workers, and
the `Finished` of the workers back. `KVTransferParams` go from producer to consumer with a request.
"""

from __future__ import annotations

from pynixlkv.connector.metadata import (
    AgentMetadata,
    ConnectorConfig,
    ConnectorMetadata,
    EndState,
    KVTransferParams,
    Lease,
    ParallelSizes,
    ReqMeta,
    RequestInfo,
)
from pynixlkv.connector.receiver import RequestEnd
from pynixlkv.connector.scheduler import ConnectorScheduler, GroupSpec
from pynixlkv.connector.staging import DeviceEvent
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
