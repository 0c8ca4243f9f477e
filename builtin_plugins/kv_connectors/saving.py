"""Blocks that a step completes: copied into buffers, and then stored or offered by threads."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .jobs import Save
from .staging import Buffer, BufferPool, CacheBlocks
from .threads import TaskThreads
from .tiers import Tiers

if TYPE_CHECKING:
    from .options import StoresOptions


class Saver:
    """Lets threads store blocks, and others offer them, which have buffers of their own."""

    def __init__(
        self,
        tiers: Tiers,
        groups: Sequence[range],
        key: Callable[[bytes, int, bytes], bytes],
        options: StoresOptions,
        lease: float,
        open_threads: Callable[[str, int], TaskThreads],
        pools: Sequence[BufferPool],
        report: Callable[[str], None],
    ) -> None:
        """Save nothing yet.

        Args:
            groups: layers of each part of a block.
            key: called with a block's hash, group and secret.
            lease: seconds for which blocks are offered.
            open_threads: called with a name and a number of threads.
            pools: for stored blocks, and for offered blocks.
            report: called with a message if there is no room for an offer.
        """
        self._tiers, self._groups, self._key = tiers, groups, key
        self._options, self._lease, self._report = options, lease, report
        self._savers = open_threads("KVSave", options.save_threads)
        self._late_savers = open_threads("KVSaveBehind", 1)
        self._offerers = open_threads("KVOffer", options.save_threads)
        self._pool, self._offer_pool = pools
        self._lock = threading.Lock()
        self._unsaved: list[bytes] = []
        self._unoffered: list[tuple[bytes, bytes]] = []
        self._changed = False

    def save(self, saves: Sequence[Save], group: int, cache: CacheBlocks) -> None:
        """Copy the blocks of a group, offered ones first, and let threads save them."""
        began = time.monotonic()
        for save in sorted(saves, key=lambda save: save.secret is None):
            if save.secret is None:
                self._store(save, group, cache, began + self._options.save_wait_seconds)
            else:
                until = began + self._options.offer_wait_seconds
                self._offer(save, save.secret, group, cache, until)

    def leave_out(self, saves: Sequence[Save]) -> None:
        """Save none of these."""
        for save in saves:
            self._not_saved(save.hashes, save.secret)

    def take_left_out(self) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
        """Return hashes that were not stored, and secrets with hashes that were not offered."""
        with self._lock:
            left_out = self._unsaved, self._unoffered
            self._unsaved, self._unoffered = [], []
        return left_out

    def take_changed(self) -> bool:
        """Return whether statistics of stores have changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, False
        return changed

    def close(self, timeout: float) -> None:
        """Save the pending blocks, as far as that does not take too long."""
        for threads in (self._offerers, self._savers, self._late_savers):
            threads.close(timeout)

    def _store(self, save: Save, group: int, cache: CacheBlocks, until: float) -> None:
        """Let threads store blocks, except the blocks without a buffer."""
        for block_hash, block_id in zip(save.hashes, save.block_ids, strict=True):
            if (buffer := self._copy(cache, self._pool, block_id, group, until)) is None:
                self._tiers.drop()
                self._not_saved([block_hash])
                continue
            key = self._key(block_hash, group, b"")
            self._savers.submit(functools.partial(self._keep, block_hash, key, buffer))

    def _offer(
        self, save: Save, secret: bytes, group: int, cache: CacheBlocks, until: float
    ) -> None:
        """Let threads offer blocks, up to the first one for which there is no buffer."""
        for index, (block_hash, block_id) in enumerate(
            zip(save.hashes, save.block_ids, strict=True)
        ):
            if (buffer := self._copy(cache, self._offer_pool, block_id, group, until)) is None:
                self._no_room(save.hashes[index:], secret, "raise plugin.stores.save_bytes")
                return
            key = self._key(block_hash, group, secret)
            self._offerers.submit(
                functools.partial(self._offer_block, block_hash, secret, key, buffer)
            )

    def _copy(
        self, cache: CacheBlocks, pool: BufferPool, block_id: int, group: int, until: float
    ) -> Buffer | None:
        buffer = pool.acquire(max(until - time.monotonic(), 0))
        if buffer is not None:
            cache.read(block_id, self._groups[group], buffer)
        return buffer

    def _offer_block(self, block_hash: bytes, secret: bytes, key: bytes, buffer: Buffer) -> None:
        self._tiers.begin(key, buffer.views)
        tier = self._tiers.peer_tier
        if tier is not None and not tier.offer(key, buffer.views, self._lease):
            room = f"plugin.{tier.store.name} may have too little room"
            self._no_room([block_hash], secret, room)
        self._saved(buffer, self._offer_pool)

    def _keep(self, block_hash: bytes, key: bytes, buffer: Buffer) -> None:
        """Keep a block in all stores; with `write = "behind"`, later in the other stores."""
        self._tiers.begin(key, buffer.views)
        nearest, *others = self._tiers
        is_kept = nearest.keep(key, buffer.views)
        with self._lock:
            self._changed = True

        def keep_in_others() -> None:
            results = [tier.keep(key, buffer.views) for tier in others]
            if not (is_kept or any(results)):
                self._not_saved([block_hash])
            self._saved(buffer, self._pool)

        if others and self._options.write == "behind":
            self._late_savers.submit(keep_in_others)
        else:
            keep_in_others()

    def _saved(self, buffer: Buffer, pool: BufferPool) -> None:
        self._tiers.when_free(buffer.views, functools.partial(pool.release, buffer))
        with self._lock:
            self._changed = True

    def _not_saved(self, hashes: Sequence[bytes], secret: bytes | None = None) -> None:
        """Report the blocks that were not stored; with a secret, not offered."""
        with self._lock:
            if secret is None:
                self._unsaved += hashes
            else:
                self._unoffered += [(secret, block_hash) for block_hash in hashes]
            self._changed = True

    def _no_room(self, hashes: Sequence[bytes], secret: bytes, hint: str) -> None:
        with self._lock:
            is_known = any(secret == known for known, _ in self._unoffered)
        if not is_known:
            self._report(f"no room to offer the blocks of a prompt to another engine: {hint}")
        self._not_saved(hashes, secret)  # a caller that waits for them finds the reason
