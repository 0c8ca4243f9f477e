"""Cached blocks without a cache: the inputs of an eviction policy, for scripted calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hardpoint.testing.scripted import ScriptedClock

_CHAIN = 8
"""Every eighth content begins a chain; each other one follows the content before it."""

_RETAINED = 3
"""Every third content is retained for a while after it was cached."""

_RETAINED_SECONDS = 0.02


class FakeBlocks:
    """Blocks with numbers as contents; implements `CachedBlocks` and `BlockHistory`.

    Attributes:
        num_blocks: number of blocks of the cache.
        contents: by block id, of the cached ones.
        clock: advances with every use.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.contents: dict[int, int] = {}
        self.clock = ScriptedClock(now=100.0)
        self._children: Counter[int] = Counter()
        self._hits: dict[int, int] = {}
        self._last_use: dict[int, float] = {}
        self._building = True
        self._has_history = False

    def context_fields(self) -> dict[str, Any]:
        """Return the fields of an EvictionContext."""
        return {"blocks": self, "history": self._start_history, "clock": self.clock}

    def cache(self, block_id: int, content: int) -> None:
        """Cache content in a block that has none."""
        self._building = False
        self.contents[block_id] = content
        if content % _CHAIN:
            self._children[content - 1] += 1
        self._hits[block_id] = 0
        self.use(block_id)

    def hit(self, block_id: int) -> None:
        """Count a hit."""
        self._hits[block_id] += 1
        self.use(block_id)

    def use(self, block_id: int) -> None:
        """Record a use."""
        self.clock.advance(0.001)
        self._last_use[block_id] = self.clock()

    def uncache(self, block_id: int) -> None:
        """Drop a block's content."""
        content = self.contents.pop(block_id)
        if content % _CHAIN:
            self._children -= Counter([content - 1])  # drops a zero

    def hash(self, block_id: int) -> bytes | None:
        """Return the hash of a block's content."""
        content = self.contents.get(block_id)
        return None if content is None else _hash(content)

    def depth(self, block_id: int) -> int:
        """Return the position of a block's content in its chain."""
        return self.contents[block_id] % _CHAIN

    def retained_until(self, block_id: int) -> float:
        """Return until when a request wishes that a block is kept; the time of its last use counts.

        Of evicted blocks, too, until the call returns.
        """
        content = self.contents.get(block_id, 1)
        return 0.0 if content % _RETAINED else self._last_use[block_id] + _RETAINED_SECONDS

    def parent_hash(self, block_id: int) -> bytes | None:
        """Return the hash of the content before it."""
        content = self.contents[block_id]
        return _hash(content - 1) if content % _CHAIN else None

    def num_children(self, block_id: int) -> int:
        """Return the number of cached blocks that follow it."""
        return self._children[self.contents[block_id]]

    def hits(self, block_id: int) -> int:
        """Return the hits since it was cached."""
        return self._hits[block_id]

    def last_use(self, block_id: int) -> float:
        """Return the time of the last use."""
        return self._last_use[block_id]

    def _start_history(self) -> FakeBlocks:
        if not (self._building or self._has_history):
            raise RuntimeError(
                "the history of blocks was not kept so far; call context.history() in the "
                "constructor"
            )
        self._has_history = True
        return self


def _hash(content: int) -> bytes:
    return content.to_bytes(32, "big")
