"""The size of the KV cache: how many blocks are allocated."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.plugins import ConfigError, EngineConfig, WorkerInfo
from hardpoint.plugins.executor import max_step_tokens
from hardpoint.plugins.kv_cache import BlockNeeds, KVCacheGroup


@dataclass(frozen=True)
class CacheSize:
    """The size of the KV cache.

    Attributes:
        max_model_len: the longest request; smaller than the model's only where the configuration
            is "auto".
    """

    num_blocks: int
    max_model_len: int


def size_cache(config: EngineConfig, max_model_len: int, info: WorkerInfo) -> CacheSize:
    """Return the number of blocks to allocate, and the context that fits.

    Raises:
        ConfigError: one request of full length would not fit; names the length that would.
    """
    needs = block_needs(config, info)
    needed = needs.of(max_model_len) + needs.num_null_blocks
    fitting, path, limit = _room(config, needs, max_model_len, info)
    if fitting >= needed:
        return CacheSize(fitting, max_model_len)
    longest = needs.longest(fitting, max_model_len)
    if config.max_model_len == "auto" and longest > 0:
        return CacheSize(fitting, longest)
    fits = f"a max_model_len of {longest} would fit"
    blocks = f"{needed} blocks ({needed * info.bytes_per_block} bytes) of KV cache"
    raise ConfigError(
        f"{path}: one request of {max_model_len} tokens needs {blocks}, more than {limit}; "
        f"{fits if longest else 'not even one block fits'}"
    )


def block_needs(config: EngineConfig, info: WorkerInfo) -> BlockNeeds:
    """Return the cache needs of requests, for the groups of a worker."""
    groups = [KVCacheGroup(window) for window in info.windows]
    return BlockNeeds(groups, config.kv_cache.block_size, max_step_tokens(config))


def _room(
    config: EngineConfig, needs: BlockNeeds, max_model_len: int, info: WorkerInfo
) -> tuple[int, str, str]:
    """Return the limit on the number of blocks, the path that sets it, and its description."""
    cache = config.kv_cache
    enough = needs.of(max_model_len) * config.scheduler.max_num_seqs + needs.num_null_blocks
    if cache.num_blocks is not None:
        path = "kv_cache.num_blocks"
        return cache.num_blocks, path, f"{path} = {cache.num_blocks}"
    if not info.bytes_per_block:  # blocks without content take no memory
        return enough, "max_model_len", "nothing"
    if cache.memory_bytes is not None:
        path = "kv_cache.memory_bytes"
        fitting = cache.memory_bytes // info.bytes_per_block
        return fitting, path, f"{path} = {cache.memory_bytes}"
    share = cache.memory_fraction or info.cache_share
    fitting = min(
        int(info.available_bytes * share) // info.bytes_per_block,
        enough,
    )
    return (
        fitting,
        "max_model_len" if cache.memory_fraction is None else "kv_cache.memory_fraction",
        f"{share:.0%} of the {info.available_bytes} bytes that are available",
    )
