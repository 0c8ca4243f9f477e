"""The built-in eviction policy, lru."""

from __future__ import annotations

import heapq
import itertools
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
        self._retained: OrderedDict[int, int] = OrderedDict()  # found to be so, with a number each
        self._ends: list[tuple[float, int, int]] = []  # a heap: deadline, number, block
        self._numbers = itertools.count()
        self._num_evicted = 0  # since all deadlines were read

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
        self._num_evicted += count
        chosen = self._pop_expired(count, now)
        while self._order and len(chosen) < count:
            block = self._order.popitem(last=False)[0]
            if (deadline := until(block)) > now:
                number = self._retained[block] = next(self._numbers)
                heapq.heappush(self._ends, (deadline, number, block))
            else:
                chosen.append(block)
        if len(chosen) < count and self._num_evicted >= len(self._retained):
            self._read_deadlines()
            chosen += self._pop_expired(count - len(chosen), now)
        while len(chosen) < count:
            chosen.append(self._retained.popitem(last=False)[0])
        if len(self._ends) > 2 * len(self._retained) + 64:  # most were taken
            self._read_deadlines()
        return chosen

    def _pop_expired(self, count: int, now: float) -> list[int]:
        """Remove and return up to `count` retained candidates after their deadline."""
        expired: list[int] = []
        while self._ends and self._ends[0][0] <= now and len(expired) < count:
            _, number, block = heapq.heappop(self._ends)
            if self._retained.get(block) != number:  # taken since
                continue
            if (deadline := self.context.blocks.retained_until(block)) > now:
                heapq.heappush(self._ends, (deadline, number, block))
            else:
                del self._retained[block]
                expired.append(block)
        return expired

    def _read_deadlines(self) -> None:
        """Read all deadlines, as some may be earlier now: once per as many evicted blocks."""
        until = self.context.blocks.retained_until
        self._ends = [(until(block), number, block) for block, number in self._retained.items()]
        heapq.heapify(self._ends)
        self._num_evicted = 0
