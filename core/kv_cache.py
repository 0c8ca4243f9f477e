"""The paged KV cache: a pool of blocks, and who holds which."""

from __future__ import annotations

from hardpoint.plugins import ConfigError, EngineConfig, Request, WorkerInfo

__all__ = ["BlockManager", "size_cache"]


class BlockManager:
    """Hands out blocks of `block_size` tokens. A block is free or held by one request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with every block free."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Extend a request's blocks to hold `num_new_tokens` more than are computed.

        Returns:
            The ids of the new blocks, or None if there are not enough; then nothing changed.
        """
        held = self._held.get(request.request_id, [])
        tokens = request.num_computed_tokens + num_new_tokens
        wanted = -(-tokens // self.block_size) - len(held)
        if wanted > len(self._free):
            return None
        new = [self._free.pop() for _ in range(wanted)]
        self._held[request.request_id] = held + new if held else new
        return list(new)

    def free(self, request: Request) -> None:
        """Give back all of a request's blocks."""
        self._free.extend(reversed(self._held.pop(request.request_id, [])))

    def block_ids(self, request: Request) -> list[int]:
        """Return a request's blocks in order."""
        return list(self._held.get(request.request_id, []))


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
