"""Sizes and layout of a rank's KV cache: blocks of keys and values, and blocks of states."""

from .kv_cache.memory import CacheMemory as CacheMemory
from .kv_cache.memory import block_needs as block_needs
from .kv_cache.memory import tightest as tightest
