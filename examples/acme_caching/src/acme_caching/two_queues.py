"""2Q: a queue of recent blocks, and a queue of blocks that came back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hardpoint import plugins
from hardpoint.plugins import Annotated, EvictionContext, EvictionPolicy, Meta


class TwoQueues(EvictionPolicy):
    """Keeps blocks that are used again after they were evicted, whatever else passes through.

    A block enters the queue `recent`. When it is evicted from there, its hash is remembered; if it
    is cached again while it is remembered, it enters the queue `main`, in order of last use.

    Source: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
    Algorithm", VLDB 1994. Its A1in, A1out and Am are `recent`, `remembered` and `main`; here
    A1in is in the order of release, as blocks cannot be evicted while they are in use.
    """

    contract = 2

    class Options(plugins.Options):
        """Shares of the number of blocks: `recent` is kept of the queue, `remembered` of hashes."""

        recent: Annotated[float, Meta(ge=0, le=1)] = 0.25
        remembered: Annotated[float, Meta(ge=0, le=4)] = 0.5

    def __init__(self, context: EvictionContext) -> None:
        """Create a policy without candidates."""
        super().__init__(context)
        self._blocks = context.blocks
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._remembered: OrderedDict[bytes | None, None] = OrderedDict()
        self._of_main: dict[int, bytes | None] = {}  # by block, the hash that it entered main with

    def released(self, block_ids: Sequence[int]) -> None:
        """Add candidates: to main if they are remembered, or were there before."""
        for block in block_ids:
            key = self._blocks.hash(block)
            if key in self._remembered:
                del self._remembered[key]
                self._of_main[block] = key
            if block in self._of_main and self._of_main[block] == key:
                self._main[block] = None
            else:
                self._of_main.pop(block, None)  # it was of other content
                self._recent[block] = None

    def taken(self, block_ids: Sequence[int]) -> None:
        """Remove candidates."""
        for block in block_ids:
            del (self._main if block in self._main else self._recent)[block]

    def dropped(self, block_ids: Sequence[int]) -> None:
        """Remove candidates without content."""
        self.taken(block_ids)
        for block in block_ids:
            self._of_main.pop(block, None)

    def evict(self, count: int) -> Sequence[int]:
        """Remove and return candidates, from main only when few recent ones are left."""
        return [self._evict_one() for _ in range(count)]

    def _evict_one(self) -> int:
        size = self._blocks.num_blocks
        if self._main and len(self._recent) <= self.options.recent * size:
            block = self._main.popitem(last=False)[0]
            self._of_main.pop(block)
            return block
        block = self._recent.popitem(last=False)[0]
        self._remembered[self._blocks.hash(block)] = None
        while len(self._remembered) > self.options.remembered * size:
            self._remembered.popitem(last=False)
        return block
