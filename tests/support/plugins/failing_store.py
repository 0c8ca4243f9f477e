"""A KV store with a missing server."""

from __future__ import annotations

from hardpoint.plugins import KVStore


class FailingStore(KVStore):
    """Fails at every call."""

    contract = 1

    def lookup(self, keys):
        raise ConnectionError("no server")

    def store(self, key, buffer):
        raise ConnectionError("no server")

    def load(self, key, buffer):
        raise ConnectionError("no server")
