"""ARC: balances recent use against frequent use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hardpoint.plugins import EvictionContext, EvictionPolicy


class AdaptiveReplacement(EvictionPolicy):
    """Divides the cache between blocks that were used once and blocks that were used again.

    The hashes of evicted blocks are remembered. One that comes back shows which of the two parts
    was too small; that part then grows.

    Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Its
    T1, T2, B1, B2 and p are `once`, `again`, their `ghosts` and `target`; blocks in use are in no
    list, and a ghost counts when its block is released.
    """

    contract = 2

    def __init__(self, context: EvictionContext) -> None:
        """Create a policy without candidates."""
        super().__init__(context)
        self._blocks = context.blocks
        self._hits = context.history().hits
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[bytes | None, None] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes | None, None] = OrderedDict()
        self._target = 0.0

    def released(self, block_ids: Sequence[int]) -> None:
        """Add candidates, and adapt the target where one was evicted before."""
        for block in block_ids:
            key, once, again = self._blocks.hash(block), self._once_ghosts, self._again_ghosts
            came_back = key in once or key in again
            if key in once:
                change = max(1.0, len(again) / len(once))
                self._target = min(self._target + change, self._blocks.num_blocks)
                del once[key]
            elif key in again:
                self._target = max(self._target - max(1.0, len(once) / len(again)), 0.0)
                del again[key]
            queue = self._again if came_back or self._hits(block) else self._once
            queue[block] = None

    def taken(self, block_ids: Sequence[int]) -> None:
        """Remove candidates."""
        for block in block_ids:
            del (self._once if block in self._once else self._again)[block]

    dropped = taken

    def evict(self, count: int) -> Sequence[int]:
        """Remove and return candidates, so that `once` comes to its target."""
        return [self._evict_one() for _ in range(count)]

    def _evict_one(self) -> int:
        size = self._blocks.num_blocks
        from_once = self._once and (len(self._once) > self._target or not self._again)
        queue, ghosts = (
            (self._once, self._once_ghosts) if from_once else (self._again, self._again_ghosts)
        )
        block = queue.popitem(last=False)[0]
        ghosts[self._blocks.hash(block)] = None
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > size:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._again_ghosts) > size:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)
        return block
