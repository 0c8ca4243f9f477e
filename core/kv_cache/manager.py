"""The KV cache manager: which request holds which blocks, and which of them others can find."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from hardpoint.host.boundary.kv_cache import Eviction
from hardpoint.plugins import EngineCoreRequest, Request, RequestStatus
from hardpoint.plugins.kv_cache import BlockIds, CachedPrefix, KVCacheGroup, KVEvent
from hardpoint.plugins.kv_cache.manager import BlockNeeds
from hardpoint.plugins.requests.stats import PrefixCacheStats

from .block_hashes import BlockHashes, PartKeys
from .block_pool import NULL_BLOCK, BlockMetadata, BlockPool, EventLog

_NEVER = sys.maxsize
_AT_ONCE = 1024  # hashes
_STATE_EVERY = 16  # blocks of generated tokens; further states would drive out those of prompts
_NO_PREFIX = CachedPrefix()


class _RequestBlocks:
    """The blocks of one request.

    Attributes:
        tables: block ids per group, all of one length.
        capacity: number of tokens that the tables have room for.
        num_cached: number of leading blocks that were added to the index, or found in it.
        next_caching: number of tokens with which the next block is full and is added to the index.
        num_passed: per group, leading blocks that the window has passed: no later token sees them.
        num_releases: how many of `Request.releases` have left the tables, which are shorter then.
    """

    # Invariant: `next_caching` is (num_cached + 1) * block_size while blocks are added to the index
    # as they fill, and _NEVER while they are not: without prefix caching, until `cache_arrived`
    # where `admit` delayed it, after `reset` and after a release. So `extend`, which runs for every
    # request in every step, finds out by one comparison that no block is to be added.

    __slots__ = ("capacity", "next_caching", "num_cached", "num_passed", "num_releases", "tables")

    def __init__(self, tables: list[list[int]], capacity: int) -> None:
        self.tables, self.capacity = tables, capacity
        self.num_cached = 0
        self.next_caching = _NEVER
        self.num_passed, self.num_releases = [0] * len(tables), 0


class BlockManager:
    """Allocates blocks to requests, and finds cached blocks with the beginning of a request.

    Implements `hardpoint.plugins.kv_cache.KVCacheManager`. A block can be found as soon as the step
    that fills it is planned: a request that finds it in the same step reads it after it was
    written, because each layer writes keys and values of the whole batch before it attends.

    Args:
        num_blocks: size of the pool; with a windowed group, one of them is the null block.
        groups: the layers' attention groups, each with its own table per request.
        num_states: how many of the blocks are states, for the group that has such.
        max_step_tokens: most tokens of a request in a step, for `blocks_needed`; None is all.
        hash_algorithm: "sha256" or "blake2b".
        part_keys: keys of step parts, which the hashes include; None if no part has any.
        eviction: chooses the cached blocks to reuse; by default the blocks released first.
        metadata: in the context of the eviction policy; None where no policy reads it.
        events: whether `take_events` returns anything.

    Attributes:
        pool: the block pool.
    """

    def __init__(  # noqa: PLR0913 - the parts of the cache
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
        num_states: int = 0,
        max_step_tokens: int | None = None,
        prefix_caching: bool = True,
        drops_last_block: bool = False,
        hash_algorithm: str = "sha256",
        part_keys: PartKeys | None = None,
        eviction: Eviction | None = None,
        metadata: BlockMetadata | None = None,
        events: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = tuple(groups)
        self._caching, self._drops_last = prefix_caching, drops_last_block
        self._windows = [
            (group, spec.window) for group, spec in enumerate(groups) if spec.window is not None
        ]
        self._num_states = num_states
        self._needs = BlockNeeds(self.groups, block_size, max_step_tokens)
        # Blocks that requests can hold: all but the null block.
        self.num_usable_blocks = num_blocks - self._needs.num_null_blocks
        self._events = EventLog(block_size) if events else None
        self.pool = BlockPool(
            num_blocks,
            len(groups),
            null_block=bool(self._windows),
            num_states=num_states,
            eviction=eviction,
            metadata=metadata,
            events=self._events,
        )
        self._hashes = BlockHashes(block_size, hash_algorithm, part_keys)
        # By request, not by its id: an ended request may keep blocks while its id is used again.
        self._blocks: dict[Request, _RequestBlocks] = {}
        self._delayed: set[Request] = set()
        self._stats = PrefixCacheStats()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return self.pool.num_free

    @property
    def num_free_states(self) -> int | None:
        """How many of these are for states; None if no group has states."""
        return self.pool.num_free_states if self._num_states else None

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks, over all groups, that a request of `num_tokens` tokens holds."""
        return self._needs.of(num_tokens)

    def hash_prompt(self, source: EngineCoreRequest) -> list[bytes]:
        """Return the hashes of a prompt's full blocks, for `take_hashes`.

        Empty without prefix caching, and for a prompt that the cache has no room for. Safe in any
        thread: reads nothing that changes.
        """
        if not self._caching or (length := len(source.prompt_token_ids)) < self.block_size:
            return []
        if self._needs.of(length) > self.num_usable_blocks:
            return []
        return self._hashes.of_prompt(source)

    def block_hashes(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks of a request.

        They are there without prefix caching, too.
        """
        return self._hashes.of(request, num_blocks)

    def take_hashes(self, request: Request, hashes: list[bytes]) -> None:
        """Store the result of `hash_prompt` for a live request that has no blocks yet."""
        self._hashes.by_request.setdefault(request, hashes)

    def lookup(self, request: Request) -> CachedPrefix:
        """Return a request's longest cached prefix that leaves at least one token to compute."""
        if not self._uses_cache(request):
            return _NO_PREFIX
        size = self.block_size
        releases = request.releases  # a step ends at each
        plain = request.num_tokens if releases is None else request.num_plain_tokens
        if not (limit := (plain - 1) // size):
            return _NO_PREFIX
        hashes = self._hashes.of(request, limit)
        length, tables = _longest_prefix(self.groups, self.pool.index, hashes, limit, size)
        if length and self._drops_last:  # keys of a head in it depend on the token after it
            length, tables = _longest_prefix(self.groups, self.pool.index, hashes, length - 1, size)
        while (whole := request.source.whole_prefix(length * size) // size) < length:
            length, tables = _longest_prefix(self.groups, self.pool.index, hashes, whole, size)
        return CachedPrefix(length * size, tables) if length else _NO_PREFIX

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
        """Allocate the first blocks of a request: the blocks of `prefix`, then new ones.

        Raises:
            ValueError: the request has blocks already, or there is lookahead and states.
        """
        pool, size = self.pool, self.block_size
        if request in self._blocks:
            raise ValueError(f"request {request.request_id!r} holds blocks already")
        if num_lookahead_tokens and self._num_states:  # which are where a step ends
            raise ValueError("num_lookahead_tokens: expected 0 for a model with states")
        end = prefix.num_tokens + num_external_tokens + num_new_tokens
        num_cached = prefix.num_tokens // size
        num_new = -(-(end + num_lookahead_tokens) // size) - num_cached  # per group
        cached = [block for table in prefix.block_ids for block in table]
        if self._windows:
            cached = [block for block in cached if block != NULL_BLOCK]
        # Found blocks that no request holds count as free until they are touched. A prompt of which
        # further pieces follow will hold as many states as any request of its length.
        states = self._needs.states_of(request.num_tokens) if end < request.num_tokens else 0
        if not self._has_room(num_new, pool.unheld(cached), (), num_reserved_blocks, states):
            return False
        pool.touch(cached)
        if self._uses_cache(request):
            self._stats.requests += 1
            self._stats.queried_tokens += request.num_tokens
            self._stats.hit_tokens += prefix.num_tokens
        tables = [list(table) for table in prefix.block_ids] or [[] for _ in self.groups]
        blocks = self._blocks[request] = _RequestBlocks(tables, num_cached * size)
        self._append(blocks, num_new)
        for group, window in self._windows:
            passed = _first_seen(prefix.num_tokens, window) // size
            blocks.num_passed[group] = min(num_cached, passed)
        blocks.num_cached = num_cached
        if delay_caching:
            self._delayed.add(request)
        elif self._caching:
            self._cache_full_blocks(request, blocks, end)
        return True

    def extend(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> BlockIds | None:
        """Extend a request's tables to hold `num_new_tokens` more than are computed.

        Returns:
            The new blocks per group; empty if none are needed, None if there are too few.
        """
        blocks = self._blocks[request]
        end = request.num_computed_tokens + num_new_tokens
        if request.releases is not None:
            position, done = request.num_computed_tokens, blocks.num_releases
            for columns in request.releases.until(position, done):
                blocks.num_releases, blocks.next_caching = blocks.num_releases + 1, _NEVER
                for table in blocks.tables:
                    self.pool.release(table[slice(*columns)])
                    del table[slice(*columns)]
        if end < blocks.next_caching and end + num_lookahead_tokens <= blocks.capacity:
            return ()
        new = self._grow(request, blocks, end + num_lookahead_tokens)
        if new is not None and end >= blocks.next_caching:
            self._cache_full_blocks(request, blocks, end)
        return new

    def cache_arrived(self, request: Request, num_tokens: int) -> None:
        """Cache the blocks of the first `num_tokens` of a request admitted with `delay_caching`."""
        if request in self._delayed:
            self._delayed.remove(request)
            if self._caching:
                self._cache_full_blocks(request, self._blocks[request], num_tokens)

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Invalidate a request's blocks from token position `num_tokens` on.

        Raises:
            ValueError: a window has passed blocks that the token at this position sees, and they
                were released; or there are states. The request has to be freed and admitted again.
        """
        blocks, size = self._blocks[request], self.block_size
        if self._num_states:
            going = f"request {request.request_id!r} cannot go back to token {num_tokens}"
            raise ValueError(f"{going}: states of its layers before that are not there any more")
        for group, window in self._windows:
            if blocks.num_passed[group] > _first_seen(num_tokens, window) // size:
                raise ValueError(
                    f"request {request.request_id!r} cannot go back to token {num_tokens}: in "
                    f"its window of {window} tokens, the blocks before token "
                    f"{blocks.num_passed[group] * size} were released"
                )
        first = num_tokens // size
        self.pool.forget([block for table in blocks.tables for block in table[first:]])
        if first < blocks.num_cached:
            blocks.num_cached = first
            if blocks.next_caching != _NEVER:
                blocks.next_caching = (first + 1) * size

    def discard(self, block_ids: Iterable[int]) -> None:
        """Remove blocks with wrong content from the index."""
        self.pool.forget(block_ids)

    def free(self, request: Request) -> None:
        """Release all blocks of a request, the last one first.

        The request's hashes are kept unless its status is FINISHED: a preempted one comes back.
        """
        blocks = self._blocks.pop(request, None)
        if blocks is not None:
            self._delayed.discard(request)
            self.pool.release(self._last_first(blocks))
        if request.status is RequestStatus.FINISHED:
            self._hashes.by_request.pop(request, None)

    def block_ids(self, request: Request) -> BlockIds:
        """Return a request's blocks in order, one list per group; empty if it has none."""
        blocks = self._blocks.get(request)
        return [] if blocks is None else [list(table) for table in blocks.tables]

    def reset(self) -> None:
        """Empty the index. Requests keep their blocks, but cache none until they are readmitted."""
        self.pool.clear()
        self._delayed.clear()
        for blocks in self._blocks.values():
            blocks.next_caching = _NEVER

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call; empty unless events are on."""
        return [] if self._events is None else self._events.drain()

    def stats(self) -> PrefixCacheStats:
        """Return prefix cache totals since the start."""
        stats = self._stats
        return PrefixCacheStats(stats.requests, stats.queried_tokens, stats.hit_tokens)

    def _uses_cache(self, request: Request) -> bool:
        params = request.params
        needs_all = params.prompt_logprobs is not None or params.skip_reading_prefix_cache
        return self._caching and not needs_all

    def _grow(self, request: Request, blocks: _RequestBlocks, num_tokens: int) -> BlockIds | None:
        """Make room for `num_tokens` tokens, releasing the blocks that windows have passed."""
        num_new = -(-(num_tokens - blocks.capacity) // self.block_size)  # per group
        passed = self._passed(request, blocks) if self._windows else []
        if num_new > 0:
            freed = [b for g, i in passed if self.pool.ref_count[b := blocks.tables[g][i]] == 1]
            if not self._has_room(num_new, freed=freed):
                return None
        if passed:
            self._release_passed(request, blocks, passed)
        return self._append(blocks, num_new) if num_new > 0 else ()

    def _has_room(
        self,
        count: int,
        taken: Sequence[int] = (),
        freed: Sequence[int] = (),
        reserved: int = 0,
        min_states: int = 0,
    ) -> bool:
        """Return whether `_append` has room once some free blocks are taken, and others freed.

        Of both kinds a share of `reserved` is to be left; of states there have to be `min_states`.
        """
        pool, has_states = self.pool, bool(self._num_states)
        net_states = has_states and pool.num_states_of(taken) - pool.num_states_of(freed)
        states = max(has_states * min(count, 2) + net_states, min_states)
        keys = count * (len(self.groups) - has_states) + len(taken) - len(freed) - net_states
        reserve = -(-reserved * self._num_states // max(self.num_usable_blocks, 1))
        free = pool.num_free_states
        return states <= free - reserve and keys <= pool.num_free - free - (reserved - reserve)

    def _append(self, blocks: _RequestBlocks, count: int) -> list[list[int]]:
        new = []
        for group, table in zip(self.groups, blocks.tables, strict=True):
            real = min(count, 2) if (states := group.has_states) else count
            added = [NULL_BLOCK] * (count - real) + self.pool.allocate(real, states=states)
            table += added
            new.append(added)
        blocks.capacity += count * self.block_size
        return new

    def _passed(self, request: Request, blocks: _RequestBlocks) -> list[tuple[int, int]]:
        # Drafts in flight may be rejected, so the next token is at most the last known one.
        position = min(request.num_computed_tokens, request.num_tokens - 1)
        return [
            (group, i)
            for group, window in self._windows
            for i in range(
                blocks.num_passed[group], _first_seen(position, window) // self.block_size
            )
        ]

    def _release_passed(
        self, request: Request, blocks: _RequestBlocks, passed: list[tuple[int, int]]
    ) -> None:
        released, dropped = [], []
        for group, i in passed:
            if (block := blocks.tables[group][i]) != NULL_BLOCK:
                released.append(block)
                is_generated = i * self.block_size >= request.num_prompt_tokens
                if self.groups[group].has_states and is_generated and (i + 1) % _STATE_EVERY:
                    dropped.append(block)
            blocks.tables[group][i] = NULL_BLOCK
            blocks.num_passed[group] = i + 1
        self.pool.forget(dropped)
        self.pool.release(released)

    def _cache_full_blocks(self, request: Request, blocks: _RequestBlocks, end: int) -> None:
        """Add the blocks to the index that known tokens before position `end` fill."""
        size, start = self.block_size, blocks.num_cached
        num_full = min(end, request.num_tokens) // size
        if num_full > start:
            hashes = self._hashes.of(request, num_full)
            for group, table in enumerate(blocks.tables):
                # A step writes states at its end, and where its last block begins.
                written = 1 + (end % size == 0) if self.groups[group].has_states else num_full
                first = max(start, num_full - written)
                positions = self.pool.register(group, table, hashes, first, num_full)
                if self._events is not None:
                    self._events.stored(request, group, hashes, positions)
            blocks.num_cached = num_full
        blocks.next_caching = (blocks.num_cached + 1) * size

    def _last_first(self, blocks: _RequestBlocks) -> list[int]:
        if len(blocks.tables) == 1 and not self._windows:
            return blocks.tables[0][::-1]
        rows = zip(*map(reversed, blocks.tables), strict=True)
        held = [block for row in rows for block in row]
        return [block for block in held if block != NULL_BLOCK] if self._windows else held


def _first_seen(position: int, window: int) -> int:
    """Return the first token position that the token at `position` sees through a window."""
    return max(0, position - window + 1)


def _longest_prefix(
    groups: Sequence[KVCacheGroup],
    indices: Sequence[Mapping[bytes, int]],
    hashes: Sequence[bytes],
    limit: int,
    block_size: int,
) -> tuple[int, list[list[int]]]:
    """Return the length in blocks of the longest prefix that every group has, and its block ids.

    A group without a window needs every block of the prefix. A group with a window needs those
    that the first token after the prefix sees; in place of the others comes the null block.

    Args:
        indices: per group, hash to block id.
        limit: longest prefix to consider, in blocks.
    """
    full: dict[int, list[int]] = {}
    for group, (spec, index) in enumerate(zip(groups, indices, strict=True)):
        if spec.window is None:
            full[group] = _leading(index, hashes, limit)
            limit = len(full[group])
    length = _common_length(groups, indices, hashes, limit, block_size)
    tables = []
    for group, (spec, index) in enumerate(zip(groups, indices, strict=True)):
        if spec.window is None:
            del full[group][length:]
            tables.append(full[group])
            continue
        unseen = _first_seen(length * block_size, spec.window) // block_size
        seen = [index[key] for key in hashes[unseen:length]]
        tables.append([NULL_BLOCK] * min(unseen, length) + seen)
    return length, tables


def _leading(index: Mapping[bytes, int], hashes: Sequence[bytes], limit: int) -> list[int]:
    blocks: list[int] = []
    for start in range(0, limit - 1, _AT_ONCE):  # many at once take half as long
        try:
            blocks += itemgetter(*hashes[start : min(start + _AT_ONCE, limit)])(index)
        except KeyError:
            break
    for key in hashes[len(blocks) : limit]:
        block = index.get(key)
        if block is None:
            break
        blocks.append(block)
    return blocks


def _common_length(
    groups: Sequence[KVCacheGroup],
    indices: Sequence[Mapping[bytes, int]],
    hashes: Sequence[bytes],
    length: int,
    block_size: int,
) -> int:
    windows = [
        (-(-(spec.window - 1) // block_size), index)
        for spec, index in zip(groups, indices, strict=True)
        if spec.window is not None
    ]
    while True:
        before = length
        for needed, index in windows:
            length = _trailing(index, hashes, length, needed)
        if length == before:
            return length


def _trailing(index: Mapping[bytes, int], hashes: Sequence[bytes], limit: int, needed: int) -> int:
    """Return the longest length up to `limit` with its last `needed` blocks in the index."""
    length = position = limit
    while position > max(0, length - needed):
        position -= 1
        if hashes[position] not in index:
            length = position
    return length
