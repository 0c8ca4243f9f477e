"""The size of the KV cache: how many blocks are allocated."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.plugins import ConfigError, EngineConfig, WorkerInfo
from hardpoint.plugins.cache_memory import CacheMemory


@dataclass(frozen=True)
class CacheSize:
    """The size of the KV cache.

    Attributes:
        max_model_len: the longest request; smaller than the model's only where the configuration
            is "auto".
        num_states: how many of the blocks are states.
    """

    num_blocks: int
    max_model_len: int
    num_states: int = 0


def size_cache(config: EngineConfig, max_model_len: int, info: WorkerInfo) -> CacheSize:
    """Return the number of blocks to allocate, and the context that fits.

    Raises:
        ConfigError: one request of full length would not fit; names the length that would.
    """
    memory = CacheMemory.of_rank(config, info, max_model_len)
    fitting, path, limit = _room(config, memory, info)
    longest = memory.longest(fitting)
    if longest == max_model_len or (config.max_model_len == "auto" and longest > 0):
        return CacheSize(fitting, longest, memory.num_states(fitting))
    fits = f"a max_model_len of {longest} would fit"
    needed = memory.needs.of(max_model_len) + memory.needs.num_null_blocks
    blocks = f"{needed} blocks ({memory.of(max_model_len)} bytes) of KV cache"
    raise ConfigError(
        f"{path}: one request of {max_model_len} tokens needs {blocks}, more than {limit}; "
        f"{fits if longest else 'not even one block fits'}"
    )


def _room(config: EngineConfig, memory: CacheMemory, info: WorkerInfo) -> tuple[int, str, str]:
    cache = config.kv_cache
    if cache.num_blocks is not None:
        path = "kv_cache.num_blocks"
        return cache.num_blocks, path, f"{path} = {cache.num_blocks}"
    if not info.has_cache:  # blocks without content take no memory
        return memory.enough(), "max_model_len", "nothing"
    if cache.memory_bytes is not None:
        path = "kv_cache.memory_bytes"
        fitting = memory.num_blocks(cache.memory_bytes)
        return fitting, path, f"{path} = {cache.memory_bytes}"
    share = cache.memory_fraction or info.cache_share
    fitting = min(memory.num_blocks(int(info.available_bytes * share)), memory.enough())
    return (
        fitting,
        "max_model_len" if cache.memory_fraction is None else "kv_cache.memory_fraction",
        f"{share:.0%} of the {info.available_bytes} bytes that are available",
    )
