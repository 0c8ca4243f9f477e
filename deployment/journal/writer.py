"""Writes a journal in a thread of its own: whole, up to a limit, or its last part when asked to."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from .frames import FRAME_BYTES, MOST_BYTES, START_BYTES, JournalError, frame_head, start_of_file
from .records import End, JournalHeader, Keyframe

_log = logging.getLogger("hardpoint")

_WAIT_S = 5.0
"""Longest wait for the thread, when a step has failed or the engine is closed."""
_GATHER_S = 0.01
"""For which records are gathered, so that the thread disturbs few steps."""
_MOST_PENDING = 64 << 20
"""Bytes that wait for the disk, at most; with more, the journal ends."""
_KEYFRAMES = 4
"""Keyframes that a ring has at least, so that it never loses more than a quarter at a time."""


class JournalWriter:
    """Writer of a whole journal. Records come from one thread at a time.

    A disk that is full or too slow ends the journal, never the engine.
    """

    has_keyframes = is_due = False  # it begins at its begin

    def __init__(self, path: Path, most_bytes: int, header: JournalHeader) -> None:
        """Create the file; an existing one becomes `<name>.previous`.

        Args:
            path: path of the file.
            most_bytes: the journal ends before it is larger.

        Raises:
            JournalError: the file cannot be created.
        """
        self._path, self._most_bytes = path, most_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self._num_bytes = START_BYTES
        self._num_put = self._num_written = 0  # of bytes, each counted in one thread
        self._waiting: list[threading.Event] = []
        self._is_last = False  # whether the thread has taken all that comes
        self.why_over = ""
        self._queue: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._descriptor = _create(path)
        self._thread = threading.Thread(target=self._run, name="EngineJournal", daemon=True)
        self._thread.start()
        self._put(start_of_file())
        self.write(header)

    def write(self, record: msgspec.Struct) -> None:
        """Write a record, unless the journal is over."""
        if self.why_over:
            return
        payload = self._encoder.encode(record)
        size = FRAME_BYTES + len(payload)
        if len(payload) > MOST_BYTES or self._num_bytes + size > self._most_bytes:
            self._finish(f"it has reached engine.journal_bytes ({self._most_bytes})")
        elif self._num_put - self._num_written > _MOST_PENDING:
            self._finish("the disk is too slow")
        else:
            self._append(payload)

    def sync(self) -> None:
        """Wait until all is handed to the operating system, for some seconds at most."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(_WAIT_S)

    def close(self, reason: str) -> None:
        """Write the end, and close the file."""
        if not self.why_over:
            self._finish(reason, is_early=False)
        self._queue.put(None)
        self._thread.join(_WAIT_S)

    def _finish(self, reason: str, *, is_early: bool = True) -> None:
        self._append(self._encoder.encode(End(reason, self._number - 1)))
        self.why_over = reason
        if is_early:
            _log.warning("the journal %s ends here: %s", self._path, reason)

    def _append(self, payload: bytes) -> None:
        self._put(frame_head(payload, self._number) + payload)
        self._number += 1

    def _put(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._num_put += len(data)
        self._queue.put(data)

    def _run(self) -> None:
        try:
            while not self._is_last:
                self._write_next()
        except BaseException as cause:  # such as a full disk; the engine goes on
            self.why_over = f"it cannot be written: {cause or type(cause).__name__}"
            _log.error("the journal %s ends here: %s", self._path, self.why_over)
            self._release()
            while not self._is_last:
                self._bytes_of(self._queue.get())
                self._release()
        finally:
            os.close(self._descriptor)

    def _write_next(self) -> None:
        pieces = [self._bytes_of(self._queue.get())]
        if pieces[0]:
            time.sleep(_GATHER_S)
        with contextlib.suppress(queue.Empty):
            while not self._is_last:
                pieces.append(self._bytes_of(self._queue.get_nowait()))
        data = memoryview(b"".join(pieces))
        self._num_written += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]
        self._release()

    def _bytes_of(self, item: bytes | threading.Event | None) -> bytes:
        if isinstance(item, bytes):
            return item
        if item is None:
            self._is_last = True
        else:
            self._waiting.append(item)
        return b""

    def _release(self) -> None:
        while self._waiting:
            self._waiting.pop().set()


class RingWriter:
    """Keeps the last part of a journal in memory, from a keyframe on; writes it when asked to."""

    has_keyframes = True

    def __init__(self, path: Path, most_bytes: int, header: JournalHeader) -> None:
        """Keep at most `most_bytes` of memory; the file is created when it is written.

        Raises:
            JournalError: the file's folder cannot be written to.
        """
        if not os.access(path.parent, os.W_OK):
            raise JournalError(f"engine.journal: {str(path)!r}: its folder cannot be written to")
        self._path, self._most_bytes, self._header = path, most_bytes, header
        self._encoder = msgspec.msgpack.Encoder()
        self._segments: deque[list[bytes | Keyframe]] = deque([[]])
        self._sizes: deque[int] = deque([0])
        self._number = 0
        self.why_over = ""

    @property
    def is_due(self) -> bool:
        """Whether a keyframe is to be written."""
        return self._sizes[-1] * _KEYFRAMES > self._most_bytes

    def write(self, record: msgspec.Struct) -> None:
        """Keep a record; a keyframe may let the oldest ones be forgotten."""
        if isinstance(record, Keyframe):  # encoded if it becomes the first: what it has is shared
            self._segments.append([record])
            self._sizes.append(0)
        else:
            payload = self._encoder.encode(record)
            self._number += 1
            self._segments[-1].append(payload)
            self._sizes[-1] += FRAME_BYTES + len(payload)
        while sum(self._sizes) > self._most_bytes and len(self._segments) > 1:
            self._segments.popleft()
            self._sizes.popleft()

    def sync(self) -> None:
        """Write the pending records into the file: a step has failed."""
        self._dump("a step failed")
        _log.warning("the journal %s ends here: %s", self._path, self.why_over)

    def close(self, reason: str) -> None:
        """Write the pending records into the file."""
        if not self.why_over:
            self._dump(reason)

    def _dump(self, reason: str) -> None:
        self.why_over = reason
        payloads = [self._encoder.encode(self._header)]
        for segment in self._segments:
            payloads += [
                item if isinstance(item, bytes) else self._encoder.encode(item) for item in segment
            ]
        payloads.append(self._encoder.encode(End(reason, self._number)))
        try:
            descriptor = _create(self._path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(start_of_file())
                for number, payload in enumerate(payloads):
                    file.write(frame_head(payload, number))
                    file.write(payload)
        except (OSError, JournalError) as cause:
            _log.error("the journal %s cannot be written: %s", self._path, cause)


def _create(path: Path) -> int:
    try:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, path.with_name(path.name + ".previous"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        raise JournalError(f"engine.journal: {str(path)!r} cannot be created: {cause}") from cause
