"""The pool of cache blocks: who is held, who is empty, and whose content can be found."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from hardpoint.plugins import Request
from hardpoint.plugins.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

from .eviction import Eviction


class EventLog:
    """The KV cache events since they were last taken."""

    def __init__(self, block_size: int) -> None:
        """Begin with none."""
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(
        self, request: Request, group: int, hashes: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        """Note blocks of a request that can be found from now on.

        Args:
            hashes: of the request's blocks from its first one on.
            positions: of those blocks in its table, ascending.
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
        """Note blocks that can be found no more, one list per group."""
        for group, hashes in enumerate(hashes_by_group):
            if hashes:
                self._events.append(BlockRemoved(block_hashes=hashes, group=group))

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


NULL_BLOCK = 0
"""Stands in tables where a window sees nothing. Never held, counted, cached or freed."""


class BlockPool:
    """Blocks, which are numbers. Each is in exactly one state.

    *Held*: one or more requests have it in their tables. *Empty*: nobody holds it and its content
    is worth nothing; such blocks are handed out first. *Candidate*: nobody holds it, but its
    content can be found; which of them make room is the eviction policy's choice.

    Attributes:
        ref_count: by block id, how many hold it.
        index: per group, hash to the one block that is found by it. A second block of the same
            content is not in it, and empty as soon as nobody holds it.
        candidates: in the order in which they were released; values mean nothing.
        empty: a stack.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        null_block: bool = False,
        eviction: Eviction | None = None,
        events: EventLog | None = None,
    ) -> None:
        """Start with every block empty.

        Args:
            null_block: whether block 0 is the null block.
            eviction: chooses among the candidates; by default in the order of release.
            events: is told what can be found no more.
        """
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.candidates: dict[int, None] = {}
        self._null = NULL_BLOCK if null_block else -1
        self.empty = list(range(num_blocks - 1, self._null, -1))
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._groups = array("i", bytes(4 * num_blocks))
        self._depths = array("i", bytes(4 * num_blocks))
        self._eviction = Eviction(None) if eviction is None else eviction
        self._events = events

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self.empty) + len(self.candidates)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """Return how many of these nobody holds; the null block does not count."""
        candidates = self.candidates
        return sum([block in candidates for block in block_ids])

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks of no content, each held once; there must be so many free ones."""
        if count <= 0:
            return []
        empty, ref_count = self.empty, self.ref_count
        evicted = self._evict(count - len(empty)) if count > len(empty) else []
        blocks = empty[: -count - 1 : -1] + evicted
        del empty[-count:]
        for block in blocks:
            ref_count[block] = 1
        return blocks

    def take(self, block_ids: Iterable[int]) -> None:
        """Let one more request hold each of these blocks, which were found in the index."""
        ref_count, candidates = self.ref_count, self.candidates
        taken = []
        for block in block_ids:
            if not ref_count[block]:
                del candidates[block]
                taken.append(block)
            ref_count[block] += 1
        self._eviction.taken(taken)

    def release(self, block_ids: Iterable[int]) -> None:
        """Let one request less hold each of these blocks, in the order in which they should go."""
        ref_count, hashes, candidates = self.ref_count, self._hashes, self.candidates
        released = []
        for block in block_ids:
            count = ref_count[block] - 1
            ref_count[block] = count
            if count:
                continue
            if hashes[block] is None:
                self.empty.append(block)
            else:
                candidates[block] = None
                released.append(block)
        self._eviction.released(released, self._depths)

    def register(
        self, group: int, table: Sequence[int], hashes: Sequence[bytes], start: int, end: int
    ) -> list[int]:
        """Let blocks be found by the hashes of their content.

        Args:
            table: the blocks that one request holds.
            hashes: of the same blocks.
            start, end: positions in the table, from and up to; null blocks are passed over.

        Returns:
            The positions that can be found from now on; where the content was there already in
            another block, that one goes on being found.
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
        return positions

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let these blocks be found no more; those that nobody holds become empty."""
        known = [block for block in dict.fromkeys(block_ids) if self._hashes[block] is not None]
        self._unregister(known)
        idle = [block for block in known if block in self.candidates]
        for block in idle:
            del self.candidates[block]
        self.empty += idle
        self._eviction.taken(idle)

    def clear(self) -> None:
        """Let nothing be found any more."""
        idle = list(self.candidates)
        self.index = [{} for _ in self.index]
        self._hashes = [None] * self.num_blocks
        self.candidates.clear()
        self.empty += idle
        self._eviction.taken(idle)
        if self._events is not None:
            self._events.cleared()

    def _evict(self, count: int) -> list[int]:
        blocks = self._eviction.choose(count, self.candidates)
        for block in blocks:
            del self.candidates[block]
        self._unregister(blocks)
        return blocks

    def _unregister(self, blocks: Sequence[int]) -> None:
        """Take blocks that can be found out of the index."""
        removed: list[list[bytes]] = [[] for _ in self.index]
        for block in blocks:
            key = self._hashes[block]
            if key is not None:
                self._hashes[block] = None
                group = self._groups[block]
                del self.index[group][key]
                removed[group].append(key)
        if self._events is not None:
            self._events.removed(removed)
