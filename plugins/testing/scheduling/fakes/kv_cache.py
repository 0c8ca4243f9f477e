"""A KV cache manager that tracks block holders and checks that no block is leaked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hardpoint.plugins import Request
from hardpoint.plugins.kv_cache import BlockIds, CachedPrefix, KVCacheGroup, KVCacheManager, KVEvent
from hardpoint.plugins.requests.stats import PrefixCacheStats
from hardpoint.testing.scheduling.rules import BLOCKS


class MonitoredKVCacheManager:
    """Forwards every call to a KV cache manager, and tracks which requests hold blocks.

    Attributes:
        holders: requests that hold blocks, by id.
        null_blocks: ids of the placeholder blocks for positions outside a window.
    """

    def __init__(self, inner: KVCacheManager) -> None:
        """Wrap `inner`, which must have no allocated blocks."""
        self.inner = inner
        self.block_size = inner.block_size
        self.num_blocks = inner.num_blocks
        self.groups: Sequence[KVCacheGroup] = inner.groups
        self.holders: dict[str, Request] = {}
        self.null_blocks = set(range(inner.num_blocks - inner.num_usable_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self.inner.num_free_blocks

    @property
    def num_free_states(self) -> int | None:
        """Return the number of free blocks that are for states; None if no group has states."""
        return self.inner.num_free_states

    @property
    def num_usable_blocks(self) -> int:
        """Return the number of blocks that requests can hold."""
        return self.inner.num_usable_blocks

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` tokens holds."""
        return self.inner.blocks_needed(num_tokens)

    def lookup(self, request: Request) -> CachedPrefix:
        """Return the cached prefix of a request; check that it consists of whole blocks."""
        prefix = self.inner.lookup(request)
        tokens = prefix.num_tokens
        if tokens % self.block_size or not 0 <= tokens < request.num_tokens:
            raise BLOCKS.violation(
                f"lookup found {tokens} tokens of {request!r}, block_size is {self.block_size}",
                "return a multiple of the block size below the request's number of tokens",
            )
        return prefix

    def admit(
        self,
        request: Request,
        prefix: CachedPrefix,
        num_new_tokens: int,
        *,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        num_reserved_blocks: int = 0,
        delay_caching: bool = False,
    ) -> bool:
        """Allocate a request's first blocks."""
        if request.request_id in self.holders:
            raise BLOCKS.violation(f"admit of {request.request_id!r}, which holds blocks already")
        admitted = self.inner.admit(
            request,
            prefix,
            num_new_tokens,
            num_external_tokens=num_external_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_reserved_blocks=num_reserved_blocks,
            delay_caching=delay_caching,
        )
        if admitted:
            self.holders[request.request_id] = request
            if self.num_free_blocks < num_reserved_blocks:
                raise BLOCKS.violation(
                    f"admit left {self.num_free_blocks} blocks free, {num_reserved_blocks} are "
                    "reserved"
                )
        return admitted

    def extend(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> BlockIds | None:
        """Allocate further blocks for a request."""
        if request.request_id not in self.holders:
            raise BLOCKS.violation(f"extend of {request.request_id!r}, which holds no blocks")
        return self.inner.extend(request, num_new_tokens, num_lookahead_tokens)

    def cache_arrived(self, request: Request, num_tokens: int) -> None:
        """Forward the call."""
        self.inner.cache_arrived(request, num_tokens)

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Forward the call."""
        self.inner.rewind(request, num_tokens)

    def discard(self, block_ids: Iterable[int]) -> None:
        """Forward the call."""
        self.inner.discard(block_ids)

    def free(self, request: Request) -> None:
        """Free all blocks of a request."""
        self.inner.free(request)
        self.holders.pop(request.request_id, None)

    def block_ids(self, request: Request) -> BlockIds:
        """Return a request's blocks in order."""
        return self.inner.block_ids(request)

    def reset(self) -> None:
        """Forward the call."""
        self.inner.reset()

    def take_events(self) -> list[KVEvent]:
        """Forward the call."""
        return self.inner.take_events()

    def stats(self) -> PrefixCacheStats:
        """Forward the call."""
        return self.inner.stats()

    def check_blocks(self) -> None:
        """Check that every block is free or in the table of a request that holds blocks."""
        held: set[int] = set()
        for request in self.holders.values():
            tables = self.inner.block_ids(request)
            for table in tables:
                block_ids = [block for block in table if block not in self.null_blocks]
                if len(set(block_ids)) < len(block_ids):
                    raise BLOCKS.violation(
                        f"{request.request_id!r} has a block twice: {list(table)}"
                    )
                if strange := [b for b in block_ids if not 0 <= b < self.num_blocks]:
                    raise BLOCKS.violation(
                        f"{request.request_id!r} has block {strange[0]} of {self.num_blocks}"
                    )
                held.update(block_ids)
        free, usable = self.num_free_blocks, self.num_usable_blocks
        if len(held) + free != usable:
            raise BLOCKS.violation(
                f"{len(held)} blocks are held by {sorted(self.holders)} and {free} are free, but "
                f"there are {usable}"
            )

    def check_all_free(self) -> None:
        """Check that all blocks are free."""
        if self.holders or self.num_free_blocks != self.num_usable_blocks:
            raise BLOCKS.violation(
                "no request is unfinished, but "
                f"{self.num_usable_blocks - self.num_free_blocks} blocks are still held, by "
                f"{sorted(self.holders)}"
            )
