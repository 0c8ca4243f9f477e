"""Responses in a file of SQLite, which several processes may use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

from hardpoint.plugins import ConfigError

from .bounds import Bounds

_TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT NOT NULL, id TEXT NOT NULL, ends_at REAL NOT NULL, size INTEGER NOT NULL,
    content BLOB NOT NULL, PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (ends_at, size);
CREATE INDEX IF NOT EXISTS responses_of_owner ON responses (owner, ends_at);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, size INTEGER NOT NULL);
INSERT INTO owners SELECT owner, sum(size) FROM responses
    WHERE NOT EXISTS (SELECT 1 FROM owners) GROUP BY owner;
CREATE TRIGGER IF NOT EXISTS owner_grew AFTER INSERT ON responses
    BEGIN INSERT INTO owners VALUES (NEW.owner, NEW.size)
        ON CONFLICT DO UPDATE SET size = size + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS owner_shrank AFTER DELETE ON responses
    BEGIN UPDATE owners SET size = size - OLD.size WHERE owner = OLD.owner;
        DELETE FROM owners WHERE owner = OLD.owner AND size = 0; END;
DROP TRIGGER IF EXISTS response_added; -- these are of an earlier version
DROP TRIGGER IF EXISTS response_deleted;
DROP TABLE IF EXISTS total;
COMMIT;
"""
_WAIT_SECONDS = 5.0


class SQLiteStore:
    """Keeps responses in a file: after a restart, and for all workers of a server."""

    is_shared = True

    def __init__(self, path: str, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        """Open the file, or make it, readable by its owner alone.

        Args:
            path: path of the file.
            bounds: bounds of its content.
            clock: returns seconds since the epoch.

        Raises:
            ConfigError: it cannot be used, or others can read it.
        """
        self._path, self._bounds, self._clock = os.path.abspath(path), bounds, clock
        try:
            _make_private(self._path)
            with self._opened() as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"plugin.response_stores.path: {path!r}: it cannot be used: {error}"
            ) from None

    async def put(self, owner: str, response_id: str, content: bytes) -> None:
        """Keep a response.

        Raises:
            RequestError: it is too large.
            sqlite3.Error: the file cannot be written.
        """
        self._bounds.check(content)
        await asyncio.to_thread(self._put, owner, response_id, content)

    async def get(self, owner: str, response_id: str) -> bytes | None:
        """Return a response.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        return await asyncio.to_thread(self._get, owner, response_id)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        return await asyncio.to_thread(self._delete, owner, response_id)

    def _put(self, owner: str, response_id: str, content: bytes) -> None:
        now = self._clock()
        row = (owner, response_id, now + self._bounds.seconds, len(content), content)
        with self._opened() as database:
            same = "owner = ? AND id = ?"  # REPLACE would not call the trigger of what it deletes
            database.execute(f"DELETE FROM responses WHERE {same} OR ends_at <= ?", (*row[:2], now))
            (total,) = database.execute("SELECT coalesce(sum(size), 0) FROM owners").fetchone()
            while total + row[3] > self._bounds.max_bytes:
                query = "SELECT owner FROM owners ORDER BY size + ? * (owner = ?) DESC LIMIT 1"
                largest = database.execute(query, (row[3], owner)).fetchone()
                query = "SELECT rowid, size FROM responses WHERE owner = ? ORDER BY ends_at, rowid"
                oldest, its_size = database.execute(f"{query} LIMIT 1", largest).fetchone()
                database.execute("DELETE FROM responses WHERE rowid = ?", (oldest,))
                total -= its_size
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)

    def _get(self, owner: str, response_id: str) -> bytes | None:
        query = "SELECT content FROM responses WHERE owner = ? AND id = ? AND ends_at > ?"
        with self._opened() as database:
            found: Any = database.execute(query, (owner, response_id, self._clock())).fetchone()
        return None if found is None else found[0]

    def _delete(self, owner: str, response_id: str) -> bool:
        query = "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING ends_at"
        with self._opened() as database:
            found = database.execute(query, (owner, response_id)).fetchone()
        return found is not None and found[0] > self._clock()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Provide a connection of this thread; what is written counts if the body succeeds."""
        database = sqlite3.connect(self._path, timeout=_WAIT_SECONDS, isolation_level="IMMEDIATE")
        with contextlib.closing(database), database:
            database.execute("PRAGMA secure_delete = ON")
            yield database


def _make_private(path: str) -> None:
    """Make a file for its owner alone, or check that it is one.

    Raises:
        OSError: it cannot be made.
        ConfigError: others can read it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"plugin.response_stores.path: {path!r}: expected a regular file with mode 0600, got "
            f"mode {stat.S_IMODE(found.st_mode):04o}"
        )
