"""Counts by name: of one process, or of several that serve one address.

Those of several are in memory that they share, a column for each process, so that a count is exact,
read without asking anybody, and what a process held is known when it has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.plugins.server import Client

ANYBODY = Client(name="anybody")
"""The client where no key is needed."""

_NUM_ROWS = 1 << 14
_NAME_BYTES = 128
_NOTE_BYTES = 1 << 16
_HEADER_BYTES = 4096
_NAMES_AT = _HEADER_BYTES + _NOTE_BYTES
_MINUTE = 60.0
_HELD = "held "
"""Begins the names of what a process holds for a while, which ends with it."""
_RATE = "rate "

Notes = dict[str, str]
"""Texts by name that all processes know."""


def key_of(state: Mapping[str, Any]) -> str:
    """Return the name of the user's key of a request; empty without a key.

    Args:
        state: state of the request's scope.
    """
    client = state.get("client")
    return "" if client is None or client is ANYBODY or client.admin else str(client.name)


def held(name: str) -> str:
    """Return the name of a count of resources that are released, such as open connections."""
    return _HELD + name


class Counts:
    """The counts of one process."""

    # Attributes of a server with one process.
    num_processes, column = 1, 0

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._rates: dict[str, tuple[float, float]] = {}
        self._notes: Notes = {}

    def total(self, name: str) -> int:
        """Return a count, of all processes together."""
        return self._numbers[name]

    def elsewhere(self, name: str) -> int:
        """Return the count of the other processes."""
        del name
        return 0

    def add(self, name: str, number: int = 1) -> None:
        """Change the count of this process."""
        self._numbers[name] += number
        if not self._numbers[name]:
            del self._numbers[name]

    def add_below(self, name: str, limit: int) -> bool:
        """Add one unless the total is at its limit; return whether it was added."""
        if self._numbers[name] >= limit:
            return False
        self._numbers[name] += 1
        return True

    def items(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the counts with a name prefix, by the rest of their names."""
        for name, number in list(self._numbers.items()):
            if name.startswith(prefix):
                yield name.removeprefix(prefix), number

    def take_from_rate(self, name: str, per_minute: int, now: float) -> float:
        """Count a use of something that may be used so often a minute.

        It is a token bucket: as many uses at once as in a minute, which come back.

        Args:
            now: seconds.

        Returns:
            0 if it was counted, else the seconds until there is one more.
        """
        left, since = self._rates.get(name, (float(per_minute), now))
        left, wait = _taken(left, since, per_minute, now)
        self._rates[name] = left, now
        return wait

    @property
    def notes(self) -> Notes:
        """The notes, as they are now; not to be changed."""
        return self._notes

    def note(self, name: str, text: str | None) -> None:
        """Set a note for all processes; None removes it."""
        self._notes = _with_note(self._notes, name, text)


class SharedCounts(Counts):
    """The counts of several processes with the same descriptor.

    Every process has its own, made of a descriptor that it has inherited.
    """

    # Everything is read and written while the file's lock is held, which a process that dies gives
    # back. Rows are found by hashing, and cached until their generation changes, when those of
    # names that no one needs any more are removed.

    def __init__(self, descriptor: int, column: int, num_processes: int) -> None:
        """Use the memory that `create` made.

        Args:
            column: number of this process, from 0.
            num_processes: number of columns.
        """
        super().__init__()
        self.num_processes = num_processes
        self._descriptor, self.column = descriptor, column
        self._memory = mmap.mmap(descriptor, _size(num_processes))
        view = memoryview(self._memory)
        # Of the notes, their length; of the rows, and how many have names.
        self._versions = view[:_HEADER_BYTES].cast("Q")
        self._values = view[_NAMES_AT + _NUM_ROWS * _NAME_BYTES :].cast("d")
        self._rows: dict[str, int] = {}
        self._seen = self._generation = 0
        self._threads = threading.RLock()
        self._depth = 0

    @staticmethod
    def create(num_processes: int) -> int:
        """Return a descriptor of new memory for so many processes."""
        make = getattr(os, "memfd_create", None)
        if make is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        else:
            descriptor = make("hardpoint-counts")
        os.truncate(descriptor, _size(num_processes))
        return int(descriptor)

    def total(self, name: str) -> int:
        """Return a count, of all processes together."""
        with self._locked():
            return self._sum(self._row(name))

    def elsewhere(self, name: str) -> int:
        """Return the count of the other processes."""
        with self._locked():
            row = self._row(name)
            return self._sum(row) - int(self._values[row * self.num_processes + self.column])

    def add(self, name: str, number: int = 1) -> None:
        """Change the count of this process."""
        with self._locked():
            self._values[self._row(name) * self.num_processes + self.column] += number

    def add_below(self, name: str, limit: int) -> bool:
        """Add one unless the total is at its limit; return whether it was added."""
        with self._locked():
            row = self._row(name)
            if self._sum(row) >= limit:
                return False
            self._values[row * self.num_processes + self.column] += 1
            return True

    def items(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the counts with a name prefix, by the rest of their names."""
        with self._locked():
            totals = [
                (name, self._sum(row)) for row, name in self._used() if name.startswith(prefix)
            ]
        for name, number in totals:
            yield name.removeprefix(prefix), number

    def take_from_rate(self, name: str, per_minute: int, now: float) -> float:
        """Count a use, as `Counts.take_from_rate`; `now` is on the system's monotonic clock."""
        with self._locked():
            at = self._row(_RATE + name) * self.num_processes
            used, since = self._values[at], self._values[at + 1]
            left, wait = _taken(per_minute - used, since or now, per_minute, now)
            self._values[at], self._values[at + 1] = per_minute - left, now
            return wait

    @property
    def notes(self) -> Notes:
        """The notes, as they are now."""
        if self._versions[0] != self._seen:
            with self._locked():
                self._read_notes()
        return self._notes

    def note(self, name: str, text: str | None) -> None:
        """Set a note for all processes; None removes it."""
        with self._locked():
            self._read_notes()
            notes = _with_note(self._notes, name, text)
            data = msgspec.json.encode(notes)[:_NOTE_BYTES]
            self._memory[_HEADER_BYTES : _HEADER_BYTES + len(data)] = data
            self._versions[1] = len(data)
            self._versions[0] += 1
            self._read_notes()

    def clear(self, column: int) -> None:
        """Release the held counts of a dead process; its other counts stay."""
        with self._locked():
            for row, name in self._used():
                if name.startswith(_HELD):
                    self._values[row * self.num_processes + column] = 0.0

    def _read_notes(self) -> None:
        length, self._seen = self._versions[1], self._versions[0]
        data = self._memory[_HEADER_BYTES : _HEADER_BYTES + length]
        self._notes = msgspec.json.decode(data, type=Notes) if length else {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            if not self._depth:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    # All below: while the lock is held

    def _sum(self, row: int) -> int:
        at = row * self.num_processes
        return int(sum(self._values[at : at + self.num_processes]))

    def _row(self, name: str) -> int:
        """Return the row of a name; a new one gets a row."""
        if self._versions[2] != self._generation:
            self._rows, self._generation = {}, self._versions[2]
        if (row := self._rows.get(name)) is None:
            if self._versions[3] >= _NUM_ROWS * 3 // 4:
                self._remove_unused()
            row = self._rows[name] = self._find(_short(name))
        return row

    def _find(self, name: bytes) -> int:
        row = zlib.crc32(name) % _NUM_ROWS
        while (row_name := self._name(row)) not in (b"", name):
            row = (row + 1) % _NUM_ROWS
        if not row_name:
            at = _NAMES_AT + row * _NAME_BYTES
            self._memory[at : at + len(name)] = name
            self._versions[3] += 1
        return row

    def _remove_unused(self) -> None:
        now, width, used = time.monotonic(), self.num_processes, []
        for row, name in self._used():
            values = list(self._values[row * width : (row + 1) * width])
            if name.startswith(_RATE):
                is_used = now - values[1] < _MINUTE
            else:
                is_used = any(values) or not name.startswith(_HELD)
            if is_used:
                used.append((self._name(row), values))
        if len(used) >= _NUM_ROWS * 3 // 4:
            raise MemoryError(f"the workers have room for {len(used)} counts, and need more")
        self._memory[_NAMES_AT:] = bytes(len(self._memory) - _NAMES_AT)
        self._versions[2] += 1
        self._versions[3] = 0
        for row_name, values in used:
            row = self._find(row_name)
            for index, value in enumerate(values):
                self._values[row * width + index] = value
        self._rows, self._generation = {}, self._versions[2]

    def _used(self) -> Iterator[tuple[int, str]]:
        for row in range(_NUM_ROWS):
            if name := self._name(row):
                yield row, name.decode(errors="replace")

    def _name(self, row: int) -> bytes:
        at = _NAMES_AT + row * _NAME_BYTES
        return self._memory[at : at + _NAME_BYTES].rstrip(b"\0")


def _size(num_processes: int) -> int:
    return _NAMES_AT + _NUM_ROWS * (_NAME_BYTES + 8 * num_processes)


def _short(name: str) -> bytes:
    """Return a name cut to its place; a longer name ends with its hash."""
    data = name.encode(errors="replace").replace(b"\0", b"?")
    if len(data) <= _NAME_BYTES:
        return data
    return data[: _NAME_BYTES - 32] + hashlib.sha256(data).hexdigest()[:32].encode()


def _taken(left: float, since: float, per_minute: int, now: float) -> tuple[float, float]:
    """Return the rest of a rate after a use, and the seconds until there is one, or 0."""
    left = min(float(per_minute), left + max(now - since, 0.0) * per_minute / _MINUTE)
    if left >= 1:
        return left - 1, 0.0
    return left, max(1.0, math.ceil((1 - left) * _MINUTE / per_minute))


def _with_note(notes: Notes, name: str, text: str | None) -> Notes:
    rest = {key: value for key, value in notes.items() if key != name}
    return rest if text is None else {**rest, name: text}


def count_request(counts: Counts, name: str, per_minute: int, now: float) -> None:
    """Count a request of a client, which has as many at once as in a minute.

    Raises:
        AnswerError: it has none left.
    """
    if not (seconds := counts.take_from_rate(name, per_minute, now)):
        return
    raise AnswerError(
        429,
        f"rate: expected at most {per_minute} requests in a minute with this key; try again "
        f"in {seconds:.0f} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": f"{seconds:.0f}"},
    )
