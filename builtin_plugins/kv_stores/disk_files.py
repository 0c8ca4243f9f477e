"""Folders and files of this user alone, and locks that end with their process.

The store "disk" opens all its files here: several engines share them, and others must not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock
_MOST_PARTS = 1024  # of one call, IOV_MAX
_POLL_SECONDS = 0.0002
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full."""


class RefusedError(Exception):
    """A folder or file cannot be used; the message gives the reason."""


class DamagedError(RefusedError):
    """A file has invalid contents, but may be replaced."""


class LockTimeoutError(RefusedError):
    """Another process has kept something locked for too long."""


def file_system_bytes(path: Path) -> int:
    """Return the size of the file system that a path is on, or will be; 0 if it is unknown.

    Raises:
        OSError: it cannot be found out.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def open_folder(path: str | Path, within: int | None = None) -> int:
    """Return the descriptor of a folder that only this user can use; it is made if it is not there.

    Args:
        path: path of the folder.
        within: descriptor of the folder that a relative path starts from.

    Raises:
        RefusedError: it is itself a symbolic link, or not a folder, or others can use it.
        OSError: it cannot be opened.
    """
    if within is None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, 0o700, dir_fd=within)
    except FileExistsError:
        pass
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return _checked(_open(path, flags, within), path, 0o700)


def open_file(name: str, within: int, flags: int = 0) -> int:
    """Return the descriptor of a file that only this user can use; it is made if it is not there.

    Args:
        name: name of the file.
        within: descriptor of its folder.
        flags: flags of `os.open` besides reading and writing.

    Raises:
        RefusedError: it is a symbolic link, or not a file, or others can use it.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, a named pipe in its place would be waited for.
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    return _checked(_open(name, flags, within), name, 0o600)


def _open(path: str | Path, flags: int, within: int | None) -> int:
    try:
        return os.open(path, flags, 0o600, dir_fd=within)
    except OSError as cause:
        if cause.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            is_folder = flags & os.O_DIRECTORY
            expected = f"a {'folder' if is_folder else 'file'}, and not a link to one"
            raise RefusedError(f"expected {str(path)!r} to be {expected}") from None
        raise


def _checked(descriptor: int, path: str | Path, mode: int) -> int:
    """Return a descriptor; close it if other users can use its file."""
    status = os.fstat(descriptor)
    actual = stat.S_IMODE(status.st_mode)
    wrong = None
    if mode == 0o600 and not stat.S_ISREG(status.st_mode):
        wrong = "is not a file"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}, and not to this process's, {os.geteuid()}"
    elif actual & ~mode & 0o777:
        wrong = f"has mode {actual:04o}: others may use it; `chmod {mode:o}` would do"
    if wrong is None:
        return descriptor
    os.close(descriptor)
    raise RefusedError(f"{str(path)!r} {wrong}")


class FileLocks:
    """Exclusive and shared locks of an open file, by number.

    They belong to the opened file, so two stores of one process have locks of their own, and the
    system releases them when the process ends, however it does.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def try_lock(self, number: int, *, shared: bool = False) -> bool:
        """Lock, or change the kind of a lock; return False if another lock forbids it."""
        try:
            self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, number)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def lock(self, number: int, seconds: float) -> bool:
        """Wait for an exclusive lock; return whether it was free in time."""
        deadline = time.monotonic() + seconds
        while not self.try_lock(number):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def unlock(self, number: int) -> None:
        """Release a lock."""
        self._set(fcntl.F_UNLCK, number)

    def _set(self, kind: int, number: int) -> None:
        fields = _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, fields)

    def mark_used(self) -> None:
        """Set the file's time to now."""
        os.utime(self._descriptor)

    def close(self) -> None:
        """Close the file; its locks end."""
        os.close(self._descriptor)


def read_parts(descriptor: int, parts: Sequence[memoryview], start: int) -> bool:
    """Read bytes of a file into buffers; return whether there were so many."""
    return _move(os.preadv, descriptor, parts, start)


def write_parts(descriptor: int, parts: Sequence[memoryview], start: int) -> None:
    """Write buffers to a file.

    Raises:
        OSError: not all could be written.
    """
    if not _move(os.pwritev, descriptor, parts, start):
        raise OSError(errno.EIO, "the file does not accept more bytes")


def _move(
    move: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    parts: Sequence[memoryview],
    start: int,
) -> bool:
    left, size = list(parts), sum(map(len, parts))
    while size:
        count = move(descriptor, left[:_MOST_PARTS], start)
        if not count:
            return False
        start, size = start + count, size - count
        if size:
            left = _without(left, count)
    return True


def _without(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return parts of buffers without their first bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
