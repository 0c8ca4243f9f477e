"""The built-in eviction policy, lru."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hardpoint.plugins import EvictionContext, EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the block that was released longest ago, in constant time per block.

    Retained blocks come last: after their time is over, they are evicted as the others. The other
    ones are evicted only if nothing else is left, in the order of their release.
    """

    contract = 2

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        # In a plain dict, finding the first key takes linear time after many were removed.
        self._order: OrderedDict[int, None] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()  # found to be so when evicting

    def released(self, block_ids: Sequence[int]) -> None:
        """Append new candidates."""
        for block in block_ids:
            self._order[block] = None

    def taken(self, block_ids: Sequence[int]) -> None:
        """Remove candidates that are in use again."""
        for block in block_ids:
            if block in self._order:
                del self._order[block]
            else:
                del self._retained[block]

    dropped = taken

    def evict(self, count: int) -> Sequence[int]:
        """Remove and return `count` candidates, first the oldest ones that are not retained."""
        until, now = self.context.blocks.retained_until, self.context.clock()
        chosen: list[int] = []
        while self._retained and len(chosen) < count:
            oldest = next(iter(self._retained))
            if until(oldest) > now:
                break
            chosen.append(self._retained.popitem(last=False)[0])
        while self._order and len(chosen) < count:
            block = self._order.popitem(last=False)[0]
            if until(block) > now:
                self._retained[block] = None
            else:
                chosen.append(block)
        while len(chosen) < count:
            chosen.append(self._retained.popitem(last=False)[0])
        return chosen
