"""Bars of progress, drawn by rich; imported when a terminal is to show some."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["ProgressBars"]


class ProgressBars:
    """A bar for each reported task, on a terminal with a movable cursor."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` is standard error."""
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=stream, force_terminal=True),
            transient=True,
        )

    def start(self) -> None:
        """Start drawing."""
        self._progress.start()

    def stop(self) -> None:
        """Stop drawing and clear the bars."""
        self._progress.stop()

    def report(self, task: str, done: int, total: int, note: str) -> None:
        """Show that `done` of `total` steps of `task` are over."""
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total, note=note)
        self._progress.update(self._tasks[task], completed=done, total=total, note=note)
