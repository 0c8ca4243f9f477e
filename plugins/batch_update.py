"""How the rows of a running batch changed, for processors that keep books of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from .params import SamplingParams

__all__ = ["Added", "BatchUpdate", "Move", "Moved", "RowMap"]

T = TypeVar("T")


class Move(Enum):
    """What a move does."""

    UNIDIRECTIONAL = "unidirectional"
    """The source's state goes to the destination; the source is empty afterwards."""
    SWAP = "swap"
    """Source and destination change places; one of them may be empty."""


@dataclass(frozen=True, eq=False)
class Added:
    """A request that took a row. Whatever stood there before is gone.

    Attributes:
        row: its row.
        params: what it asked for; `plugin_args` holds the checked arguments by plugin name.
        prompt_token_ids: None for a prompt that came as embeddings.
        output_token_ids: grows as tokens are chosen; read it, never keep a copy.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: Sequence[int] | None
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class Moved:
    """A request that changed its row."""

    source: int
    destination: int
    direction: Move


@dataclass(frozen=True)
class BatchUpdate:
    """What changed since the last step. Apply `removed`, then `added`, then `moved`, in order.

    Attributes:
        batch_size: rows after the update; rows 0 to batch_size - 1 are in use.
        removed: rows that were left and not taken again, highest first.
    """

    batch_size: int
    removed: tuple[int, ...] = ()
    added: tuple[Added, ...] = ()
    moved: tuple[Moved, ...] = ()


class RowMap(Generic[T]):
    """State by row, kept true through batch updates.

    For batch-level processors: give it a function that makes the state of an added request, or
    returns None for one that needs none.
    """

    def __init__(self, start: Callable[[Added], T | None]) -> None:
        """`start` is called once per added request."""
        self._start = start
        self._states: dict[int, T] = {}

    def __len__(self) -> int:
        """Return the number of rows with state."""
        return len(self._states)

    def __contains__(self, row: int) -> bool:
        """Whether a row has state."""
        return row in self._states

    def __getitem__(self, row: int) -> T:
        """Return a row's state; KeyError if it has none."""
        return self._states[row]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows with state, in ascending order."""
        return iter(sorted(self._states))

    def apply(self, update: BatchUpdate | None) -> bool:
        """Carry the states over an update; return whether anything changed."""
        if update is None:
            return False
        changed = False
        for row in update.removed:
            changed |= self._states.pop(row, None) is not None
        for added in update.added:
            changed |= self._states.pop(added.row, None) is not None
            if (state := self._start(added)) is not None:
                self._states[added.row] = state
                changed = True
        for move in update.moved:
            changed |= self._move(move)
        return changed

    def _move(self, move: Moved) -> bool:
        # Both are taken out before either is put back, so that chained moves never overwrite.
        source = self._states.pop(move.source, None)
        destination = self._states.pop(move.destination, None)
        if source is not None:
            self._states[move.destination] = source
        if move.direction is Move.SWAP and destination is not None:
            self._states[move.source] = destination
        return source is not None or destination is not None
