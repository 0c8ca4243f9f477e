"""Notifications to the service manager that started the server, such as systemd."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping

_log = logging.getLogger("hardpoint")

_SOCKET, _WATCHDOG_USEC, _WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class ServiceManager:
    """Notifies a service manager of the server's state, by datagrams; without one it does nothing.

    What cannot be sent is logged once, and the server runs on.
    """

    def __init__(
        self,
        path: str | None = None,
        watchdog_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send to a socket.

        Args:
            path: path of a Unix socket; one that begins with "@" is in the abstract namespace. None
                sends nothing.
            watchdog_seconds: time without a sign of life after which the manager ends the server; 0
                asks for none.
            clock: seconds.
        """
        self._path, self._clock = path, clock
        self._interval = watchdog_seconds / 2
        self._next_sign: float | None = None
        self._is_stopping = self._has_failed = False

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Return the manager that variables name; they are removed, so that engines have none."""
        path, microseconds, pid = (
            environment.pop(name, "") for name in (_SOCKET, _WATCHDOG_USEC, _WATCHDOG_PID)
        )
        if not path:
            return cls()
        if not path.startswith(("/", "@")):
            _log.warning(
                "%s: expected an absolute path, or one that begins with @, got %r; the service "
                "manager is not notified",
                _SOCKET,
                path,
            )
            return cls()
        is_watched = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        return cls(path, int(microseconds) / 1e6 if is_watched else 0.0)

    def ready(self) -> None:
        """Report that requests are answered; signs of life are expected from now on."""
        self._send(b"READY=1")
        self._next_sign = self._clock()

    def ping(self) -> None:
        """Give a sign if one is due; to be called often, where a server that hangs does not."""
        if self._interval and self._next_sign is not None and self._clock() >= self._next_sign:
            self._next_sign = self._clock() + self._interval
            self._send(b"WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the server ends."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send(b"STOPPING=1")

    def _send(self, message: bytes) -> None:
        if self._path is None:
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sender:
                sender.setblocking(False)
                sender.sendto(message, address)
        except OSError as cause:
            if not self._has_failed:
                _log.warning("%s: %s cannot be notified: %s", _SOCKET, self._path, cause)
            self._has_failed = True
