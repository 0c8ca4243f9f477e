"""Every built-in KV store passes the public conformance kit."""

from __future__ import annotations

from support.searching import kit_examples

from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.testing import KVStoreSuite

pytest_plugins = ["hardpoint.testing"]


class TestMemoryStore(KVStoreSuite):
    store = MemoryStore
    examples = kit_examples()
