"""Interfaces of the KV cache: block manager, eviction policies, events, connectors and stores."""

from hardpoint.plugins.requests.plan import BlockIds

from .block_hash import (
    BlockIdentity,
    block_key,
    sharing_key,
)
from .connector import (
    FinishedTransfers,
    KVConnector,
    KVConnectorContext,
    KVConnectorScheduler,
    KVConnectorWorker,
    KVSchedulerContext,
    KVWorkerContext,
)
from .events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    KVEventPublisher,
    PublisherContext,
)
from .eviction import (
    BlockHistory,
    CachedBlocks,
    EvictionContext,
    EvictionPolicy,
)
from .eviction import RetainedBlocks as RetainedBlocks
from .manager import STATE_WINDOW as STATE_WINDOW
from .manager import BlockNeeds as BlockNeeds
from .manager import (
    CachedPrefix,
    KVCacheGroup,
    KVCacheManager,
)
from .store import (
    BlockBuffer,
    KVStore,
    KVStoreContext,
    PeerKVStore,
)

__all__ = [
    "AllBlocksCleared",
    "BlockBuffer",
    "BlockHistory",
    "BlockIdentity",
    "BlockIds",
    "BlockRemoved",
    "BlockStored",
    "CachedBlocks",
    "CachedPrefix",
    "EvictionContext",
    "EvictionPolicy",
    "FinishedTransfers",
    "KVCacheGroup",
    "KVCacheManager",
    "KVConnector",
    "KVConnectorContext",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "KVEvent",
    "KVEventBatch",
    "KVEventPublisher",
    "KVSchedulerContext",
    "KVStore",
    "KVStoreContext",
    "KVWorkerContext",
    "PeerKVStore",
    "PublisherContext",
    "block_key",
    "sharing_key",
]
