"""Passes on the stderr of a child process, and keeps its last lines.

The parent quotes them when the child ends without a message of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
from collections import deque

_LINES = 20
_CHARACTERS = 1200  # so that a message with them is not cut
_LONGEST = 1 << 16  # of a line
_DRAIN_S = 0.2


class ErrorOutput:
    """Passes on the stderr of a child, line by line, and keeps the last lines.

    It has a thread of its own, which ends with the child's end of the pipe.
    """

    def __init__(self, descriptor: int | None) -> None:
        """Make the pipe; `start` starts the thread.

        Args:
            descriptor: where the lines go; None drops them.
        """
        self._descriptor = descriptor
        self._read, self.theirs = _pipe()
        self._stop, self._stopped = _pipe()
        self._lines: deque[bytes] = deque(maxlen=_LINES)
        self._thread = threading.Thread(target=self._relay, name="WorkerErrorOutput", daemon=True)

    def start(self) -> None:
        """Begin to read, once the child has its end of the pipe."""
        os.close(self.theirs)
        self._thread.start()

    def last(self) -> str:
        """Return the last lines of a child that has ended; empty if it wrote nothing."""
        self._thread.join(_DRAIN_S)
        text = b"".join(self._lines).decode(errors="replace").strip()
        return text if len(text) <= _CHARACTERS else "..." + text[-_CHARACTERS:]

    def close(self) -> None:
        """End the thread, also if a process that the child started holds the pipe."""
        if self._thread.ident is None:
            os.close(self.theirs)
        elif self._thread is not threading.current_thread():
            self._thread.join(_DRAIN_S)
        os.close(self._stopped)  # ends the thread, which closes the rest
        if self._thread.ident is None:
            self._close()

    def _relay(self) -> None:
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        rest = b""
        try:
            while self._stop not in (ready := {number for number, _ in poller.poll()}):
                if self._read in ready:
                    part = os.read(self._read, 1 << 16)
                    if not part:
                        break
                    *lines, rest = (rest + part).splitlines(keepends=True)
                    if rest.endswith(b"\n") or len(rest) > _LONGEST:
                        lines, rest = [*lines, rest], b""
                    self._pass_on(lines)
            self._pass_on([rest] if rest else [])
        finally:
            self._close()

    def _pass_on(self, lines: list[bytes]) -> None:
        self._lines.extend(lines)
        data = b"".join(lines)
        with contextlib.suppress(OSError):  # the program's own stderr is closed
            while data and self._descriptor is not None:
                data = data[os.write(self._descriptor, data) :]

    def _close(self) -> None:
        os.close(self._read)
        os.close(self._stop)


def above_standard(descriptor: int) -> int:
    """Return a duplicate above 2: a program may have closed 0, 1 or 2, which a child replaces."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    try:
        return above_standard(ends[0]), above_standard(ends[1])
    finally:
        for end in ends:
            os.close(end)
