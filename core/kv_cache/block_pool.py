"""KV block pool: reference counts, free blocks, the prefix-hash index and metadata of blocks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence

from hardpoint.host.boundary.kv_cache import Eviction
from hardpoint.plugins import Request
from hardpoint.plugins.kv_cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    RetainedBlocks,
)


class EventLog:
    """The KV cache events that have not been published yet."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(
        self, request: Request, group: int, hashes: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        """Record blocks of a request that were added to the index.

        Args:
            hashes: hashes of the request's blocks from its first one on.
            positions: positions of the added blocks in its table, ascending.
        """
        start = 0
        for i, position in enumerate(positions):
            if i + 1 < len(positions) and positions[i + 1] == position + 1:
                continue
            self._stored_run(request, group, hashes, positions[start], position + 1)
            start = i + 1

    def _stored_run(
        self, request: Request, group: int, hashes: Sequence[bytes], first: int, end: int
    ) -> None:
        size, lora = self._block_size, request.source.lora
        self._events.append(
            BlockStored(
                block_hashes=list(hashes[first:end]),
                parent_hash=hashes[first - 1] if first else None,
                token_ids=request.token_ids(first * size, end * size),
                block_size=size,
                lora=None if lora is None else lora.name,
                group=group,
            )
        )

    def removed(self, hashes_by_group: Sequence[list[bytes]]) -> None:
        """Record blocks that were removed from the index: their hashes, one list per group."""
        for group, hashes in enumerate(hashes_by_group):
            if hashes:
                self._events.append(BlockRemoved(block_hashes=hashes, group=group))

    def cleared(self) -> None:
        """Record that the index was emptied."""
        self._events.append(AllBlocksCleared())

    def drain(self) -> list[KVEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


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
            RuntimeError: blocks without a known history may be cached already.
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


NULL_BLOCK = 0
"""In tables, a block that the window has passed. Never held, counted, cached or freed."""


class BlockPool:
    """The state of all blocks, by block id. A block is in exactly one of three states.

    The last ones are for states, the others for keys and values.

    - *held*: one or more requests have it in their tables.
    - *empty*: no request holds it and its content is unknown. Empty blocks are allocated first.
    - *candidate*: no request holds it, but it is in the index. The eviction policy chooses which
      candidates are allocated when no empty block is left.

    Args:
        num_groups: each has an index of its own.
        null_block: whether block 0 is the null block.
        num_states: how many of the blocks are states.
        eviction: chooses among the candidates; by default in the order of release.
        metadata: in the context of the eviction policy; None where no policy reads it.
        events: records the blocks removed from the index.

    Attributes:
        ref_count: by block id, the number of requests that hold it.
        index: per group, hash to block id. A second block with the same content is not in it, and
            is empty as soon as no request holds it.
        candidates: in the order in which they were released; the values have no meaning.
        empty: a stack, of blocks of keys and values.
        empty_states: a stack, of blocks of states.
        num_free_states: number of blocks of states that no request holds.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        null_block: bool = False,
        num_states: int = 0,
        eviction: Eviction | None = None,
        metadata: BlockMetadata | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.candidates: dict[int, None] = {}
        self._null = NULL_BLOCK if null_block else -1
        self._first_state, self.num_free_states = num_blocks - num_states, num_states
        self.empty = list(range(self._first_state - 1, self._null, -1))
        self.empty_states = list(range(num_blocks - 1, self._first_state - 1, -1))
        self._eviction = Eviction(None) if eviction is None else eviction
        metadata = metadata or BlockMetadata(time.monotonic)
        metadata.allocate(num_blocks, self.num_free, num_groups)
        self._hashes, self._groups = metadata.hashes, metadata.groups
        self._depths, self._history = metadata.depths, metadata.history
        self._retained, self._clock = metadata.retained, metadata.clock
        self._events = events

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds."""
        return len(self.empty) + len(self.empty_states) + len(self.candidates)

    def unheld(self, block_ids: Iterable[int]) -> list[int]:
        """Return the blocks among these that no request holds, without the null block."""
        candidates = self.candidates
        return [block for block in block_ids if block in candidates]

    def allocate(self, count: int, *, states: bool = False) -> list[int]:
        """Return empty blocks, each held once; at least `count` of their kind have to be free."""
        if count <= 0:
            return []
        empty, ref_count = (self.empty_states if states else self.empty), self.ref_count
        evicted: list[int] = []
        while (missing := count - len(empty) - len(evicted)) > 0:
            # One order for all: keys without a state and a state without keys are found by none.
            for block in self._evict(missing):
                wanted = (block >= self._first_state) is states
                (evicted if wanted else self._empty_like(block)).append(block)
        blocks = empty[: -count - 1 : -1] + evicted
        del empty[-count:]
        for block in blocks:
            ref_count[block] = 1
        if states:
            self.num_free_states -= count
        return blocks

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a holder to each of these blocks, which were found in the index."""
        ref_count, candidates = self.ref_count, self.candidates
        taken = []
        for block in block_ids:
            if not ref_count[block]:
                del candidates[block]
                taken.append(block)
            ref_count[block] += 1
        self.num_free_states -= self.num_states_of(taken)
        if self._history is not None:
            self._history.found(block_ids)
        if self._retained.deadlines:
            deadlines, hashes = self._retained.deadlines, self._hashes
            self._retained.num_hits += sum([hashes[block] in deadlines for block in taken])
        if taken:
            self._eviction.taken(taken)

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove a holder from each of these blocks, in the order in which to evict them."""
        ref_count, hashes, candidates = self.ref_count, self._hashes, self.candidates
        released, first_state = [], self._first_state
        for block in block_ids:
            count = ref_count[block] - 1
            ref_count[block] = count
            if count:
                continue
            if block >= first_state:
                self.num_free_states += 1
            if hashes[block] is None:
                self._empty_like(block).append(block)
            else:
                candidates[block] = None
                released.append(block)
        if self._history is not None:
            self._history.released(block_ids)
        if released:
            self._eviction.released(released)

    def register(
        self, group: int, table: Sequence[int], hashes: Sequence[bytes], start: int, end: int
    ) -> list[int]:
        """Add blocks of a request to the index.

        Args:
            start, end: first and last + 1 position in the table; null blocks are left out.

        Returns:
            The positions of the blocks that were added. Where the index has another block with
            the same content, that one stays.
        """
        index, known, null = self.index[group], self._hashes, self._null
        positions = []
        for position in range(start, end):
            block, key = table[position], hashes[position]
            if key in index or block == null:
                continue
            index[key] = block
            known[block] = key
            self._groups[block] = group
            self._depths[block] = position
            positions.append(position)
        if self._history is not None:
            self._history.cached(group, table, hashes, positions)
        return positions

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove blocks from the index; blocks that no request holds become empty."""
        known = [block for block in dict.fromkeys(block_ids) if self._hashes[block] is not None]
        if not known:
            return
        idle = [block for block in known if block in self.candidates]
        self._eviction.dropped(idle)
        self._unregister(known)
        for block in idle:
            del self.candidates[block]
            self._empty_like(block).append(block)

    def clear(self) -> None:
        """Empty the index; all candidates become empty blocks."""
        idle = list(self.candidates)
        self._eviction.dropped(idle)
        if self._history is not None:
            self._history.uncached([block for index in self.index for block in index.values()])
        self._lose([key for index in self.index for key in index])
        self.index = [{} for _ in self.index]
        self._hashes[:] = [None] * self.num_blocks
        self.candidates.clear()
        for block in idle:
            self._empty_like(block).append(block)
        if self._events is not None:
            self._events.cleared()

    def num_states_of(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are states."""
        first = self._first_state
        return 0 if first == self.num_blocks else sum([block >= first for block in block_ids])

    def _empty_like(self, block: int) -> list[int]:
        return self.empty_states if block >= self._first_state else self.empty

    def _evict(self, count: int) -> list[int]:
        blocks = self._eviction.choose(count, self.candidates)
        for block in blocks:
            del self.candidates[block]
        if deadlines := self._retained.deadlines:
            now, keys = self._clock(), [self._hashes[block] or b"" for block in blocks]
            self._retained.num_evicted += sum([deadlines.get(key, now) > now for key in keys])
        self._unregister(blocks)
        return blocks

    def _lose(self, keys: Sequence[bytes]) -> None:
        deadlines = self._retained.deadlines
        self._retained.lost += [key for key in keys if deadlines.pop(key, None) is not None]

    def _unregister(self, blocks: Sequence[int]) -> None:
        if self._history is not None:
            self._history.uncached(blocks)
        removed: list[list[bytes]] = [[] for _ in self.index]
        for block in blocks:
            key = self._hashes[block]
            if key is not None:
                self._hashes[block] = None
                group = self._groups[block]
                del self.index[group][key]
                removed[group].append(key)
        if self._retained.deadlines:
            keys = [key for keys in removed for key in keys]
            self._lose([key for key in keys if not any(key in index for index in self.index)])
        if self._events is not None:
            self._events.removed(removed)
