"""Metadata of the content of each block, and the view of it that eviction policies get."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from hardpoint.plugins.kv_cache import RetainedBlocks


class BlockMetadata:
    """Hash, group and depth of each block; implements `CachedBlocks` of the contract.

    It is created before the size of the cache is known, for the context of the eviction policy. The
    pool allocates it, and writes its lists.

    Attributes:
        num_blocks: number of blocks that requests can use.
        hashes: by block id; None without cached content.
        groups, depths: by block id, of the cached content.
        history: None unless the eviction policy asked for it.
        retained: content that requests wish to be kept.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Describe no block yet; `clock` is in seconds."""
        self.clock = clock
        self.retained = RetainedBlocks()
        self.num_blocks = 0
        self.hashes: list[bytes | None] = []
        self.groups = array("i")
        self.depths = array("i")
        self.history: CachedBlockHistory | None = None
        self._allocated = False

    def allocate(self, num_blocks: int, num_usable: int, num_groups: int) -> None:
        """Describe `num_blocks` blocks without content."""
        self._allocated = True
        self.num_blocks = self.retained.num_blocks = num_usable
        self.hashes = [None] * num_blocks
        self.groups = array("i", bytes(4 * num_blocks))
        self.depths = array("i", bytes(4 * num_blocks))
        if self.history is not None:
            self.history.allocate(num_blocks, num_groups)

    def start_history(self) -> CachedBlockHistory:
        """Return the history, which is kept from now on.

        Raises:
            RuntimeError: blocks may be cached already, whose history is not known.
        """
        if self.history is None:
            if self._allocated:
                raise RuntimeError(
                    "the history of blocks was not kept so far; call context.history() in the "
                    "constructor"
                )
            self.history = CachedBlockHistory(self)
        return self.history

    def hash(self, block_id: int) -> bytes | None:
        """Return the hash of a block's content, distinct in each group."""
        return self.qualified(self.hashes[block_id], block_id)

    def qualified(self, key: bytes | None, block_id: int) -> bytes | None:
        """Return a hash as policies see it, in the group of a block."""
        group = self.groups[block_id]
        return key + group.to_bytes(2, "big") if group and key is not None else key

    def depth(self, block_id: int) -> int:
        """Return a cached block's position in its chain."""
        return self.depths[block_id]

    def retained_until(self, block_id: int) -> float:
        """Return until when a cached block is to be kept; 0 without a wish."""
        key = self.hashes[block_id]
        return 0.0 if key is None else self.retained.deadlines.get(key, 0.0)


class CachedBlockHistory:
    """Parents, children and uses of cached blocks; implements `BlockHistory` of the contract."""

    def __init__(self, metadata: BlockMetadata) -> None:
        self._metadata = metadata
        self._clock = metadata.clock
        self._parents: list[bytes | None] = []
        self._num_children: list[dict[bytes, int]] = []  # per group, by the parent's hash
        self._hits: list[int] = []
        self._last_use: list[float] = []

    def allocate(self, num_blocks: int, num_groups: int) -> None:
        """Know `num_blocks` blocks without content."""
        self._parents = [None] * num_blocks
        self._num_children = [{} for _ in range(num_groups)]
        self._hits = [0] * num_blocks
        self._last_use = [0.0] * num_blocks

    def parent_hash(self, block_id: int) -> bytes | None:
        """Return the hash of the block before it."""
        return self._metadata.qualified(self._parents[block_id], block_id)

    def num_children(self, block_id: int) -> int:
        """Return the number of cached blocks that follow it."""
        key = self._metadata.hashes[block_id]
        if key is None:
            return 0
        return self._num_children[self._metadata.groups[block_id]].get(key, 0)

    def hits(self, block_id: int) -> int:
        """Return how often it was found since it was cached."""
        return self._hits[block_id]

    def last_use(self, block_id: int) -> float:
        """Return when it was last cached, found or released."""
        return self._last_use[block_id]

    def cached(
        self, group: int, table: Sequence[int], hashes: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        """Record the blocks at some positions of a table as cached."""
        now, children = self._clock(), self._num_children[group]
        for position in positions:
            block = table[position]
            parent = hashes[position - 1] if position else None
            self._parents[block] = parent
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
            self._hits[block] = 0
            self._last_use[block] = now

    def found(self, block_ids: Sequence[int]) -> None:
        """Record a hit of each block."""
        now = self._clock()
        for block in block_ids:
            self._hits[block] += 1
            self._last_use[block] = now

    def released(self, block_ids: Sequence[int]) -> None:
        """Record that a request used these blocks until now."""
        now = self._clock()
        for block in block_ids:
            self._last_use[block] = now

    def uncached(self, block_ids: Sequence[int]) -> None:
        """Record that the content of cached blocks is gone."""
        for block in block_ids:
            parent = self._parents[block]
            if parent is not None:
                children = self._num_children[self._metadata.groups[block]]
                children[parent] -= 1
                if not children[parent]:
                    del children[parent]
