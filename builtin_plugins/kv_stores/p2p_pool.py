"""Blocks that an engine keeps for itself and others, and its single-use offers."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint.plugins.kv_store import BlockBuffer

_MOST_GONE = 1 << 16  # keys that are remembered


@dataclass(slots=True)
class _Offer:
    """A block that one other engine may take.

    Attributes:
        seconds: length of its lease, also when it is renewed.
        until: end of the lease, on the monotonic clock.
    """

    block: bytes
    seconds: float
    until: float


class PeerBlocks:
    """Blocks up to a number; offers are kept until their lease ends, others until there is no room.

    Blocks are never changed, so that one can be sent while another one takes its place. All methods
    are for any thread.
    """

    def __init__(
        self, capacity: int, report_evicted: Callable[[Sequence[bytes]], None] = lambda _keys: None
    ) -> None:
        """`report_evicted`: see `KVStoreContext`."""
        self._capacity = capacity
        self._report_evicted = report_evicted
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._offers: dict[bytes, _Offer] = {}
        self._ends: list[tuple[float, bytes]] = []  # heap of when to look at an offer
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # keys of offers that have ended
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        """Return whether a block is kept for anybody."""
        return key in self._blocks

    def get(self, key: bytes) -> bytes | None:
        """Return a block that is kept for anybody."""
        with self._lock:
            if (block := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
            return block

    def keep(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Keep a block instead of an older one, or of the least recently used ones."""
        if len(self._offers) >= self._capacity:
            return False
        block = bytes(buffer.whole)
        with self._lock:
            self._blocks[key] = block
            self._blocks.move_to_end(key)
            evicted = self._evict()
        if evicted:
            self._report_evicted(evicted)
        return key not in evicted

    def offer(self, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """Offer a block; return whether there was room. If not, none waits for it."""
        self.sweep()
        if len(self._offers) >= self._capacity:
            self.end(key)
            return False
        block = bytes(buffer.whole)
        until = time.monotonic() + seconds
        with self._lock:
            self._offers[key] = _Offer(block, seconds, until)
            heapq.heappush(self._ends, (until, key))
            self._gone.pop(key, None)
            evicted = self._evict()
        if evicted:
            self._report_evicted(evicted)
        return True

    def _evict(self) -> list[bytes]:
        evicted = []
        while self._blocks and len(self._blocks) + len(self._offers) > self._capacity:
            evicted.append(self._blocks.popitem(last=False)[0])
        return evicted

    def offered(self, key: bytes) -> bytes | None:
        """Return an offered block before its lease ends."""
        with self._lock:
            offer = self._offers.get(key)
            if offer is None:
                return None
            if time.monotonic() < offer.until:
                return offer.block
            self._end(key)
            return None

    def end(self, key: bytes) -> bool:
        """Offer a block no more; return whether it was offered."""
        with self._lock:
            return self._end(key)

    def _end(self, key: bytes) -> bool:
        self._gone[key] = None
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        return self._offers.pop(key, None) is not None

    def has_ended(self, key: bytes) -> bool:
        """Return whether a block was offered and is not any more."""
        return key in self._gone

    def renew(self, keys: Sequence[bytes]) -> None:
        """Let the leases of offers begin again."""
        now = time.monotonic()
        with self._lock:
            for key in keys:
                if (offer := self._offers.get(key)) is not None and now < offer.until:
                    offer.until = now + offer.seconds

    def sweep(self) -> None:
        """Drop the offers with an expired lease."""
        now = time.monotonic()
        with self._lock:
            while self._ends and self._ends[0][0] <= now:
                _, key = heapq.heappop(self._ends)
                if (offer := self._offers.get(key)) is None:
                    continue  # it was taken
                if now >= offer.until:
                    self._end(key)
                else:
                    heapq.heappush(self._ends, (offer.until, key))  # it was renewed

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self._offers.clear()
            self._ends.clear()
            self._gone.clear()
