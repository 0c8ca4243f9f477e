"""The prefixes that several engines have cached, by the changes that they report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from hardpoint.core.kv_cache.block_hashes import BlockHashes
from hardpoint.plugins import EngineCoreRequest, HardpointError
from hardpoint.plugins.requests.engine_state import BLOCK_KEY_BYTES, KVCacheChanges
from hardpoint.process.cache_changes import CacheReports

BYTES_PER_BLOCK = 192
"""Most memory of a block that one engine or several have: its key, its mask, and their entry."""

_MAX_BYTES = 256 << 20
MOST_REMOVED = 65_536  # of an engine of which changes are missing
_DROPPED_SHARE = 16  # one part in so many is dropped at once, as it takes a walk over all


@dataclass
class _Engine:
    """State of an engine in the index.

    Attributes:
        bit: its bit in the masks.
        next: number of the next step of changes.
        incomplete_since: number of the first step after changes that are missing; None if none are.
        removed: blocks that were removed since then.
    """

    bit: int
    next: int = 0
    incomplete_since: int | None = None
    removed: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Finds, for a prompt, how much of it each engine has cached. In any thread.

    One walk over the blocks of a prompt serves all engines: a block has a mask of those that have
    it. The block hashes are the engines' own, cut to `BLOCK_KEY_BYTES`: two requests share what
    they would share in an engine, whose cache salt, adapter, features and whatever else a block
    depends on are in them. What step parts add (`BlockKey.block_key`) is known to engines alone,
    so that blocks which depend on it are not found. An answer is a hint in any case: blocks come
    and go until the request arrives.

    Of engines whose changes are missing (see `KVCacheChanges`), what was known is dropped, and
    later changes count, until `restore` has the rest.
    """

    # A bit that an engine had is not cleared in all masks when the engine leaves, or its cache was
    # cleared: it is left out of `_live`, and the engine gets another one. `_sweep` removes the bits
    # of `_stale` once there are many.

    def __init__(
        self, block_size: int, hash_algorithm: str = "sha256", max_bytes: int = _MAX_BYTES
    ) -> None:
        """Start without any engine.

        Args:
            block_size: tokens per block, of all engines.
            hash_algorithm: theirs, as `kv_cache.hash_algorithm`.
            max_bytes: most memory; beyond that, blocks that were neither stored nor found for the
                longest time are dropped. Each takes at most `BYTES_PER_BLOCK`.
        """
        self._block_size = block_size
        self._hashes = BlockHashes(block_size, hash_algorithm)
        self._max_blocks = max(max_bytes // BYTES_PER_BLOCK, 1)
        self._masks: dict[bytes, int] = {}
        self._engines: dict[int, _Engine] = {}
        self._ranks: dict[int, int] = {}  # by bit
        self._live = 0  # bits of engines
        self._stale = 0  # bits that no engine has, and masks may have
        self._asked: dict[int, object] = {}  # by rank, the question that is not answered yet
        self._version = 0
        self._last_walk: tuple[EngineCoreRequest | None, int, dict[int, int]] = None, 0, {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def apply(self, rank: int, changes: KVCacheChanges) -> bool:
        """Add changes of an engine; the first of a rank make it known.

        Returns:
            Whether all is known of the engine; if not, `restore` needs its `cached_blocks`.
        """
        with self._lock:
            self._version += 1
            engine = self._engines.get(rank)
            if engine is None or (changes.first == 0 and engine.next):  # it was started again
                self._asked.pop(rank, None)
                engine = self._renewed(rank)
            elif changes.last < engine.next and changes.first <= changes.last:  # seen before
                return engine.incomplete_since is None
            if changes.first > engine.next:
                engine = self._renewed(rank)
                engine.incomplete_since = changes.first
            if changes.cleared:
                engine = self._renewed(rank)
            engine.next = changes.last + 1
            self._store(engine, changes.stored)
            self._remove(engine, changes.removed)
            if engine.incomplete_since is not None:
                engine.removed |= changes.removed
                if len(engine.removed) > MOST_REMOVED:
                    following = engine.next
                    engine = self._renewed(rank)
                    engine.next = engine.incomplete_since = following
            return engine.incomplete_since is None

    def restore(self, rank: int, blocks: KVCacheChanges) -> bool:
        """Complete the blocks of an engine; an unknown engine has none missing.

        Args:
            rank: rank of the engine.
            blocks: the answer to its control call `cached_blocks`.

        Returns:
            Whether all is known of it now; if not, more changes were lost after the answer was
            made, and another one is needed.
        """
        with self._lock:
            self._version += 1
            engine = self._engines.get(rank)
            if engine is None or engine.incomplete_since is None:
                return True
            if blocks.last + 1 < engine.incomplete_since:
                return False
            if blocks.last >= engine.next:  # it is newer than all that was read
                engine = self._renewed(rank)
                engine.next = blocks.last + 1
            self._store(engine, blocks.stored - engine.removed)
            engine.incomplete_since, engine.removed = None, set()
            return True

    def follow(
        self, rank: int, changes: KVCacheChanges, call: Callable[[str], Future[KVCacheChanges]]
    ) -> None:
        """Add changes of an engine; where some are missing, ask it for all blocks.

        Args:
            rank: rank of the engine.
            changes: what it sent.
            call: makes one of its control calls without waiting. If it fails, or raises
                HardpointError, the next changes make another one.
        """
        if not self.apply(rank, changes):
            self._ask(rank, call)

    def _ask(self, rank: int, call: Callable[[str], Future[KVCacheChanges]]) -> None:
        question = object()
        with self._lock:
            if self._asked.setdefault(rank, question) is not question:
                return

        def answered(answer: Future[KVCacheChanges]) -> None:
            with self._lock:
                if self._asked.get(rank) is not question:  # the engine is another one now
                    return
                del self._asked[rank]
            if answer.cancelled() or answer.exception() is not None:
                return
            if not self.restore(rank, answer.result()):
                self._ask(rank, call)

        try:
            call(CacheReports.cached_blocks.name).add_done_callback(answered)
        except HardpointError:  # it has ended
            with self._lock:
                self._asked.pop(rank, None)

    def remove_engine(self, rank: int) -> None:
        """Drop an engine and all that is known of it; an unknown rank is ignored."""
        with self._lock:
            self._version += 1
            self._asked.pop(rank, None)
            self._retire(rank)

    def cached_prefix_tokens_at(self, rank: int, request: EngineCoreRequest) -> int:
        """Return how many tokens of a prompt an engine has cached.

        The walk for a request serves all engines, until the index changes.
        """
        last_request, version, tokens_by_rank = self._last_walk
        if version != self._version or not _is_same(last_request, request):
            version = self._version
            tokens_by_rank = self.cached_prefix_tokens(request)
            self._last_walk = request, version, tokens_by_rank
        return tokens_by_rank.get(rank, 0)

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> dict[int, int]:
        """Return how many tokens of a prompt each engine has cached, by rank.

        As where the engine looks them up, at least one token is left to compute, and nothing is
        found for requests that are to be computed whole. Engines without any block are left out.
        """
        params, size = request.params, self._block_size
        if params.prompt_logprobs is not None or params.skip_reading_prefix_cache:
            return {}
        if request.prompt_embeds is not None:
            return {}
        hashes = self._hashes.of_prefix(request, (len(request.prompt_token_ids) - 1) // size)
        blocks_by_rank: dict[int, int] = {}
        walked: list[bytes] = []
        with self._lock:
            masks, having = self._masks, self._live
            for block_hash in hashes if having else ():
                key = block_hash[:BLOCK_KEY_BYTES]
                mask = masks.get(key, 0) & having
                if mask != having:
                    self._note(blocks_by_rank, having ^ mask, len(walked))
                    having = mask
                    if not mask:
                        break
                walked.append(key)
            self._note(blocks_by_rank, having, len(walked))
            if len(masks) > self._max_blocks // 2:  # what was found is to be dropped last
                for key in reversed(walked):
                    masks[key] = masks.pop(key)
        if request.features:
            blocks_by_rank = {
                rank: self._whole(request, blocks) for rank, blocks in blocks_by_rank.items()
            }
        return {rank: blocks * size for rank, blocks in blocks_by_rank.items() if blocks}

    def _note(self, blocks_by_rank: dict[int, int], mask: int, num_blocks: int) -> None:
        while num_blocks and mask:
            bit = mask & -mask
            blocks_by_rank[self._ranks[bit]] = num_blocks
            mask ^= bit

    def _whole(self, request: EngineCoreRequest, num_blocks: int) -> int:
        """Return how many of the first blocks can be used without cutting a feature."""
        size = self._block_size
        while (whole := request.whole_prefix(num_blocks * size) // size) < num_blocks:
            num_blocks = whole
        return num_blocks

    # All below: while the lock is held

    def _store(self, engine: _Engine, keys: Iterable[bytes]) -> None:
        masks, bit = self._masks, engine.bit
        for key in sorted(keys):  # a set's order differs by process, and so would what is dropped
            masks[key] = masks.get(key, 0) | bit
        if len(masks) > self._max_blocks:
            self._shrink()

    def _remove(self, engine: _Engine, keys: Iterable[bytes]) -> None:
        masks, others = self._masks, ~engine.bit
        for key in keys:
            if mask := masks.get(key, 0) & others:
                masks[key] = mask
            else:
                masks.pop(key, None)

    def _renewed(self, rank: int) -> _Engine:
        self._retire(rank)
        used = self._live | self._stale
        bit = ~used & (used + 1)  # the lowest that is free
        engine = self._engines[rank] = _Engine(bit)
        self._ranks[bit] = rank
        self._live |= bit
        return engine

    def _retire(self, rank: int) -> None:
        engine = self._engines.pop(rank, None)
        if engine is None:
            return
        del self._ranks[engine.bit]
        self._live &= ~engine.bit
        self._stale |= engine.bit
        if not self._live:
            self._masks.clear()
            self._stale = 0
        elif self._stale.bit_count() > max(self._live.bit_count(), _DROPPED_SHARE):
            self._sweep()

    def _sweep(self) -> None:
        """Remove the bits that no engine has."""
        live = self._live
        self._masks = {
            key: live_mask for key, mask in self._masks.items() if (live_mask := mask & live)
        }
        self._stale = 0

    def _shrink(self) -> None:
        """Drop the blocks that were neither stored nor found for the longest time."""
        if self._stale:
            self._sweep()
        excess = len(self._masks) - self._max_blocks
        if excess > 0:
            count = excess + self._max_blocks // _DROPPED_SHARE
            for key in list(islice(self._masks, count)):
                del self._masks[key]


def _is_same(earlier: EngineCoreRequest | None, request: EngineCoreRequest) -> bool:
    return earlier is request or (
        earlier is not None
        and earlier.request_id == request.request_id
        and earlier.prompt_token_ids == request.prompt_token_ids
    )
