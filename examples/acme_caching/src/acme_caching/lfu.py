"""Least frequently used, with aging."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hardpoint.plugins import EvictionContext, EvictionPolicy


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the block with the fewest hits since it was cached, ties in the order of release.

    To the hits of a released block the age of the cache is added: the key of the last block that
    was evicted. So blocks that were popular once do not stay for ever.

    Source: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating Content Management Techniques
    for Web Proxy Caches", ACM SIGMETRICS Performance Evaluation Review 27(4), 2000 (LFU-DA).
    """

    contract = 2

    def __init__(self, context: EvictionContext) -> None:
        """Create a policy without candidates."""
        super().__init__(context)
        self._hits = context.history().hits
        self._age = 0
        self._serial = 0
        self._entries: dict[int, tuple[int, int, int]] = {}  # key, serial number, block
        self._heap: list[tuple[int, int, int]] = []  # with entries of blocks taken since

    def released(self, block_ids: Sequence[int]) -> None:
        """Add candidates."""
        for block in block_ids:
            self._serial += 1
            entry = (self._age + self._hits(block), self._serial, block)
            self._entries[block] = entry
            heapq.heappush(self._heap, entry)

    def taken(self, block_ids: Sequence[int]) -> None:
        """Remove candidates."""
        for block in block_ids:
            del self._entries[block]
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    dropped = taken

    def evict(self, count: int) -> Sequence[int]:
        """Remove and return the candidates with the smallest keys."""
        evicted: list[int] = []
        while len(evicted) < count:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                del self._entries[entry[2]]
                self._age = entry[0]
                evicted.append(entry[2])
        return evicted
