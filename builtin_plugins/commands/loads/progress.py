"""A line of progress on a terminal."""

from __future__ import annotations

import shutil
import sys


class ProgressLine:
    """One line on standard error that is written again and again, if that is a terminal."""

    def __init__(self, *, is_shown: bool) -> None:
        """`is_shown`: False shows nothing in any case."""
        self._is_shown = is_shown and sys.stderr.isatty()
        self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Write the line; text that does not fit is cut."""
        if not self._is_shown:
            return
        text = text[: max(shutil.get_terminal_size().columns - 1, 0)]
        sys.stderr.write(f"\r{text.ljust(self._width)}" if text else f"\r{' ' * self._width}\r")
        sys.stderr.flush()
        self._width = len(text)
