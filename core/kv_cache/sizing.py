"""How many blocks the KV cache gets."""

from __future__ import annotations

from hardpoint.plugins import ConfigError, EngineConfig, WorkerInfo

__all__ = ["size_cache"]

_SHARE = 0.4  # of available memory, where the configuration gives no size


def size_cache(config: EngineConfig, max_model_len: int, info: WorkerInfo) -> int:
    """Return the number of blocks to allocate.

    Raises:
        ConfigError: one request of full length would not fit; names the length that would.
    """
    cache = config.kv_cache
    per_request = -(-max_model_len // cache.block_size)
    if cache.memory_bytes is not None:
        fitting = cache.memory_bytes // info.bytes_per_block
        limit = f"kv_cache.memory_bytes = {cache.memory_bytes}"
    else:
        available = int(info.available_bytes * _SHARE)
        fitting = min(
            available // info.bytes_per_block, per_request * config.scheduler.max_num_seqs
        )
        limit = f"{_SHARE:.0%} of the {info.available_bytes} bytes that are available"
    if fitting < per_request:
        needed = per_request * info.bytes_per_block
        path = "max_model_len" if cache.memory_bytes is None else "kv_cache.memory_bytes"
        fits = f"a max_model_len of {fitting * cache.block_size} would fit"
        raise ConfigError(
            f"{path}: one request of {max_model_len} tokens needs {needed} bytes of KV cache, more "
            f"than {limit}; {fits if fitting else 'not even one block fits'}"
        )
    return fitting
