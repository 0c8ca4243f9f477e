"""The store keeps the rules of the conformance kit."""

from acme_kv_stores import SqliteStore

from hardpoint.testing import KVStoreSuite

pytest_plugins = ["hardpoint.testing"]


class TestSqliteStore(KVStoreSuite):
    store = SqliteStore
    shared = durable = True

    def place_options(self, folder):
        return {"path": str(folder / "blocks.db")}
