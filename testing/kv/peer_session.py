"""A KV store that hands blocks to other engines, in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.plugins.kv_store import BlockBuffer, PeerKVStore

from .store_blocks import StoredBlocks
from .store_session import StoreSession


class PeerSession(StoreSession):
    """Calls a store, and checks what it answers; what is offered is apart from what is stored."""

    def __init__(
        self,
        store: PeerKVStore,
        sizes: Sequence[int],
        blocks: StoredBlocks,
        offered: StoredBlocks,
        seconds: float,
    ) -> None:
        """Use a store.

        Args:
            store: an open one.
            sizes: of the parts of its buffers.
            blocks: what was stored in it.
            offered: what the engines have offered, under the same keys.
            seconds: in which a call has to return.
        """
        super().__init__(store, sizes, blocks, seconds)
        self._peer_store = store
        self._offered = offered

    @property
    def peers(self) -> Any:
        """What the store names as its peers."""
        return self._peer_store.peers

    def offer(self, index: int, seconds: float) -> bool:
        """Offer a block; return whether there was room."""

        def offer(key: bytes, buffer: BlockBuffer) -> Any:
            return self._peer_store.offer(key, buffer, seconds)

        self._offered.begin(index, 0)
        return self._send("offer", offer, index, 0)

    def fetch(self, peer: str, index: int, seconds: float) -> bool:
        """Fetch a block; return whether it was there."""

        def fetch(key: bytes, buffer: BlockBuffer) -> Any:
            return self._peer_store.fetch(peer, key, buffer, seconds)

        return self._receive("fetch", fetch, index, self._offered)

    def renew(self, index: int, seconds: float, peer: str | None = None) -> None:
        """Renew a lease."""
        with self.calling(f"renew of key {index}"):
            self._peer_store.renew([self._blocks.keys[index]], seconds, peer)
