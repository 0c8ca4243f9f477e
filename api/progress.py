"""Progress on a terminal; silence elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
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

from hardpoint.plugins import RequestOutput

__all__ = ["ProgressDisplay", "draw_outputs"]


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


def draw_outputs(outputs: Iterator[RequestOutput], total: int) -> Iterator[RequestOutput]:
    """Yield the outputs; draw how many of `total` have come, and tokens per second so far."""
    began, prompt, tokens = time.perf_counter(), 0, 0
    with ProgressDisplay(enabled=True) as display:
        for done, output in enumerate(outputs, 1):
            prompt += len(output.prompt_token_ids)
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            seconds = time.perf_counter() - began
            note = f"{prompt / seconds:.0f} prompt, {tokens / seconds:.0f} output tokens/s"
            display.report("Generating", done, total, note)
            yield output
