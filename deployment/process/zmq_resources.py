"""System resources for the ZMQ sockets of an engine process: a private folder, and their end."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from hardpoint.plugins import HardpointError

_log = logging.getLogger("hardpoint")

SOCKET_NAMES = ("input", "output")
"""Names of the sockets in their folder."""

CUT_S = 0.05
"""Seconds from the break of a connection to the close of its socket.

If a socket with many unsent messages is closed in the instant in which its connection breaks,
libzmq 4.3.5 may wait for ever for an answer of its own threads: one of 100 such closes did; none of
3900 after this time. A break is reported before those threads have handled it.
"""

BREAK_TIMEOUT_S = 1.0
"""How long the break of a connection to a dead peer is awaited; a peer may fail and go on."""

_END_S = 5.0

_LONGEST_NAME = max(map(len, SOCKET_NAMES))
_PATH_LIMIT = zmq.IPC_PATH_MAX_LEN or 103  # the shortest of all systems
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def make_socket_folder() -> Path:
    """Make a folder that only this user can open, short enough for the paths of sockets.

    It is made in the directory of `tempfile`; if that has a path that is too long or holds no
    private folders, in a short one of the system.

    Raises:
        HardpointError: none can be made; the message has the attempts, with lengths and the limit.
    """
    refused = []
    for base in _bases():
        try:
            return _private_folder(base)
        except _UnfitError as reason:
            refused.append(f"{base!r} {reason}")
        except OSError as cause:
            refused.append(f"{base!r} gives none ({cause.strerror or cause})")
    raise HardpointError(
        f"sockets of the engine: expected a directory for a private folder, tried in turn: "
        f"{'; '.join(refused)}; set TMPDIR to a directory of your own with a short path"
    )


def end_context(
    context: zmq.Context[zmq.Socket[bytes]], owner: str, timeout_s: float = _END_S
) -> bool:
    """End a context after its owners closed its sockets; return whether it has ended.

    If it does not end in time, its threads and descriptors are left to it, which is logged: what
    comes after must not wait for it.

    Args:
        context: the context.
        owner: names its sockets in the log.
        timeout_s: seconds, more than the sockets linger.
    """
    ending = threading.Thread(target=context.term, name="ZMQContextEnd", daemon=True)
    ending.start()
    ending.join(timeout_s)
    if ending.is_alive():
        _log.error(
            "%s were closed, and libzmq has not released them within %g s; their threads and "
            "descriptors stay with this process (pid %d) until it ends",
            owner,
            timeout_s,
            os.getpid(),
        )
    return not ending.is_alive()


class ConnectionCount:
    """Number of connections to a socket that is bound, by the reports of libzmq."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._count = 0

    def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until all connections are broken; return whether they are."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._monitor.poll(0):
                event = parse_monitor_message(self._monitor.recv_multipart())["event"]
                self._count += 1 if event == zmq.EVENT_ACCEPTED else -1
            remaining_s = deadline - time.monotonic()
            if self._count <= 0 or remaining_s <= 0:
                return self._count <= 0
            self._monitor.poll(int(remaining_s * 1000) + 1)

    def close(self) -> None:
        """End the reports, before their socket is closed: libzmq blocks if they are not read."""
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)


class _UnfitError(Exception):
    """A directory cannot hold the folder."""


def _bases() -> Iterator[str]:
    seen = set()
    try:
        seen.add(preferred := tempfile.gettempdir())
        yield preferred
    except OSError:  # it found no directory that can be written
        pass
    yield from (base for base in _SHORT_FOLDERS if base not in seen)


def _private_folder(base: str) -> Path:
    try:
        length = len(os.path.join(base, "hardpoint-12345678", "x" * _LONGEST_NAME).encode())
    except UnicodeEncodeError:
        raise _UnfitError("is no valid Unicode") from None
    if length > _PATH_LIMIT:
        raise _UnfitError(f"makes socket paths of {length} bytes; a system allows {_PATH_LIMIT}")
    folder = tempfile.mkdtemp(prefix="hardpoint-", dir=base)
    try:
        os.chmod(folder, 0o700)  # a umask may have taken the owner's permissions too
        status = os.lstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise _UnfitError("keeps no owners and permissions, so that others could open it")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Path(folder)
