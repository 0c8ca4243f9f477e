"""Interfaces of the KV cache: block manager, eviction policies, events, connectors and stores."""

from hardpoint.plugins.requests.plan import BlockIds as BlockIds

from .block_hash import (
    block_key,
    sharing_key,
)
from .block_identity import BlockIdentity as BlockIdentity
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
from .eviction import BlockHistory as BlockHistory
from .eviction import CachedBlocks as CachedBlocks
from .eviction import (
    EvictionContext,
    EvictionPolicy,
)
from .eviction import RetainedBlocks as RetainedBlocks
from .manager import STATE_WINDOW as STATE_WINDOW
from .manager import BlockNeeds as BlockNeeds
from .manager import (
    CachedPrefix,
)
from .manager import KVCacheGroup as KVCacheGroup
from .manager import KVCacheManager as KVCacheManager
from .store import (
    BlockBuffer,
    KVStore,
    KVStoreContext,
    PeerKVStore,
)

__all__ = [
    "AllBlocksCleared",
    "BlockBuffer",
    "BlockRemoved",
    "BlockStored",
    "CachedPrefix",
    "EvictionContext",
    "EvictionPolicy",
    "FinishedTransfers",
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
