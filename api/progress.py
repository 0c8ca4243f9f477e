"""Progress on a terminal; silence elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["ProgressDisplay"]


class ProgressDisplay:
    """A context in which `report` draws bars on standard error.

    It draws nothing where that is no terminal, unless `enabled` says otherwise.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        """`enabled`: None decides by standard error being a terminal."""
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stderr, force_terminal=self._enabled or None),
            transient=True,
            disable=not self._enabled,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressDisplay:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing and clear the bars."""
        self._progress.stop()

    def report(self, what: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps of `what` are over."""
        if not self._enabled:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, note=note)
        self._progress.update(self._tasks[what], completed=done, total=total, note=note)
