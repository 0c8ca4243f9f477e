"""Sizes and layout of a rank's KV cache: blocks of keys and values, and blocks of states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hardpoint.plugins.config.engine import EngineConfig
from hardpoint.plugins.process.executor import WorkerInfo, max_step_tokens

from .manager import BlockNeeds, KVCacheGroup

_STATES_PER_REQUEST = 4
"""One more than a request holds at most; while it generates, it holds two. Others are kept."""


@dataclass(frozen=True)
class CacheMemory:
    """The blocks of a KV cache and their sizes in bytes.

    All blocks have ids of one range. The last ones are states, which have memory of their own: as
    much as keys and values, until there are four for each request.

    Attributes:
        needs: requirements of requests, in blocks.
        bytes_per_block: keys and values of a block, in all caches.
        max_model_len: the longest request.
        bytes_per_state: a state, all layers together.
        max_num_seqs: most requests in a step.
        fits_longest: whether blocks for the longest request come before further states.
    """

    needs: BlockNeeds
    bytes_per_block: int
    max_model_len: int
    bytes_per_state: int = 0
    max_num_seqs: int = 1
    fits_longest: bool = True

    @classmethod
    def of_rank(cls, config: EngineConfig, info: WorkerInfo, max_model_len: int) -> CacheMemory:
        """Return the memory of a rank's cache, for requests of at most `max_model_len` tokens."""
        return cls(
            block_needs(config, info),
            info.bytes_per_block,
            max_model_len,
            info.bytes_per_state,
            config.scheduler.max_num_seqs,
            fits_longest=config.max_model_len != "auto",
        )

    def num_states(self, num_blocks: int) -> int:
        """Return how many of so many blocks are states."""
        if not (least := self.needs.states_of(self.max_model_len)):
            return 0
        if all(group.has_states for group in self.needs.groups):
            return num_blocks - self.needs.num_null_blocks
        equal = num_blocks * self.bytes_per_block // (self.bytes_per_block + self.bytes_per_state)
        states = min(equal, _STATES_PER_REQUEST * self.max_num_seqs)
        if self.fits_longest:
            states = min(states, num_blocks - self._num_key_blocks(self.max_model_len))
        return max(states, least)

    def size(self, num_blocks: int) -> int:
        """Return the bytes of so many blocks."""
        states = self.num_states(num_blocks)
        return max(num_blocks - states, 0) * self.bytes_per_block + states * self.bytes_per_state

    def num_blocks(self, num_bytes: int) -> int:
        """Return how many blocks so many bytes have room for; a block takes memory."""
        smallest = min(size for size in (self.bytes_per_block, self.bytes_per_state) if size)
        counts = range(num_bytes // smallest + 2)  # the blocks of no request may take no memory
        return max(bisect_right(counts, num_bytes, key=self.size) - 1, 0)

    def enough(self) -> int:
        """Return the blocks with which `max_num_seqs` longest requests need not wait."""
        needs = self.needs
        return needs.of(self.max_model_len) * self.max_num_seqs + needs.num_null_blocks

    def of(self, num_tokens: int) -> int:
        """Return the bytes that a request of `num_tokens` tokens needs."""
        states = self.needs.states_of(num_tokens) * self.bytes_per_state
        return self._num_key_blocks(num_tokens) * self.bytes_per_block + states

    def longest(self, num_blocks: int) -> int:
        """Return the length of the longest request that so many blocks have room for."""
        return self.needs.longest(num_blocks, self.max_model_len, self.num_states(num_blocks))

    def longest_in(self, num_bytes: int) -> int:
        """Return the length of the longest request that so many bytes have room for."""
        if not self.bytes_per_block and not self.bytes_per_state:
            return self.max_model_len
        return self.longest(self.num_blocks(num_bytes))

    def _num_key_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of a request besides states, including the null block."""
        needs = self.needs
        return needs.of(num_tokens) - needs.states_of(num_tokens) + needs.num_null_blocks


def block_needs(config: EngineConfig, info: WorkerInfo) -> BlockNeeds:
    """Return the cache needs of requests, for the groups of a worker."""
    last = len(info.windows) - 1 if info.has_states else None
    groups = [
        KVCacheGroup(window, has_states=index == last) for index, window in enumerate(info.windows)
    ]
    return BlockNeeds(groups, config.kv_cache.block_size, max_step_tokens(config))


def tightest(infos: Sequence[WorkerInfo], memory_bytes: int | None) -> WorkerInfo:
    """Return the info of the rank with the fewest cache blocks; all ranks use that number.

    Args:
        infos: one per rank.
        memory_bytes: configured memory of each cache; None uses the available memory.
    """
    smallest = min(
        infos,
        key=lambda info: (memory_bytes or info.available_bytes) / max(info.bytes_per_block, 1),
    )
    if not smallest.has_states:
        return smallest
    return replace(  # with states, the largest sizes of all ranks fit into the smallest memory
        smallest,
        bytes_per_block=max(info.bytes_per_block for info in infos),
        bytes_per_state=max(info.bytes_per_state for info in infos),
        available_bytes=min(info.available_bytes for info in infos),
    )
