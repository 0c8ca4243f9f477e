"""Which requests hold the slots of adapters, and which wait for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_PATIENCE_SECONDS = 1.0
"""After this, later requests do not overtake a request that waits for a slot."""


class Leases:
    """Which content each slot has, and which requests hold it there.

    A slot is free once no request holds it; it keeps its content until another one needs it.
    """

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._slots: dict[int, str | None] = dict.fromkeys(range(count))  # longest unused first
        self._of: dict[str, str] = {}  # content of each request with a lease
        self._waiting: dict[str, float] = {}  # requests since when, in the order of their arrival

    def acquire(self, request_id: str, content: str) -> str | None:
        """Give a request a lease; return why it has to wait, or None."""
        self._waiting.setdefault(request_id, self._clock())
        oldest = next(iter(self._waiting))
        if request_id != oldest and self._clock() - self._waiting[oldest] > _PATIENCE_SECONDS:
            return "a request before it waits for a slot of its adapter (adapters.max_loras)"
        slot = self._find(content)
        if slot is None:
            return (
                f"a slot for its adapter: requests with {len(self._slots)} others run "
                f"(adapters.max_loras)"
            )
        del self._waiting[request_id]
        self._slots.pop(slot)
        self._slots[slot] = content
        self._of[request_id] = content
        return None

    def _find(self, content: str) -> int | None:
        held = set(self._of.values())
        slots = self._slots.items()
        matches = (slot for slot, has in slots if has == content)
        free = (slot for slot, has in slots if has not in held)
        return next(matches, next(free, None))

    def slot(self, content: str) -> int:
        """Return the slot of a content that a request holds."""
        return next(slot for slot, has in self._slots.items() if has == content)

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._of.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def has(self, content: str) -> bool:
        """Return whether a request holds a content."""
        return content in self._of.values()

    def is_holder(self, request_id: str) -> bool:
        """Return whether a request holds a slot."""
        return request_id in self._of

    def contents(self) -> Sequence[str]:
        """Return the contents that requests hold."""
        return list(dict.fromkeys(self._of.values()))

    def counts(self) -> Mapping[str, int]:
        """Return how many requests hold each content."""
        return Counter(self._of.values())
