"""Recording how a batch's rows change during one step."""

from __future__ import annotations

from hardpoint.plugins import Added, BatchUpdate, Move, Moved

__all__ = ["BatchUpdateBuilder"]


class BatchUpdateBuilder:
    """Gathers removals, then additions and moves, and issues them as one update.

    Removals come first: once the removed rows have been read, registering another one in the same
    step is an error, because rows may have been given away already.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._removed: list[int] = []
        self._added: list[Added] = []
        self._moved: list[Moved] = []
        self._sorted = True
        self._locked = False
        self._changed = False

    @property
    def changed(self) -> bool:
        """Whether anything happened since the last update, taken rows included."""
        return self._changed

    @property
    def has_removed(self) -> bool:
        """Whether rows are free; asking locks nothing."""
        return bool(self._removed)

    @property
    def removed(self) -> tuple[int, ...]:
        """The free rows, highest first; reading them ends registration for this step."""
        self._lock()
        return tuple(self._removed)

    def remove(self, row: int) -> None:
        """Register a row as left.

        Raises:
            RuntimeError: free rows were read already in this step.
        """
        if self._locked:
            raise RuntimeError(
                f"row {row} cannot be removed: the free rows of this step were read already"
            )
        self._removed.append(row)
        self._sorted = False
        self._changed = True

    def peek_removed(self) -> int | None:
        """Return the lowest free row, or None."""
        self._lock()
        return self._removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Take the lowest free row, or None."""
        self._lock()
        return self._removed.pop() if self._removed else None

    def add(self, added: Added) -> None:
        """Register a request that took a row."""
        self._added.append(added)
        self._changed = True

    def move(self, source: int, destination: int, direction: Move) -> None:
        """Register a move."""
        self._moved.append(Moved(source, destination, direction))
        self._changed = True

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return what changed, or None, and start the next step."""
        self._sort()
        update = None
        if self._removed or self._added or self._moved:
            update = BatchUpdate(
                batch_size, tuple(self._removed), tuple(self._added), tuple(self._moved)
            )
        self.reset()
        return update

    def reset(self) -> bool:
        """Forget everything; return whether anything had changed."""
        changed = self._changed
        self._removed, self._added, self._moved = [], [], []
        self._sorted, self._locked, self._changed = True, False, False
        return changed

    def _lock(self) -> None:
        if self._removed:
            self._locked = True
        self._sort()

    def _sort(self) -> None:
        if not self._sorted:
            self._removed.sort(reverse=True)  # so that taking the lowest is cheap
            self._sorted = True
