"""The KV cache: its layer groups, memory per block, and block manager."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hardpoint.plugins.requests.plan import BlockIds
from hardpoint.plugins.requests.request import Request
from hardpoint.plugins.requests.stats import PrefixCacheStats

from .events import KVEvent

__all__ = [
    "CachedPrefix",
]


STATE_WINDOW = 2
"""Window of a group of layers with states: a token needs the state after the one before it."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Attention layers that share a block table.

    Attributes:
        window: sliding attention window in tokens, the token itself included; None is unlimited.
        layers: indices of the layers that a rank has of it; empty where they do not matter.
        has_states: whether its layers keep states instead of keys and values. A block is then the
            state after the last token that was computed of the block's tokens. A step writes that
            at its end, and that where the block of its last token begins; other blocks that it
            adds are the null block. Its window is `STATE_WINDOW`.
    """

    window: int | None = None
    layers: tuple[int, ...] = ()
    has_states: bool = False

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int | None) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds in this group at once.

        Blocks outside of the window are released before a step allocates new ones.

        Args:
            num_tokens: number of tokens of the request.
            block_size: tokens per block.
            max_step_tokens: most tokens of a request in a step; None is all of them.
        """
        every = -(-num_tokens // block_size)
        if self.has_states:
            return min(every, 3)  # one to continue from, and two that a step writes
        if self.window is None or max_step_tokens is None:
            return every
        held = self.window - 1 + max_step_tokens  # tokens, from the first that is seen
        return min(every, -(-(held - 1) // block_size) + 1)


@dataclass(frozen=True)
class BlockNeeds:
    """The blocks that requests need, all groups together.

    Attributes:
        groups: groups of the cache.
        block_size: tokens per block.
        max_step_tokens: as in `KVCacheGroup.max_blocks`.
    """

    groups: Sequence[KVCacheGroup]
    block_size: int
    max_step_tokens: int | None = None

    @property
    def num_null_blocks(self) -> int:
        """Blocks that no request can use: 1 if there are windows, else 0."""
        return int(any(group.window is not None for group in self.groups))

    def of(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at once."""
        size, step = self.block_size, self.max_step_tokens
        return sum([group.max_blocks(num_tokens, size, step) for group in self.groups])

    def states_of(self, num_tokens: int) -> int:
        """Return how many of the blocks of `of` are states."""
        size, step = self.block_size, self.max_step_tokens
        states = [group for group in self.groups if group.has_states]
        return sum([group.max_blocks(num_tokens, size, step) for group in states])

    def longest(self, num_blocks: int, max_tokens: int, num_states: int = 0) -> int:
        """Return the length of the longest request that `num_blocks` have room for.

        Args:
            num_blocks: the null block included.
            max_tokens: the most to return. Below that, it is a multiple of the block size.
            num_states: how many of the blocks are states.
        """
        keys = num_blocks - num_states - self.num_null_blocks

        def lacking(num_tokens: int) -> int:
            states = self.states_of(num_tokens)
            return max(self.of(num_tokens) - states - keys, states - num_states)

        size = self.block_size
        lengths = range(0, max_tokens + size, size)
        return min(lengths[max(bisect_right(lengths, 0, key=lacking), 1) - 1], max_tokens)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The cached prefix of a request. Its blocks are not referenced until `admit`.

    Attributes:
        num_tokens: a multiple of the block size, less than the request's length.
        block_ids: per group; the null block where a window has passed.
    """

    num_tokens: int = 0
    block_ids: BlockIds = ()


class KVCacheManager(Protocol):
    """Allocates cache blocks. A block is free, or referenced by one or more requests.

    Every group has its own block table. All blocks come from one pool; its last ones are kept for
    states if a group has such; the others are for keys and values, and have one size. A block
    with only computed tokens can be found by other requests until it is evicted, also while no
    request references it.
    """

    block_size: int
    num_blocks: int

    @property
    def groups(self) -> Sequence[KVCacheGroup]:
        """The groups of layers."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request references, including blocks with cached content."""

    @property
    def num_free_states(self) -> int | None:
        """How many of the free blocks are for states; None if no group has states."""

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the maximum number of blocks of a request of this length, all groups together."""

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can use."""

    def lookup(self, request: Request) -> CachedPrefix:
        """Return the cached prefix of a request, leaving at least one token to compute.

        It is empty for requests that ask for prompt log-probabilities, and ends before the first of
        `Request.releases`.
        """

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
        """Allocate the first blocks of a request: the blocks of `prefix`, then new ones.

        If there are enough, the lookup is counted in the statistics.

        Args:
            request: its `num_computed_tokens` is not read.
            prefix: result of `lookup`, with no call in between; or an empty one.
            num_new_tokens: to be computed in this step.
            num_external_tokens: after `prefix`, to be loaded by a KV connector.
            num_lookahead_tokens: additional tokens to allocate blocks for; 0 with states.
            num_reserved_blocks: to remain free afterwards.
            delay_caching: the new blocks cannot be found before `cache_arrived`.

        Returns:
            Whether there were enough blocks; if not, nothing changed.
        """

    def extend(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> BlockIds | None:
        """Extend a request's blocks to hold `num_new_tokens` more than are computed.

        The blocks that `Request.releases` has released for the next token leave the tables first.
        Without lookahead and releases, a single token changes nothing if it is neither the first
        nor the last one of a block: it needs no call.

        Returns:
            The new blocks per group, `()` if it needs none; None, with nothing changed, if there
            are not enough.
        """

    def cache_arrived(self, request: Request, num_tokens: int) -> None:
        """Make the first `num_tokens` of a request admitted with `delay_caching` findable."""

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Invalidate a request's content from position `num_tokens` on.

        The request keeps its blocks, which are written again; they cannot be found before.

        Raises:
            ValueError: a window has passed blocks that would be needed again; free it instead.
        """

    def discard(self, block_ids: Iterable[int]) -> None:
        """Invalidate the content of blocks, so that they cannot be found."""

    def free(self, request: Request) -> None:
        """Release all blocks of a request, the last one first."""

    def block_ids(self, request: Request) -> BlockIds:
        """Return a request's blocks in order, one list per group."""

    def reset(self) -> None:
        """Drop cached content. Requests keep their blocks, but cache nothing until readmitted."""

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call; empty unless events are enabled."""

    def stats(self) -> PrefixCacheStats:
        """Return totals since the start."""
