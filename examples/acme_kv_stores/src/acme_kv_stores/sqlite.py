"""Blocks of the KV cache in a database of one file."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import KVStore
from hardpoint.plugins.kv_store import BlockBuffer

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS blocks
    (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, bytes BLOB);
"""


class SqliteStore(KVStore):
    """Keeps the blocks that were stored last; engines of one host can share them."""

    contract = 1

    class Options(plugins.Options):
        """Where, and how much.

        Attributes:
            path: path of the database.
            size_bytes: size of all blocks together.
        """

        path: str
        size_bytes: Annotated[int, Meta(ge=1)] = 1 << 30

    options: Options

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Open the database, which no other user may read."""
        super().__init__(context)
        self._limit = self.options.size_bytes // context.block_bytes
        self._lock = threading.Lock()
        os.close(os.open(self.options.path, os.O_CREAT | os.O_RDWR, 0o600))
        self._database = sqlite3.connect(
            self.options.path,
            timeout=context.timeout_seconds / 2,  # while another process writes
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.executescript(_SCHEMA)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are in the index."""
        query = "SELECT 1 FROM blocks WHERE key = ?"
        with self._lock:
            return [self._database.execute(query, (key,)).fetchone() is not None for key in keys]

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Insert a block, and delete the oldest ones."""
        if not self._limit:
            return False
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            with self._database:  # commits, or rolls back
                insert = "INSERT OR REPLACE INTO blocks (key, bytes) VALUES (?, ?)"
                number = self._database.execute(insert, (key, buffer.whole)).lastrowid or 0
                delete = "DELETE FROM blocks WHERE number <= ?"
                self._database.execute(delete, (number - self._limit,))
        return True

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Select a block."""
        query = "SELECT bytes FROM blocks WHERE key = ?"
        with self._lock:
            row = self._database.execute(query, (key,)).fetchone()
        if row is None or len(row[0]) != self.context.block_bytes:
            return False
        buffer.whole[:] = row[0]
        return True

    def drain(self) -> None:
        """Write the log into the database, and wait for the disk."""
        with self._lock:
            self._database.execute("PRAGMA wal_checkpoint")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()
