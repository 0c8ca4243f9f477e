"""KV stores: keep blocks of the KV cache in host memory, on disk or on other machines."""

from .kv_cache.store import (
    BlockBuffer,
    KVStore,
    KVStoreContext,
    PeerKVStore,
)

__all__ = ["BlockBuffer", "KVStore", "KVStoreContext", "PeerKVStore"]
