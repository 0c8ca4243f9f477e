"""The KV cache as schedulers see it, what evicts its blocks, and what is told of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from .component import Component, Context
from .request import Request
from .stats import PrefixCacheStats

__all__ = [
    "AllBlocksCleared",
    "BlockIds",
    "BlockRemoved",
    "BlockStored",
    "CachedBlock",
    "CachedPrefix",
    "EvictionContext",
    "EvictionPolicy",
    "KVCacheGroup",
    "KVCacheManager",
    "KVEvent",
    "KVEventBatch",
    "KVEventPublisher",
    "PublisherContext",
]

BlockIds = Sequence[Sequence[int]]
"""Block ids of a request, one sequence per group; empty where there are none at all."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Attention layers that share a block table.

    Attributes:
        window: their tokens see so many tokens, themselves included; None is all before them.
        layers: indices of the layers.
    """

    window: int | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The leading part of a request that the cache has. Not held until `admit`.

    Attributes:
        num_tokens: a multiple of the block size, and less than the request has.
        block_ids: per group; the null block stands where a window sees nothing.
    """

    num_tokens: int = 0
    block_ids: BlockIds = ()


class KVCacheManager(Protocol):
    """Hands out cache blocks. A block is free, or held by one or more requests.

    Every group has its own table of blocks of the same size, all from one pool. A block whose
    tokens are all computed can be found by other requests, also after nobody holds it, until
    its place is needed.
    """

    block_size: int
    num_blocks: int

    @property
    def groups(self) -> Sequence[KVCacheGroup]:
        """The layers, by what they see."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached content included."""

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a request of so many tokens ever holds, all groups."""

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""

    def lookup(self, request: Request) -> CachedPrefix:
        """Return what the cache has of a request, leaving at least one token to compute.

        Requests that want log-probabilities of their prompt find nothing.
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
        """Give a request that holds nothing its first blocks: `prefix`, then new ones.

        The statistics count the lookup that it came of, if there were enough.

        Args:
            request: `num_computed_tokens` is not read.
            prefix: of `lookup`, with nothing done to the cache since; or an empty one.
            num_new_tokens: to be computed in this step.
            num_external_tokens: after `prefix`, to be loaded from elsewhere.
            num_lookahead_tokens: blocks for so many more tokens.
            num_reserved_blocks: must stay free afterwards.
            delay_caching: nobody may find the new blocks before `cache_arrived`.

        Returns:
            Whether there were enough; if not, nothing changed.
        """

    def extend(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> BlockIds | None:
        """Extend a request's blocks to hold `num_new_tokens` more than are computed.

        Returns:
            The new blocks per group, `()` if it needs none, or None if there are not enough;
            then nothing changed.
        """

    def cache_arrived(self, request: Request, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a request admitted with `delay_caching` are there."""

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Note that what a request holds from position `num_tokens` on is not what it should be.

        Its blocks stay with it and will be written again; nobody finds them before.

        Raises:
            ValueError: a window has passed blocks that it would need again; free it instead.
        """

    def discard(self, block_ids: Iterable[int]) -> None:
        """Note that the content of these blocks is wrong: nobody finds them any more."""

    def free(self, request: Request) -> None:
        """Give back all of a request's blocks, the last one first."""

    def block_ids(self, request: Request) -> BlockIds:
        """Return a request's blocks in order, one list per group."""

    def reset(self) -> None:
        """Forget cached content. Requests keep their blocks, but store nothing until readmitted."""

    def take_events(self) -> list[KVEvent]:
        """Return what happened since the last call; empty unless events are on."""

    def stats(self) -> PrefixCacheStats:
        """Return totals since the start."""


class CachedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block whose content is cached, as an eviction policy sees it.

    Attributes:
        block_id: its number.
        depth: its position in the sequence, in blocks from the start.
    """

    block_id: int
    depth: int


class EvictionContext(Context["EvictionPolicy"]):
    """What an eviction policy is built with."""


class EvictionPolicy(Component):
    """Chooses which cached content goes when a block is needed and no empty one is left.

    It sees candidates only: cached blocks that nobody holds. Where a method raises, or names a
    block that is no candidate, the least recently released one goes, and `LLM.health()` counts it.
    """

    context: EvictionContext

    @abstractmethod
    def released(self, blocks: Sequence[CachedBlock]) -> None:
        """Take new candidates, in the order in which they should go, other things being equal."""

    @abstractmethod
    def taken(self, block_ids: Sequence[int]) -> None:
        """Forget candidates: a request found their content, or it was thrown away."""

    @abstractmethod
    def evict(self, count: int) -> Sequence[int]:
        """Choose `count` different candidates and forget them; there are at least so many."""


class BlockStored(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Consecutive blocks can be found from now on.

    Attributes:
        block_hashes: of each block; chained, so one hash stands for all tokens up to its end.
        parent_hash: of the block before them; None at the beginning.
        token_ids: of all these blocks.
        block_size: tokens of a block.
        lora: name of the adapter.
        group: index of the group.
    """

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora: str | None = None
    group: int = 0


class BlockRemoved(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Blocks can be found no more."""

    block_hashes: list[bytes]
    group: int = 0


class AllBlocksCleared(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """No block can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step.

    Attributes:
        timestamp: wall-clock time in seconds since 1970.
        data_parallel_rank: of the engine.
    """

    timestamp: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class PublisherContext(Context["KVEventPublisher"]):
    """What a KV event publisher is built with.

    Attributes:
        data_parallel_rank: of the engine.
    """

    data_parallel_rank: int = 0


class KVEventPublisher(Component):
    """Tells others what the KV cache holds, a router for example. May not block."""

    context: PublisherContext

    @abstractmethod
    def publish(self, batch: KVEventBatch) -> None:
        """Take the events of a step; never empty."""
