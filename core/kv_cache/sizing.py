"""The size of the KV cache: how many blocks are allocated."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.plugins import ConfigError, EngineConfig, WorkerInfo


@dataclass(frozen=True)
class CacheSize:
    """The size of the KV cache.

    Attributes:
        max_model_len: the longest request; smaller than the model's only where the configuration
            says "auto".
    """

    num_blocks: int
    max_model_len: int


def size_cache(config: EngineConfig, max_model_len: int, info: WorkerInfo) -> CacheSize:
    """Return the number of blocks to allocate, and the context that fits.

    Raises:
        ConfigError: one request of full length would not fit; names the length that would.
    """
    block_size = config.kv_cache.block_size
    per_request = -(-max_model_len // block_size)
    fitting, path, limit = _room(config, per_request, info)
    if fitting >= per_request:
        return CacheSize(fitting, max_model_len)
    if config.max_model_len == "auto" and fitting > 0:
        return CacheSize(fitting, fitting * block_size)
    fits = f"a max_model_len of {fitting * block_size} would fit"
    needed = f"{per_request} blocks ({per_request * info.bytes_per_block} bytes) of KV cache"
    raise ConfigError(
        f"{path}: one request of {max_model_len} tokens needs {needed}, more than {limit}; "
        f"{fits if fitting else 'not even one block fits'}"
    )


def _room(config: EngineConfig, per_request: int, info: WorkerInfo) -> tuple[int, str, str]:
    """Return the limit on the number of blocks, the path that sets it, and its description."""
    cache, enough = config.kv_cache, per_request * config.scheduler.max_num_seqs
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
