"""The changes of an engine's KV cache, which clients of several engines get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from hardpoint.host.system.control_calls import utility
from hardpoint.plugins import HardpointError
from hardpoint.plugins.kv_cache import AllBlocksCleared, BlockStored, KVEvent
from hardpoint.plugins.requests.engine_state import BLOCK_KEY_BYTES, KVCacheChanges

MOST_BLOCKS = 262_144
"""Most blocks that `CacheChangeLog.all_of` returns."""


class CacheChangeLog:
    """Collects the changes of the KV cache until they are read, of its first group alone."""

    def __init__(self) -> None:
        self._next = 0
        self._reset()

    def _reset(self) -> None:
        self._cleared = False
        self._stored: set[bytes] = set()
        self._removed: set[bytes] = set()

    def add(self, events: Sequence[KVEvent]) -> None:
        """Add events, in their order, without events of tiers and of other groups."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._reset()
                self._cleared = True
                continue
            if event.group or event.medium is not None:
                continue
            keys = _keys(event.block_hashes)
            gained, lost = self._stored, self._removed
            if not isinstance(event, BlockStored):
                gained, lost = lost, gained
            gained |= keys
            lost -= keys

    def pop(self) -> KVCacheChanges | None:
        """Return the changes since the last call, as of one step; None if there are none."""
        if not (self._cleared or self._stored or self._removed):
            return None
        number = self._next
        self._next += 1
        changes = KVCacheChanges(
            first=number,
            last=number,
            cleared=self._cleared,
            stored=self._stored,
            removed=set() if self._cleared else self._removed,
        )
        self._reset()
        return changes

    def all_of(self, hashes: Iterable[bytes]) -> KVCacheChanges:
        """Return all blocks as one change; later results of `pop` continue it.

        Args:
            hashes: those of the blocks that can be found, in the order in which they were cached;
                of more than `MOST_BLOCKS`, the later ones are left out, since a block is of no use
                without those before it.
        """
        stored = _keys(islice(hashes, MOST_BLOCKS))
        return KVCacheChanges(first=0, last=self._next - 1, cleared=True, stored=stored)


class CacheReports:
    """Reports of the changes of an engine's KV cache to its clients.

    Attributes:
        pop: returns the changes since the last call; None if they are not reported.
    """

    def __init__(
        self, log: CacheChangeLog | None, cached_blocks: Callable[[], Iterable[bytes]]
    ) -> None:
        """Report nothing yet.

        Args:
            log: collects the changes; None if they are not reported.
            cached_blocks: `EngineCore.cached_blocks`.
        """
        self._log, self._cached_blocks = log, cached_blocks
        self.pop = None if log is None else self._pop

    def _pop(self) -> KVCacheChanges | None:
        assert self._log is not None, "`pop` is None then"
        self._cached_blocks()  # the log gets the changes outside of steps, as by a reset
        return self._log.pop()

    @utility()
    def cached_blocks(self) -> KVCacheChanges:
        """Return the blocks that can be found now, 262144 at most, as a change of an empty cache.

        For a client that has lost changes; those that come next continue it.

        Raises:
            HardpointError: this engine reports no changes of its KV cache.
        """
        if self._log is None:
            raise HardpointError("this engine does not report changes of its KV cache")
        return self._log.all_of(self._cached_blocks())


def _keys(hashes: Iterable[bytes]) -> set[bytes]:
    return {block_hash[:BLOCK_KEY_BYTES] for block_hash in hashes}
