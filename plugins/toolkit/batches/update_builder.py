"""The builder of batch updates."""

from __future__ import annotations

import heapq

from hardpoint.plugins import BatchUpdate, Move
from hardpoint.plugins.sampling.rows import Added, Moved

__all__ = ["BatchUpdateBuilder"]


class BatchUpdateBuilder:
    """Collects removals, then additions and moves, into one update.

    Removals come first: once the removed rows have been read, another removal in the same step is
    an error, because the free rows may have been assigned already.
    """

    def __init__(self) -> None:
        self._removed: list[int] = []  # a heap
        self._added: list[Added] = []
        self._moved: list[Moved] = []
        self._locked = False

    def remove(self, row: int) -> None:
        """Register the removal of a row.

        Raises:
            RuntimeError: free rows were read already in this step.
        """
        if self._locked:
            raise RuntimeError(
                f"row {row} cannot be removed: the free rows of this step were read already"
            )
        heapq.heappush(self._removed, row)

    def peek_removed(self) -> int | None:
        """Return the lowest free row, or None."""
        if not self._removed:
            return None
        self._locked = True
        return self._removed[0]

    def pop_removed(self) -> int | None:
        """Remove and return the lowest free row, or None."""
        if not self._removed:
            return None
        self._locked = True
        return heapq.heappop(self._removed)

    def add(self, added: Added) -> None:
        """Register a request that was added."""
        self._added.append(added)

    def move(self, source: int, destination: int, direction: Move) -> None:
        """Register a move."""
        self._moved.append(Moved(source, destination, direction))

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the update, None if nothing changed, and start the next step."""
        update = None
        if self._removed or self._added or self._moved:
            removed = tuple(sorted(self._removed, reverse=True))
            update = BatchUpdate(batch_size, removed, tuple(self._added), tuple(self._moved))
        self._removed, self._added, self._moved, self._locked = [], [], [], False
        return update
