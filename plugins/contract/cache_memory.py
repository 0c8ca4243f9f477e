"""The memory of a rank's KV cache: of blocks with keys and values, and of those with states."""

from .kv_cache.memory import CacheMemory as CacheMemory
from .kv_cache.memory import block_needs as block_needs
from .kv_cache.memory import tightest as tightest
