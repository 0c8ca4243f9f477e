"""Unknown fields of requests that the server ignores: header, log and counters."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable

from hardpoint.builtin_plugins.server.access.counts import Counts
from hardpoint.typed import shown

__all__ = ["HEADER", "IGNORED", "LONGEST_NAME", "IgnoredFieldLog", "IgnoredFields", "is_near_miss"]

HEADER = b"x-hardpoint-ignored-fields"
IGNORED = "ignored "
"""Begins the names of the counts of ignored fields."""
LONGEST_NAME = 64

_MOST_IN_HEADER = 20
_MOST_NAMES = 1000
_NEAR = 2
_OTHER = "(other)"
_NAMES = "names of ignored fields"
_INDEX = re.compile(r"\[\d+\]")

_log = logging.getLogger("hardpoint")


class IgnoredFields:
    """The ignored fields of one request.

    Attributes:
        paths: the first path of each field, by its path without indices.
    """

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether the request has as many ignored fields as the record holds."""
        return len(self.paths) >= _MOST_NAMES

    def add(self, path: str) -> None:
        """Record a field, unless the record is full."""
        if not self.is_full:
            self.paths.setdefault(_escaped(_INDEX.sub("[]", path)), path)

    def header(self) -> tuple[bytes, bytes]:
        """Return the header of the answer that lists them."""
        names = list(self.paths)[:_MOST_IN_HEADER]
        return HEADER, ", ".join(names).encode("ascii")


class IgnoredFieldLog:
    """Logs each ignored field once, and counts the requests that have it."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._names: set[str] = set()
        self._lock = threading.Lock()  # large bodies are converted in threads

    def record(self, ignored: IgnoredFields) -> None:
        """Log the new fields of a request, and count all of them.

        The first 1000 names of all workers have counters of their own and are logged. The others
        share one counter.
        """
        new: list[str] = []
        with self._lock:
            for name, path in ignored.paths.items():
                if name not in self._names and self._counts.add_below(_NAMES, _MOST_NAMES):
                    self._names.add(name)
                    new.append(path)
                self._counts.add(IGNORED + (name if name in self._names else _OTHER))
        if new:
            names = shown(", ".join(new[:_MOST_IN_HEADER]), 500)  # quoted: may hold line ends
            _log.warning("unknown fields of a request were ignored: %s", names)


def is_near_miss(name: str, known: str) -> bool:
    """Return whether a name looks like a misspelling of a known one.

    It has the same first letter, and an edit distance of 1 or 2.
    """
    if name[:1] != known[:1] or abs(len(name) - len(known)) > _NEAR or name == known:
        return False
    return _edit_distance(name, known) <= _NEAR


def _edit_distance(first: str, second: str) -> int:
    """Return the Levenshtein distance of two short texts."""
    row: Iterable[int] = range(len(second) + 1)
    for index, letter in enumerate(first, 1):
        above = list(row)
        current = [index]
        for column, other in enumerate(second, 1):
            change = above[column - 1] + (letter != other)
            current.append(min(above[column] + 1, current[-1] + 1, change))
        row = current
    return list(row)[-1]


def _escaped(path: str) -> str:
    """Return a path in printable ASCII without separators of the header, cut to its limit."""
    return "".join(map(_escaped_character, path[:LONGEST_NAME]))[:LONGEST_NAME]


def _escaped_character(character: str) -> str:
    if character in ',"\\':
        return f"\\x{ord(character):02x}"
    is_plain = character.isascii() and character.isprintable()
    return character if is_plain else ascii(character)[1:-1]
