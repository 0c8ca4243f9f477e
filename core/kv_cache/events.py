"""Writes down what can be found in the cache, and what no more, for those who want to know."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.plugins import Request
from hardpoint.plugins.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

__all__ = ["EventLog"]


class EventLog:
    """The KV cache events since they were last taken."""

    def __init__(self, block_size: int) -> None:
        """Begin with none."""
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(
        self, request: Request, group: int, hashes: Sequence[bytes], positions: Sequence[int]
    ) -> None:
        """Note blocks of a request that can be found from now on.

        Args:
            hashes: of the request's blocks from its first one on.
            positions: of those blocks in its table, ascending.
        """
        start = 0
        for i, position in enumerate(positions):
            if i + 1 < len(positions) and positions[i + 1] == position + 1:
                continue
            self._stored_run(request, group, hashes, positions[start], position + 1)
            start = i + 1

    def _stored_run(
        self, request: Request, group: int, hashes: Sequence[bytes], first: int, end: int
    ) -> None:
        size, lora = self._block_size, request.source.lora
        self._events.append(
            BlockStored(
                block_hashes=list(hashes[first:end]),
                parent_hash=hashes[first - 1] if first else None,
                token_ids=request.token_ids(first * size, end * size),
                block_size=size,
                lora=None if lora is None else lora.name,
                group=group,
            )
        )

    def removed(self, hashes_by_group: Sequence[list[bytes]]) -> None:
        """Note blocks that can be found no more, one list per group."""
        for group, hashes in enumerate(hashes_by_group):
            if hashes:
                self._events.append(BlockRemoved(block_hashes=hashes, group=group))

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
