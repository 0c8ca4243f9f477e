"""Memory that processes of one host share, and messages in it.

A region has members, threads or processes. They wait for each other in the compiled kernels, where
one that waits spins briefly, yields, then sleeps; each wait ends when the region is aborted, or
when another member's process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from . import cpu

__all__ = [
    "MAX_MEMBERS",
    "AbortedError",
    "BroadcastRing",
    "NoMemoryError",
    "Region",
    "RegionSession",
    "allocate",
    "ring_size",
]

MAX_MEMBERS = 64
"""Of a region; as in kernels/src/waiting.h."""

_HEAD = struct.Struct("=QQI")  # of a region: a mark, its bytes, its members
_MAGIC = 0x3130676E69746177
_SHM = Path("/dev/shm")
_REASON_BYTES = 512
_ABORTED, _TIMED_OUT, _INTERRUPTED = -1, -2, -3
_GONE, _DIFFERS = -1000, -2000
_LIMITS = (  # of a control group: what it allows, and what it uses
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


class AbortedError(RuntimeError):
    """A region was aborted, or another member has ended; the message gives the reason."""


class NoMemoryError(RuntimeError):
    """There is too little memory for a region; the message has the size that it needs."""


class Region:
    """Memory without a name, which lasts while a process has it open or mapped.

    Attributes:
        address: where it is mapped.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory; the descriptor stays the caller's."""
        self._memory = mmap.mmap(descriptor, 0)
        view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(view)

    @property
    def num_members(self) -> int:
        """Number of members that it was created for.

        Raises:
            ValueError: it has other contents.
        """
        if len(self._memory) >= _HEAD.size:
            magic, num_bytes, members = _HEAD.unpack_from(self._memory)
            if magic == _MAGIC and num_bytes == len(self._memory):
                return int(members)
        raise ValueError("expected memory that this version of hardpoint shares, got other memory")

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def allocate(num_bytes: int, owner: str) -> int:
    """Allocate memory of zeros, all of it now.

    Args:
        num_bytes: how much.
        owner: names it in the message.

    Returns:
        Its descriptor, which the caller closes; children do not inherit it.

    Raises:
        NoMemoryError: there is too little.
    """
    available, source = min(_available())
    if num_bytes > available:
        raise NoMemoryError(_too_little(owner, num_bytes, f"{source} allows {available} more"))
    if hasattr(os, "memfd_create"):
        descriptor, place = os.memfd_create("hardpoint", os.MFD_CLOEXEC), "memory"
    else:
        descriptor, name = tempfile.mkstemp(prefix="hardpoint-", dir=_SHM)
        os.unlink(name)
        place = str(_SHM)
    try:
        # Not ftruncate alone: it promises pages that may not be there when they are used.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as cause:
        os.close(descriptor)
        limits = {errno.ENOSPC: f"{place} is full", errno.EFBIG: "RLIMIT_FSIZE, ulimit -f"}
        limit = limits.get(cause.errno or 0, f"{place}: {cause.strerror}")
        raise NoMemoryError(_too_little(owner, num_bytes, limit)) from cause
    return descriptor


def _too_little(owner: str, num_bytes: int, limit: str) -> str:
    return f"{owner} needs {num_bytes} bytes of shared memory, which cannot be had: {limit}"


def _available() -> Iterator[tuple[float, str]]:
    """Yield limits on new memory in bytes, with their names."""
    yield math.inf, "nothing"
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024, "this machine's memory"
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            taken = int(Path(used).read_text()) - _cached(Path(used).with_name("memory.stat"))
            yield max(int(Path(limit).read_text()) - taken, 0), limit
    if not hasattr(os, "memfd_create"):
        status = os.statvfs(_SHM)
        yield status.f_bavail * status.f_frsize, str(_SHM)


def _cached(stat: Path) -> int:
    """Return the bytes of files' pages, which a control group counts as used and frees if needed.

    Args:
        stat: the group's `memory.stat`; none is 0.
    """
    try:
        numbers = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    prefix = "total_" if "total_inactive_file" in numbers else ""  # with the groups inside
    return sum(int(numbers.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


def ring_size(num_bytes: int) -> int:
    """Return the next power of two: the size of a ring of at least so many bytes.

    Raises:
        ValueError: it would be less than 4 KiB, or more than 1 GiB.
    """
    size = 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0
    if not 4096 <= size <= 1 << 30:
        raise ValueError(f"expected 4096 to 1073741824 bytes, got {num_bytes}")
    return size


class RegionSession:
    """The mapping of a member of a region, and the calls that wait for others.

    Calls are made by one thread at a time; `abort` and `close` by any thread.
    """

    def __init__(
        self,
        library: cpu.Library,
        region: Region,
        member: int,
        names: Sequence[str],
        describe_note: Callable[[int], str] = str,
    ) -> None:
        """Join.

        Args:
            library: library of the kernels.
            region: closed by this object; its contents have been created.
            member: index of this member.
            names: names of all members, for messages.
            describe_note: returns what a member did, of its note.
        """
        self._library = library
        self._region: Region | None = region
        self._names, self._me = names, names[member]
        self._describe_note = describe_note
        self._in_call, self._closing = threading.Lock(), threading.Lock()
        self._abort = library.function("shared_abort", None)
        self._reason = library.function("shared_reason", None)
        self._handle = library.function("shared_join", None)(region.address, member)
        if not self._handle:
            raise MemoryError("no memory to join shared memory")

    def watch(self) -> None:
        """Open the processes of the other members, which have all joined.

        Raises:
            AbortedError: one has ended already.
        """
        with self._in_call:
            dead = self._library.function("shared_dead_member", None)(self._open_handle())
            if dead >= 0:
                self._raise(_GONE - dead)

    def call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Call a function of the library, which takes the session's handle first.

        Returns:
            Its result, at least 0.

        Raises:
            AbortedError: the region was aborted, or a member has ended.
            TimeoutError: the function's timeout has passed.
        """
        while True:
            with self._in_call:
                status = function(self._open_handle(), *arguments)
                if status >= 0:
                    return status
                if status != _INTERRUPTED:
                    self._raise(status)

    def abort(self, reason: str) -> None:
        """Fail all calls, of the other members too; the first reason is the one they report."""
        data = reason.encode()[:_REASON_BYTES]
        with self._closing:
            if self._region is not None:
                self._abort(self._region.address, data, len(data))

    def close(self) -> None:
        """Leave; end calls of this member, and of members that wait for it."""
        if not self._in_call.acquire(blocking=False):
            self.abort(f"{self._me} was closed during a call")
            self._in_call.acquire()
        try:
            with self._closing:
                if self._region is not None:
                    self._library.function("shared_leave", None)(self._handle)
                    self._region.close()
                    self._region = None
        finally:
            self._in_call.release()

    def _open_handle(self) -> int:
        if self._region is None:
            raise AbortedError("it is closed")
        return self._handle  # type: ignore[no-any-return]

    def _raise(self, status: int) -> None:
        """Raise the error of a status."""
        if status == _TIMED_OUT:
            raise TimeoutError("timed out")
        if status <= _DIFFERS:
            notes = (ctypes.c_uint64 * 2)()
            self._library.function("shared_notes", None)(self._handle, ctypes.addressof(notes))
            other = self._names[_DIFFERS - status]
            mine, theirs = (self._describe_note(note) for note in notes)
            self.abort(f"{self._me} {mine}, {other} {theirs}")
        elif status <= _GONE:
            self.abort(f"{self._names[_GONE - status]} has ended")
        raise AbortedError(self._abort_reason() or "aborted")

    def _abort_reason(self) -> str:
        assert self._region is not None
        text = ctypes.create_string_buffer(_REASON_BYTES)
        length = self._reason(self._region.address, ctypes.addressof(text))
        return text.raw[: max(length, 0)].decode(errors="replace")


class BroadcastRing:
    """Messages from one writer to several readers; each reads all of them in order.

    A message larger than the ring streams through it. Nothing is read or written after an abort, or
    once a process at either end has ended.
    """

    def __init__(self, descriptor: int, member: int) -> None:
        """Join; see `create` and `open`."""
        library, region = cpu.load(), Region(descriptor)
        try:
            names = ["the writer", *(f"reader {i}" for i in range(region.num_members - 1))]
            if not 0 <= member < len(names):
                raise ValueError(f"reader: expected 0 to {len(names) - 2}, got {member - 1}")
            self._session = RegionSession(library, region, member, names)
        except BaseException:
            region.close()
            raise
        self._descriptor = -1
        self._write = library.function("broadcast_ring_write", None, releases=True)
        self._read = library.function("broadcast_ring_read", None, releases=True)
        self._buffer = ctypes.create_string_buffer(1 << 16)

    @classmethod
    def create(cls, size_bytes: int, num_readers: int) -> Self:
        """Return the writer's end of a new ring.

        Args:
            size_bytes: maximum size of messages under way; rounded up to a power of two.
            num_readers: how many ends `open` returns.

        Raises:
            KernelsUnavailableError: the compiled kernels are not there.
            NoMemoryError: there is too little memory.
        """
        if not 1 <= num_readers < MAX_MEMBERS:
            raise ValueError(f"num_readers: expected 1 to {MAX_MEMBERS - 1}, got {num_readers}")
        library, size = cpu.load(), ring_size(size_bytes)
        num_bytes = library.function("broadcast_ring_bytes", None)(num_readers, size)
        descriptor = allocate(num_bytes, f"a ring for {num_readers} readers")
        try:
            region = Region(descriptor)
            library.function("broadcast_ring_create", None)(region.address, num_readers, size)
            region.close()
            ring = cls(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        ring._descriptor = descriptor
        return ring

    @classmethod
    def open(cls, fd: int, reader: int) -> Self:
        """Return a reader's end.

        Args:
            fd: what `fileno` returns, in the process that has it; it may be closed afterwards.
            reader: index of this reader, from 0.

        Raises:
            KernelsUnavailableError: the compiled kernels are not there.
        """
        return cls(fd, reader + 1)

    def fileno(self) -> int:
        """Return the descriptor of the writer's end, which readers open; -1 once it is closed."""
        return self._descriptor

    def write(self, data: bytes, timeout_s: float | None = None) -> None:
        """Write a message, once there is room for it or for its beginning.

        Raises:
            TimeoutError: there was none in time; nothing was written.
            AbortedError: the ring was aborted, or a reader has ended.
        """
        try:
            self._session.call(self._write, data, len(data), _deadline(timeout_s))
        except TimeoutError:
            raise TimeoutError(
                f"no room for a message of {len(data)} bytes within {timeout_s} s: a reader does "
                f"not read"
            ) from None

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next message, None if none has come in time.

        Raises:
            AbortedError: the ring was aborted, or the writer has ended and nothing is left.
        """
        deadline, buffer = _deadline(timeout_s), self._buffer
        while True:
            place, capacity = ctypes.addressof(buffer), len(buffer)
            try:
                size = self._session.call(self._read, place, capacity, deadline)
            except TimeoutError:
                return None
            if size <= capacity:
                return ctypes.string_at(place, size)
            buffer = ctypes.create_string_buffer(size)  # for this message only

    def abort(self, reason: str = "the ring was aborted") -> None:
        """Let all calls at all ends fail with an AbortedError. For any thread."""
        self._session.abort(reason)

    def close(self) -> None:
        """Leave the ring; the calls of the other ends fail once they need this one."""
        self._session.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _deadline(timeout_s: float | None) -> int:
    """Return when a timeout ends, for the library."""
    return -1 if timeout_s is None else time.monotonic_ns() + int(max(timeout_s, 0) * 1e9)
