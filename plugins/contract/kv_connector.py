"""KV connectors: load and save blocks of the KV cache outside of it."""

from .kv_cache.block_hash import (
    block_key,
)
from .kv_cache.block_identity import BlockIdentity as BlockIdentity
from .kv_cache.connector import (
    FinishedTransfers,
    KVConnector,
    KVConnectorContext,
    KVConnectorScheduler,
    KVConnectorWorker,
    KVSchedulerContext,
    KVWorkerContext,
)
from .kv_cache.connector import OpenStores as OpenStores

__all__ = [
    "FinishedTransfers",
    "KVConnector",
    "KVConnectorContext",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "KVSchedulerContext",
    "KVWorkerContext",
    "block_key",
]
