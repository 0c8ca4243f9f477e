"""The built-in eviction policy, lru."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hardpoint.plugins import EvictionContext, EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the block that was released longest ago, in constant time per block."""

    contract = 2

    def __init__(self, context: EvictionContext) -> None:
        """Create a policy without candidates."""
        super().__init__(context)
        # In a plain dict, finding the first key takes linear time after many were removed.
        self._order: OrderedDict[int, None] = OrderedDict()

    def released(self, block_ids: Sequence[int]) -> None:
        """Append new candidates."""
        for block in block_ids:
            self._order[block] = None

    def taken(self, block_ids: Sequence[int]) -> None:
        """Remove candidates that are in use again."""
        for block in block_ids:
            del self._order[block]

    dropped = taken

    def evict(self, count: int) -> Sequence[int]:
        """Remove and return the `count` oldest candidates."""
        return [self._order.popitem(last=False)[0] for _ in range(count)]
