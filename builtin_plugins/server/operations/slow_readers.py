"""Connections of clients that do not read their answer."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import termios
from collections.abc import Callable


class WriteWatch:
    """Ends a connection if its client reads nothing for a while and bytes are pending."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        is_writing: Callable[[], bool],
        end: Callable[[], None],
    ) -> None:
        """Watch nothing yet.

        Args:
            transport: transport of the connection.
            loop: runs the timer.
            seconds: time without reading after which the connection ends.
            is_writing: returns whether the answer still comes, and the client keeps up with it.
            end: ends the connection.
        """
        self._transport, self._loop, self._seconds = transport, loop, seconds
        self._is_writing, self._end = is_writing, end
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def start(self) -> None:
        """Start the time, unless it runs."""
        if self._timer is None:
            self._unsent = self._unread()
            self._timer = self._loop.call_later(self._seconds, self._check)

    def stop(self) -> None:
        """Stop the time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unread(self) -> int:
        """Return how much the client has not read, as far as this machine knows."""
        unsent = self._transport.get_write_buffer_size()
        number = self._transport.get_extra_info("socket").fileno()
        if number < 0:
            return unsent
        in_kernel = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(number, termios.TIOCOUTQ, in_kernel)
        return unsent + in_kernel[0]

    def _check(self) -> None:
        self._timer = None
        if self._is_writing() or not self._transport.get_write_buffer_size():
            return
        if self._unread() < self._unsent:
            self.start()
            return
        self._end()
