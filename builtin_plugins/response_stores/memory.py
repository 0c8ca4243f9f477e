"""Responses in the memory of the server's process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from .bounds import Bounds


class MemoryResponseStore:
    """Keeps the newest responses, as many as its bounds allow; a restart forgets them.

    Beyond them, the oldest go of the owner who has most, so that no owner empties it for others.
    """

    is_shared = False

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep nothing yet; `clock` returns seconds."""
        self._bounds, self._clock = bounds, clock
        self._kept: dict[tuple[str, str], tuple[float, bytes]] = {}  # oldest first
        self._ids: dict[str, dict[str, None]] = {}  # of each owner, oldest first
        self._sizes: Counter[str] = Counter()
        self._size = 0

    async def put(self, owner: str, response_id: str, content: bytes) -> None:
        """Keep a response.

        Raises:
            RequestError: it is too large.
        """
        self._bounds.check(content)
        self._forget((owner, response_id))
        now, size = self._clock(), len(content)
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._forget(next(iter(self._kept)))
        while self._size + size > self._bounds.max_bytes:
            largest = max(self._ids, key=lambda name: self._sizes[name] + size * (name == owner))
            self._forget((largest, next(iter(self._ids[largest]))))
        self._kept[owner, response_id] = now + self._bounds.seconds, content
        self._ids.setdefault(owner, {})[response_id] = None
        self._sizes[owner] += size
        self._size += size

    async def get(self, owner: str, response_id: str) -> bytes | None:
        """Return a response."""
        ends_at, content = self._kept.get((owner, response_id), (0.0, None))
        return content if ends_at > self._clock() else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response."""
        was_there = await self.get(owner, response_id) is not None
        self._forget((owner, response_id))
        return was_there

    def _forget(self, key: tuple[str, str]) -> None:
        if key not in self._kept:
            return
        (owner, response_id), (_, content) = key, self._kept.pop(key)
        self._size -= len(content)
        self._sizes[owner] -= len(content)
        del self._ids[owner][response_id]
        if not self._ids[owner]:
            del self._ids[owner], self._sizes[owner]
