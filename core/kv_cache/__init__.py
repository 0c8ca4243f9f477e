"""The paged KV cache: block pool, block tables of requests, prefix cache and its sizing."""

from hardpoint.host.boundary.kv_cache import Eviction

from .block_hashes import BlockHashes
from .block_pool import BlockMetadata, BlockPool
from .manager import BlockManager
from .sizing import CacheSize, size_cache

__all__ = [
    "BlockHashes",
    "BlockManager",
    "BlockMetadata",
    "BlockPool",
    "CacheSize",
    "Eviction",
    "size_cache",
]
