"""Publishes KV events of the blocks that the stores of a rank keep."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from hardpoint.plugins import BlockRemoved, BlockStored

_MOST_BLOCKS = 1 << 18


class TierEvents:
    """Events of blocks stored and dropped in tiers. Thread-safe.

    Stores know keys, and events have the hashes of blocks. So the hashes of the newest keys are
    kept. A block with a forgotten key is reported as removed, because its eviction
    could not be published.
    """

    def __init__(
        self,
        publish: Callable[[BlockStored | BlockRemoved], None],
        block_size: int,
        *,
        most_blocks: int = _MOST_BLOCKS,
    ) -> None:
        """Know nothing yet.

        Args:
            block_size: tokens per block.
            most_blocks: number of remembered keys.
        """
        self._publish = publish
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._lock = threading.Lock()
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()  # by key
        self._kept: defaultdict[str, set[bytes]] = defaultdict(set)  # keys by tier
        self._changes: list[tuple[str, bool, bytes]] = []  # tier, whether it was stored, hash

    def know(self, key: bytes, block_hash: bytes) -> None:
        """Remember the block hash of a key."""
        with self._lock:
            self._hashes[key] = block_hash
            self._hashes.move_to_end(key)
            if len(self._hashes) > self._most_blocks:
                oldest, its_hash = self._hashes.popitem(last=False)
                for tier in self._kept:
                    self._remove(tier, oldest, its_hash)

    def stored(self, tier: str, key: bytes) -> None:
        """Record that a tier has a block."""
        with self._lock:
            block_hash, tier_keys = self._hashes.get(key), self._kept[tier]
            if block_hash is not None and key not in tier_keys:
                tier_keys.add(key)
                self._changes.append((tier, True, block_hash))

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """Record that a tier does not have blocks any more."""
        with self._lock:
            for key in keys:
                if (block_hash := self._hashes.get(key)) is not None:
                    self._remove(tier, key, block_hash)

    def _remove(self, tier: str, key: bytes, block_hash: bytes) -> None:
        tier_keys = self._kept[tier]
        if key in tier_keys:
            tier_keys.remove(key)
            self._changes.append((tier, False, block_hash))

    def flush(self) -> None:
        """Publish the changes since the last call."""
        with self._lock:
            changes, self._changes = self._changes, []
        for (tier, stored), run in itertools.groupby(changes, key=lambda change: change[:2]):
            hashes = [block_hash for _, _, block_hash in run]
            if stored:
                self._publish(BlockStored(hashes, None, [], self._block_size, medium=tier))
            else:
                self._publish(BlockRemoved(hashes, medium=tier))
