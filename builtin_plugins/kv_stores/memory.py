"""Blocks in host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import KVStore
from hardpoint.plugins.kv_store import BlockBuffer


class MemoryStore(KVStore):
    """Keeps the blocks that were used last, up to a size."""

    contract = 1

    class Options(plugins.Options):
        """Its size.

        Attributes:
            size_bytes: of all blocks together, in each rank.
        """

        size_bytes: Annotated[int, Meta(ge=1)] = 1 << 30

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Start empty."""
        super().__init__(context)
        self._blocks: OrderedDict[bytes, bytearray] = OrderedDict()
        self._capacity = self.options.size_bytes // context.block_bytes
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are there."""
        return [key in self._blocks for key in keys]

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Copy a block, in the place of the one that was not used for longest."""
        if not self._capacity:
            return False
        block = bytearray(buffer.whole)
        with self._lock:
            self._blocks[key] = block
            self._blocks.move_to_end(key)
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
        return True

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Copy a block."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                return False
            self._blocks.move_to_end(key)
        buffer.whole[:] = block
        return True

    def close(self) -> None:
        """Drop the blocks."""
        with self._lock:
            self._blocks.clear()
