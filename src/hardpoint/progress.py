"""Progress: bars on a terminal, lines in a notebook or on a plain terminal, silence elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from hardpoint.errors import ConfigError, shown
from hardpoint.plugins import RequestOutput

if TYPE_CHECKING:
    from .progress_bars import ProgressBars

__all__ = ["ProgressDisplay", "check_progress", "draw_outputs", "is_terminal", "shows_progress"]

_SECONDS_PER_LINE = 2.0


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a standard stream is a terminal; it may be absent, closed or replaced."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):  # a stand-in that can only write; closed
        return False


def check_progress(progress: object) -> None:
    """Check the parameter `progress` of an LLM.

    Raises:
        ConfigError: it is neither a bool nor None.
    """
    if not isinstance(progress, bool | None):
        raise ConfigError(f"progress: expected true, false or None, got {shown(progress)}")


def shows_progress(stream: TextIO | None) -> bool:
    """Return whether progress is shown on a stream by default: a terminal, or a notebook's."""
    return is_terminal(stream) or _is_notebook(stream)


def _draws_bars(stream: TextIO) -> bool:
    plain = _is_notebook(stream) or os.environ.get("TERM") in ("dumb", "unknown")
    return is_terminal(stream) and not plain


def _is_notebook(stream: TextIO | None) -> bool:
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class _Lines:
    """Progress as lines of text, one in `_SECONDS_PER_LINE`.

    What takes less shows none, unless it was asked for on a stream that shows none by default.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_asked_for = stream, not shows_progress(stream)
        self._next = time.monotonic() + _SECONDS_PER_LINE
        self._reported: set[str] = set()

    def report(self, task: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        is_end = done >= total and (self._is_asked_for or task in self._reported)
        if now < self._next and not is_end:
            return
        self._reported.add(task)
        self._next = now + _SECONDS_PER_LINE
        print(f"{task}: {done}/{total}{note and f', {note}'}", file=self._stream, flush=True)


class ProgressDisplay:
    """A context in which `report` draws bars on standard error.

    Where the cursor does not move, in a notebook for example, it prints lines instead.
    It shows nothing where that is neither a terminal nor a notebook's, unless `enabled` decides
    otherwise, and nothing more once standard error cannot be written.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        """`enabled`: None decides by standard error being a terminal."""
        self._bars: ProgressBars | None = None
        self._lines: _Lines | None = None
        stream = sys.stderr
        if stream is None or not (shows_progress(stream) if enabled is None else enabled):
            return
        if not _draws_bars(stream):
            self._lines = _Lines(stream)
            return
        from .progress_bars import ProgressBars  # noqa: PLC0415 - rich, for terminals alone

        self._bars = ProgressBars(stream)

    def __enter__(self) -> ProgressDisplay:
        self._draw(lambda bars: bars.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._draw(lambda bars: bars.stop())

    def report(self, task: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps of `task` are over."""

        if self._lines is not None:
            try:
                self._lines.report(task, done, total, note)
            except (OSError, ValueError):
                self._lines = None
            return
        self._draw(lambda bars: bars.report(task, done, total, note))

    def _draw(self, change: Callable[[ProgressBars], None]) -> None:
        """Change the bars; a stream that fails ends the drawing, never the call."""
        if self._bars is None:
            return
        try:
            change(self._bars)
        except (OSError, ValueError):  # the terminal is gone, or the stream was closed
            self._bars = None


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
