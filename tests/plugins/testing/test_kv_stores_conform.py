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
from hardpoint.builtin_plugins.kv_stores.disk import DiskStore
from hardpoint.builtin_plugins.kv_stores.disk_index import index_bytes, table_size
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.builtin_plugins.kv_stores.p2p import PeerToPeerStore
from hardpoint.builtin_plugins.kv_stores.redis import RedisStore
from hardpoint.testing import KVStoreSuite, PeerKVStoreSuite

pytest_plugins = ["hardpoint.testing"]


class TestMemoryStore(KVStoreSuite):
    store = MemoryStore
    examples = kit_examples()


class TestDiskStore(KVStoreSuite):
    store = DiskStore
    options = {"size_bytes": 64 * (16 << 10)}
    shared = True
    durable = True
    examples = kit_examples()

    def place_options(self, folder: Path) -> Mapping[str, Any]:
        return {"path": str(folder)}

    def limit_options(self, block_bytes: int, count: int) -> Mapping[str, Any]:
        pages = -(-block_bytes // 4096)  # it keeps a block in whole pages
        return {"size_bytes": count * pages * 4096 + index_bytes(table_size(count))}


class SmallStore(MemoryStore):
    """The nearest store of a chain, which soon drops its blocks."""

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


class TestPeerToPeerStore(PeerKVStoreSuite):
    store = PeerToPeerStore
    examples = kit_examples(0.2)

    def place_options(self, folder: Path) -> Mapping[str, Any]:
        return {"listen": f"ipc://{folder}/{{rank}}.sock"}

    def peer_options(self, folder: Path, engine_id: str, peer: str) -> Mapping[str, Any]:
        listen, other = (f"ipc://{folder}/{name}{{rank}}.sock" for name in (engine_id, peer))
        return {"listen": listen, "peers": {peer: other}}
