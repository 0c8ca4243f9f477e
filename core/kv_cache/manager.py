"""The KV cache manager: which request holds which blocks, and what of them others may find."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from hardpoint.core.faults import FaultReporter
from hardpoint.plugins import EngineCoreRequest, EvictionPolicy, Request, RequestStatus
from hardpoint.plugins.kv_cache import BlockIds, CachedPrefix, KVCacheGroup, KVEvent
from hardpoint.plugins.stats import PrefixCacheStats

from .block_hashes import BlockHashes
from .block_pool import NULL_BLOCK, BlockPool, EventLog
from .eviction import Eviction, raise_fault
from .prefix_lookup import first_seen, longest_prefix

_NEVER = sys.maxsize
_NOTHING = CachedPrefix()


class _Held:
    """What one request holds.

    Attributes:
        tables: block ids per group, all of one length.
        capacity: tokens that they have room for.
        num_stored: leading blocks that were offered to the index.
        next_store: tokens with which the next block is full and is to be offered.
        unseen: per group, leading blocks that no token to come sees.
    """

    __slots__ = ("capacity", "next_store", "num_stored", "tables", "unseen")

    def __init__(self, tables: list[list[int]]) -> None:
        self.tables = tables
        self.capacity = 0
        self.num_stored = 0
        self.next_store = _NEVER
        self.unseen = [0] * len(tables)


class BlockManager:
    """Hands out blocks of a pool, and finds those whose content a request begins with.

    Implements `hardpoint.plugins.kv_cache.KVCacheManager`. A block can be found as soon as a step
    is planned that fills it: whoever finds it in the same step reads it after it was written,
    since each layer writes keys and values of the whole batch before it attends.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
        prefix_caching: bool = True,
        hash_algorithm: str = "sha256",
        eviction: EvictionPolicy | None = None,
        fault: FaultReporter = raise_fault,
        events: bool = False,
    ) -> None:
        """Start with every block empty.

        Args:
            num_blocks: of the pool; with a windowed group, one of them is the null block.
            hash_algorithm: "sha256" or "blake2b".
            eviction: chooses the content that goes; by default what was released first.
            fault: is told what `eviction` does wrong.
            events: whether `take_events` returns anything.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups)
        self._caching = prefix_caching
        self._windows = [
            (group, spec.window) for group, spec in enumerate(groups) if spec.window is not None
        ]
        self._events = EventLog(block_size) if events else None
        self._pool = BlockPool(
            num_blocks,
            len(groups),
            null_block=bool(self._windows),
            eviction=Eviction(eviction, fault),
            events=self._events,
        )
        self._hashes = BlockHashes(block_size, hash_algorithm)
        # By request, not by its id: one that ended may keep blocks while the id is used again.
        self._held: dict[Request, _Held] = {}
        self._delayed: set[Request] = set()
        self._stats = PrefixCacheStats()

    @property
    def pool(self) -> BlockPool:
        """The blocks."""
        return self._pool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached content included."""
        return self._pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - bool(self._windows)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a request of so many tokens ever holds, all groups.

        A window saves nothing here: one step may compute all tokens at once.
        """
        return -(-num_tokens // self.block_size) * len(self.groups)

    def hash_prompt(self, source: EngineCoreRequest) -> list[bytes]:
        """Return what `take_hashes` wants of a request.

        Nothing without prefix caching, or of a prompt that the cache has no room for. Safe in any
        thread: it looks at nothing that changes.
        """
        room = self.num_usable_blocks * self.block_size
        if not self._caching or len(source.prompt_token_ids) > room:
            return []
        return self._hashes.of_prompt(source)

    def take_hashes(self, request: Request, hashes: list[bytes]) -> None:
        """Have what `hash_prompt` gave for a live request that holds nothing yet."""
        self._hashes.take(request, hashes)

    def lookup(self, request: Request) -> CachedPrefix:
        """Return what the cache has of a request, leaving at least one token to compute."""
        if not self._looks_up(request):
            return _NOTHING
        size = self.block_size
        limit = (request.num_tokens - 1) // size
        hashes = self._hashes.of(request, limit)
        length, tables = longest_prefix(self.groups, self._pool.index, hashes, limit, size)
        return CachedPrefix(length * size, tables) if length else _NOTHING

    def admit(
        self,
        request: Request,
        prefix: CachedPrefix,
        num_new_tokens: int,
        *,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        num_reserved_blocks: int = 0,
        delay_caching: bool = False,
    ) -> bool:
        """Give a request that holds nothing its first blocks: `prefix`, then new ones.

        Raises:
            ValueError: it holds some already.
        """
        pool, size = self._pool, self.block_size
        if request in self._held:
            raise ValueError(f"request {request.request_id!r} holds blocks already")
        end = prefix.num_tokens + num_external_tokens + num_new_tokens
        num_cached = prefix.num_tokens // size
        missing = -(-(end + num_lookahead_tokens) // size) - num_cached
        found = [block for table in prefix.block_ids for block in table]
        if self._windows:
            found = [block for block in found if block != NULL_BLOCK]
        wanted = missing * len(self.groups) + pool.num_unheld(found)
        if wanted > pool.num_free - num_reserved_blocks:
            return False
        pool.take(found)
        if self._looks_up(request):
            self._stats.requests += 1
            self._stats.queried_tokens += request.num_tokens
            self._stats.hit_tokens += prefix.num_tokens
        tables = [list(table) for table in prefix.block_ids] or [[] for _ in self.groups]
        held = self._held[request] = _Held(tables)
        self._append(held, missing)
        for group, window in self._windows:
            held.unseen[group] = min(num_cached, first_seen(prefix.num_tokens, window) // size)
        held.num_stored = num_cached
        if delay_caching:
            self._delayed.add(request)
        elif self._caching:
            held.next_store = 0
            self._store(request, held, end)
        return True

    def extend(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> BlockIds | None:
        """Extend a request's blocks to hold `num_new_tokens` more than are computed."""
        held = self._held[request]
        end = request.num_computed_tokens + num_new_tokens
        if end < held.next_store and end + num_lookahead_tokens <= held.capacity:
            return ()
        new = self._grow(request, held, end + num_lookahead_tokens)
        if new is not None and end >= held.next_store:
            self._store(request, held, end)
        return new

    def cache_arrived(self, request: Request, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a request admitted with `delay_caching` are there."""
        if request in self._delayed:
            self._delayed.remove(request)
            if self._caching:
                held = self._held[request]
                held.next_store = 0
                self._store(request, held, num_tokens)

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Note that what a request holds from position `num_tokens` on is not what it should be.

        Raises:
            ValueError: a window has moved on, so that blocks which the token at this position
                sees were given back; the request must be freed and admitted anew.
        """
        held, size = self._held[request], self.block_size
        for group, window in self._windows:
            if held.unseen[group] > first_seen(num_tokens, window) // size:
                raise ValueError(
                    f"request {request.request_id!r} cannot go back to token {num_tokens}: of "
                    f"what it sees through a window of {window} tokens, the blocks before token "
                    f"{held.unseen[group] * size} were given back"
                )
        first = num_tokens // size
        self._pool.forget([block for table in held.tables for block in table[first:]])
        if first < held.num_stored:
            held.num_stored = first
            if held.next_store != _NEVER:
                held.next_store = (first + 1) * size

    def discard(self, block_ids: Iterable[int]) -> None:
        """Note that the content of these blocks is wrong: nobody finds them any more."""
        self._pool.forget(block_ids)

    def free(self, request: Request) -> None:
        """Give back all of a request's blocks, the last one first.

        Its hashes are kept until it is freed with status FINISHED: it may be preempted only.
        """
        held = self._held.pop(request, None)
        if held is not None:
            self._delayed.discard(request)
            self._pool.release(self._last_first(held))
        if request.status is RequestStatus.FINISHED:
            self._hashes.drop(request)

    def block_ids(self, request: Request) -> BlockIds:
        """Return a request's blocks in order, one list per group; empty if it holds none."""
        held = self._held.get(request)
        return [] if held is None else [list(table) for table in held.tables]

    def reset(self) -> None:
        """Forget cached content. Requests keep their blocks, but store nothing until readmitted."""
        self._pool.clear()
        self._delayed.clear()
        for held in self._held.values():
            held.next_store = _NEVER

    def take_events(self) -> list[KVEvent]:
        """Return what happened since the last call; empty unless events are on."""
        return [] if self._events is None else self._events.take()

    def stats(self) -> PrefixCacheStats:
        """Return totals since the start."""
        stats = self._stats
        return PrefixCacheStats(stats.requests, stats.queried_tokens, stats.hit_tokens)

    def _looks_up(self, request: Request) -> bool:
        return self._caching and request.params.prompt_logprobs is None

    def _grow(self, request: Request, held: _Held, num_tokens: int) -> BlockIds | None:
        """Make room for so many tokens, giving back what windows have passed."""
        missing = -(-(num_tokens - held.capacity) // self.block_size)
        passed = self._passed(request, held) if self._windows else []
        if missing > 0:
            wanted, room = missing * len(self.groups), self._pool.num_free
            if wanted > room:
                ref_count = self._pool.ref_count
                room += sum(ref_count[held.tables[g][i]] == 1 for g, i in passed)
                if wanted > room:
                    return None
        if passed:
            self._give_back(held, passed)
        return self._append(held, missing) if missing > 0 else ()

    def _append(self, held: _Held, count: int) -> list[list[int]]:
        """Append `count` new blocks to each table; return them."""
        new = [self._pool.allocate(count) for _ in self.groups]
        for table, blocks in zip(held.tables, new, strict=True):
            table += blocks
        held.capacity = len(held.tables[0]) * self.block_size
        return new

    def _passed(self, request: Request, held: _Held) -> list[tuple[int, int]]:
        """Return (group, position) of blocks that no token to come sees.

        Drafts in flight may be rejected, so the next token is at most the last known one.
        """
        position = min(request.num_computed_tokens, request.num_tokens - 1)
        return [
            (group, i)
            for group, window in self._windows
            for i in range(held.unseen[group], first_seen(position, window) // self.block_size)
        ]

    def _give_back(self, held: _Held, passed: list[tuple[int, int]]) -> None:
        blocks = []
        for group, i in passed:
            blocks.append(held.tables[group][i])
            held.tables[group][i] = NULL_BLOCK
            held.unseen[group] = i + 1
        self._pool.release(blocks)

    def _store(self, request: Request, held: _Held, end: int) -> None:
        """Let the blocks be found that known tokens fill, up to token `end`."""
        size, start = self.block_size, held.num_stored
        num_full = min(end, request.num_tokens) // size
        if num_full > start:
            hashes = self._hashes.of(request, num_full)
            for group, table in enumerate(held.tables):
                positions = self._pool.register(group, table, hashes, start, num_full)
                if self._events is not None:
                    self._events.stored(request, group, hashes, positions)
            held.num_stored = num_full
        held.next_store = (held.num_stored + 1) * size

    def _last_first(self, held: _Held) -> list[int]:
        """Return what a request holds, the last blocks of all groups first."""
        if len(held.tables) == 1 and not self._windows:
            return held.tables[0][::-1]
        rows = zip(*map(reversed, held.tables), strict=True)
        return [block for row in rows for block in row if block != NULL_BLOCK]
