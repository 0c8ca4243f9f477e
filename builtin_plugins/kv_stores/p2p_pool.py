"""The blocks that an engine keeps for itself and others, and those that it offers once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hardpoint.plugins.kv_store import BlockBuffer

_MOST_GONE = 1 << 16  # keys that are remembered


@dataclass(slots=True)
class _Offer:
    """A block that one other engine may take.

    Attributes:
        seconds: of its lease, also when it is renewed.
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

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._offers: dict[bytes, _Offer] = {}
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
        """Keep a block in the place of those that were not used for longest."""
        if len(self._offers) >= self._capacity:
            return False
        if key not in self._blocks:
            block = bytes(buffer.whole)
            with self._lock:
                self._blocks[key] = block
                self._evict()
        return key in self._blocks

    def offer(self, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """Offer a block; return whether there was room. If not, none waits for it."""
        self.sweep()
        if len(self._offers) >= self._capacity:
            self.end(key)
            return False
        block = bytes(buffer.whole)
        with self._lock:
            self._offers[key] = _Offer(block, seconds, time.monotonic() + seconds)
            self._gone.pop(key, None)
            self._evict()
        return True

    def _evict(self) -> None:
        while self._blocks and len(self._blocks) + len(self._offers) > self._capacity:
            self._blocks.popitem(last=False)

    def offered(self, key: bytes) -> bytes | None:
        """Return a block whose lease has not ended."""
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
        """Drop the offers whose lease has ended."""
        now = time.monotonic()
        with self._lock:
            for key in [key for key, offer in self._offers.items() if now >= offer.until]:
                self._end(key)

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self._offers.clear()
            self._gone.clear()
