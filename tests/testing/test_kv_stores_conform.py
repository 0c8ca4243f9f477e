"""Every built-in KV store passes the public conformance kit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.redis_servers import FakeRedis, RedisServer
from support.searching import kit_examples

from hardpoint.builtin_plugins.kv_stores.chain import ChainStore
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.builtin_plugins.kv_stores.redis import RedisStore
from hardpoint.testing import KVStoreSuite

pytest_plugins = ["hardpoint.testing"]


class TestMemoryStore(KVStoreSuite):
    store = MemoryStore
    examples = kit_examples()


class SmallStore(MemoryStore):
    """The nearest of a chain, which soon drops what it has."""

    contract = 1

    class Options(MemoryStore.Options):
        size_bytes: int = 40_000


@pytest.mark.nightly
class TestChainBehind(KVStoreSuite):
    store = ChainStore
    options = {"stores": [f"{__name__}:SmallStore", "memory"], "write": "behind"}
    examples = kit_examples(0.2)


@pytest.mark.nightly
class TestChainThrough(KVStoreSuite):
    store = ChainStore
    options = {"stores": [f"{__name__}:SmallStore", "memory"]}
    examples = kit_examples(0.2)


class TestRedisProtocol(KVStoreSuite):
    """The store "redis" with a server that keeps values in a dictionary."""

    store = RedisStore
    shared = True
    durable = True
    examples = kit_examples(0.2)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls):
        with tempfile.TemporaryDirectory() as folder:
            server = cls.start(Path(folder))
            cls.url = server.url
            yield
            server.stop()

    @staticmethod
    def start(folder: Path):
        return FakeRedis(folder / "redis.sock")

    def place_options(self, folder: Path) -> Mapping[str, Any]:
        return {"url": self.url, "prefix": f"{folder.name}:"}


@pytest.mark.nightly
class TestRedisServer(TestRedisProtocol):
    examples = kit_examples()

    @staticmethod
    def start(folder: Path):
        return RedisServer(folder)
