"""Eviction policies: which cached content makes room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hardpoint.plugins import CachedBlock, EvictionContext, EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """What was released longest ago goes first. Every move takes constant time per block."""

    contract = 1

    def __init__(self, context: EvictionContext) -> None:
        """Begin with no candidates."""
        super().__init__(context)
        # A plain dict would search its whole front for the first key after many were removed.
        self._order: OrderedDict[int, None] = OrderedDict()

    def released(self, blocks: Sequence[CachedBlock]) -> None:
        """Put new candidates at the end."""
        order = self._order
        for block in blocks:
            order[block.block_id] = None

    def taken(self, block_ids: Sequence[int]) -> None:
        """Forget candidates."""
        for block in block_ids:
            del self._order[block]

    def evict(self, count: int) -> Sequence[int]:
        """Take the first ones."""
        return [self._order.popitem(last=False)[0] for _ in range(count)]
