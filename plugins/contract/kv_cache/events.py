"""KV cache events and their publishers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import msgspec

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import notifies

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVEvent",
    "KVEventBatch",
    "KVEventPublisher",
    "PublisherContext",
]


class BlockStored(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Consecutive blocks were cached, or stored in a tier of a KV connector.

    Of blocks in a tier, which may be in any order, only the hashes are known: they have no parent
    and no tokens.

    Attributes:
        block_hashes: hash of each block; chained, so a hash identifies all tokens up to its end.
        parent_hash: hash of the block before them; None for the first block.
        token_ids: token ids of all these blocks.
        block_size: tokens per block.
        lora: name of the adapter.
        group: index of the group.
        medium: name of the tier, a store for example; None is the KV cache itself.
    """

    block_hashes: list[bytes]
    parent_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora: str | None = None
    group: int = 0
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Blocks were dropped.

    Attributes:
        medium: as for `BlockStored`.
    """

    block_hashes: list[bytes]
    group: int = 0
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All blocks of the KV cache were dropped; the blocks of other tiers remain."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step.

    Attributes:
        timestamp: wall-clock time in seconds since 1970.
        data_parallel_rank: data-parallel rank of the engine.
    """

    timestamp: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class PublisherContext(Context["KVEventPublisher"]):
    """Context of a KV event publisher.

    Attributes:
        data_parallel_rank: data-parallel rank of the engine.
    """

    data_parallel_rank: int = 0


class KVEventPublisher(Component):
    """Publishes KV cache events, to a router for example. Must not block.

    A subscriber that keeps up gets every batch, once and in order. `close` releases the
    constructor's resources; a second call must do no harm.
    """

    context: PublisherContext

    @notifies
    @abstractmethod
    def publish(self, batch: KVEventBatch) -> None:
        """Publish the events of a step; there is at least one."""

    @notifies
    def close(self) -> None:
        """Release resources; a second call must do no harm."""
