"""Eviction policies of the KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import BLOCK_IDS, RELEASE_ORDER, notifies, returns

__all__ = [
    "EvictionContext",
    "EvictionPolicy",
]


class CachedBlocks(Protocol):
    """The blocks of the KV cache, by block id, as an eviction policy sees them.

    Block ids are used again for other content: identify content that may be gone
    by its hash. Every method takes constant time.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use; 0 in the constructor, as the cache is sized later."""

    def hash(self, block_id: int) -> bytes | None:
        """Return the hash of a block's content, which is chained: it identifies all tokens before.

        It is the hash in KV cache events; in groups after the first, the group's index follows as
        two bytes. None if the block has no cached content.
        """

    def depth(self, block_id: int) -> int:
        """Return a cached block's position in its chain, in blocks from the start."""

    def retained_until(self, block_id: int) -> float:
        """Return until when a request wishes that a block is kept, on the context's clock.

        0 is no wish. It may change while the block is a candidate. It binds no policy: where all
        candidates are retained, some of them are evicted.
        """


class BlockHistory(Protocol):
    """History of cached blocks, by block id, for a policy that asks for it.

    It is of a block's present content, and is valid while `CachedBlocks.hash` is not None. Every
    method takes constant time.
    """

    def parent_hash(self, block_id: int) -> bytes | None:
        """Return the hash of the block before it in its chain; None for the first."""

    def num_children(self, block_id: int) -> int:
        """Return the number of cached blocks with this parent, in use or not."""

    def hits(self, block_id: int) -> int:
        """Return how many requests found it since it was cached, also while others used it."""

    def last_use(self, block_id: int) -> float:
        """Return when it was last cached, found or released, on the context's clock."""


@dataclass
class RetainedBlocks:
    """Cached content that requests wish to be kept, by its hash, as `block_hashes` returns it.

    A step part writes `deadlines`; eviction policies see them by `CachedBlocks.retained_until`.

    Attributes:
        deadlines: until when, on the engine's clock.
        num_blocks: blocks that requests can use; 0 until the KV cache is sized.
        num_hits: number of times that requests found a block that no other request used.
        num_evicted: how many were evicted before their deadline.
        lost: blocks with content that was evicted or dropped, since the part emptied the list; they
            have no deadline any more.
    """

    deadlines: dict[bytes, float] = field(default_factory=dict)
    num_blocks: int = 0
    num_hits: int = 0
    num_evicted: int = 0
    lost: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class EvictionContext(Context["EvictionPolicy"]):
    """Context of an eviction policy.

    Attributes:
        blocks: data about each block that costs nothing.
        history: returns further data about each block, from this call on; call it in the
            constructor, only if it is needed, since keeping it takes time per block.
        clock: the engine's, in seconds.
    """

    blocks: CachedBlocks
    history: Callable[[], BlockHistory]
    clock: Callable[[], float]


class EvictionPolicy(Component):
    """Chooses the cached content to discard when no empty block is left.

    It decides among the candidates: cached blocks that no request uses. If a method raises, or
    `evict` returns a block that is not a candidate, the least recently released one is evicted and
    `LLM.plugins.health()` counts the fault.
    """

    context: EvictionContext

    @notifies
    @abstractmethod
    def released(self, block_ids: Sequence[int]) -> None:
        """Add candidates, in the order in which to evict them, other things being equal."""

    @notifies
    @abstractmethod
    def taken(self, block_ids: Sequence[int]) -> None:
        """Remove candidates that a request found and uses: these are hits.

        Hits on blocks that other requests use already are not among them; `BlockHistory.hits`
        counts all.
        """

    @notifies
    @abstractmethod
    def dropped(self, block_ids: Sequence[int]) -> None:
        """Remove candidates with discarded content; these are not hits.

        The cache is reset, their content is wrong, or they are evicted in this policy's place. A
        policy that treats this as `taken` sets `dropped = taken`. Values of `context.blocks` and
        the history about them are valid until this returns.
        """

    @returns(BLOCK_IDS, otherwise=RELEASE_ORDER)
    @abstractmethod
    def evict(self, count: int) -> Sequence[int]:
        """Remove and return `count` different candidates; there are at least as many.

        Values of `context.blocks` and the history about them are valid until this returns.
        """
