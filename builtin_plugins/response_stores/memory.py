"""Responses in the memory of the server's process."""

from __future__ import annotations

import time
from collections.abc import Callable

from .bounds import Bounds


class MemoryStore:
    """Keeps the newest responses, as many as its bounds allow; a restart forgets them."""

    is_shared = False

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep nothing yet; `clock` returns seconds."""
        self._bounds, self._clock = bounds, clock
        self._kept: dict[tuple[str, str], tuple[float, bytes]] = {}  # oldest first
        self._size = 0

    async def put(self, owner: str, response_id: str, content: bytes) -> None:
        """Keep a response.

        Raises:
            RequestError: it is too large.
        """
        self._bounds.check(content)
        self._forget((owner, response_id))
        now = self._clock()
        self._kept[owner, response_id] = now + self._bounds.seconds, content
        self._size += len(content)
        while self._size > self._bounds.max_bytes or next(iter(self._kept.values()))[0] <= now:
            self._forget(next(iter(self._kept)))

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
        _, content = self._kept.pop(key, (0.0, b""))
        self._size -= len(content)
