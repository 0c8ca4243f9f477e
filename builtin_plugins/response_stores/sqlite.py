"""Responses in a file of SQLite, which several processes may use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from hardpoint.plugins import ConfigError

from .bounds import Bounds

_log = logging.getLogger("hardpoint")

T = TypeVar("T")

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
_WAIT_SECONDS = 2.0
_SHORTEST_WAIT = 0.05
_RETRY_SECONDS = 5
_CALLS = 4
_PASSING = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
)
"""Errors of a file that is locked, and of a disk that is full or fails for a while."""


class SQLiteStore:
    """Keeps responses in a file: after a restart, and for all workers of a server."""

    is_shared = True

    def __init__(self, path: str, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        """Open the file, or make it, readable by its owner alone.

        Args:
            path: path of the file.
            clock: returns seconds since the epoch.

        Raises:
            ConfigError: it cannot be used, or others can read it.
        """
        self._path, self._bounds, self._clock = os.path.abspath(path), bounds, clock
        self._calls = asyncio.Semaphore(_CALLS)
        try:
            _make_private(self._path)
            with self._opened(_WAIT_SECONDS) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_TABLES)
            # The last connection to close would delete what readers need on a full disk.
            self._open = sqlite3.connect(self._path, check_same_thread=False)
            self._open.execute("SELECT count(*) FROM owners").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"plugin.response_stores.path: {path!r}: it cannot be used: {error}"
            ) from None

    async def put(self, owner: str, response_id: str, content: bytes) -> None:
        """Keep a response.

        Raises:
            RequestError: it is too large.
            HTTPException: the file cannot be written now.
        """
        self._bounds.check(content)
        await self._called(self._put, owner, response_id, content)

    async def get(self, owner: str, response_id: str) -> bytes | None:
        """Return a response.

        Raises:
            HTTPException: the file cannot be read now.
        """
        return await self._called(self._get, owner, response_id)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response.

        Raises:
            HTTPException: the file cannot be written now.
        """
        return await self._called(self._delete, owner, response_id)

    async def _called(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function in a thread, which waits for locks until a deadline.

        Raises:
            HTTPException: the file is locked until then, or cannot be used for another cause that
                may pass.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + _WAIT_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                await self._calls.acquire()
        except TimeoutError:
            raise _unavailable("it is locked") from None
        try:
            wait = max(_SHORTEST_WAIT, deadline - clock())
            return await asyncio.to_thread(function, wait, *arguments)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _PASSING:
                raise
            _log.warning("%s: stored responses cannot be used now: %s", self._path, error)
            raise _unavailable("it is locked, or its disk is full") from None
        finally:
            self._calls.release()

    def _put(self, wait: float, owner: str, response_id: str, content: bytes) -> None:
        now = self._clock()
        row = (owner, response_id, now + self._bounds.seconds, len(content), content)
        with self._opened(wait) as database:
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

    def _get(self, wait: float, owner: str, response_id: str) -> bytes | None:
        query = "SELECT content FROM responses WHERE owner = ? AND id = ? AND ends_at > ?"
        with self._opened(wait) as database:
            row: Any = database.execute(query, (owner, response_id, self._clock())).fetchone()
        return None if row is None else row[0]

    def _delete(self, wait: float, owner: str, response_id: str) -> bool:
        query = "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING ends_at"
        with self._opened(wait) as database:
            row = database.execute(query, (owner, response_id)).fetchone()
        return row is not None and row[0] > self._clock()

    @contextlib.contextmanager
    def _opened(self, wait: float) -> Iterator[sqlite3.Connection]:
        """Provide a connection of this thread; commit its changes if the body succeeds.

        Args:
            wait: seconds to wait for a lock.
        """
        database = sqlite3.connect(self._path, timeout=wait, isolation_level="IMMEDIATE")
        with contextlib.closing(database), database:
            database.execute("PRAGMA secure_delete = ON")
            yield database


def _unavailable(reason: str) -> HTTPException:
    return HTTPException(
        503,
        f"the store of responses cannot be used now: {reason}; try again later",
        {"retry-after": str(_RETRY_SECONDS)},
    )


def _make_private(path: str) -> None:
    """Make a file for its owner alone, or check that it is one.

    Raises:
        OSError: it cannot be made.
        ConfigError: others can read it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(
            f"plugin.response_stores.path: {path!r}: expected a regular file with mode 0600, got "
            f"mode {stat.S_IMODE(status.st_mode):04o}"
        )
