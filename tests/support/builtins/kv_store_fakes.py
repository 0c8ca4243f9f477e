"""A store with methods that a test replaces, and the worker half of a connector around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hardpoint.builtin_plugins.kv_connectors.jobs import (
    BlockLoad,
    Jobs,
    Lookup,
    Renewal,
    Save,
    WorkerMessage,
)
from hardpoint.builtin_plugins.kv_connectors.moving import StoresWorker
from hardpoint.builtin_plugins.kv_connectors.stores import StoresOptions
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.plugins import KVConnectorContext, KVStoreContext
from hardpoint.plugins.config_tables import KVConnectorConfig
from hardpoint.plugins.kv_connector import BlockIdentity, KVWorkerContext
from hardpoint.plugins.kv_store import BlockBuffer, PeerKVStore
from hardpoint.plugins.requests.stats import KVTierStats
from support.waiting import wait_until

NUM_BLOCKS = 32
_FIELDS = {Lookup: "lookups", BlockLoad: "loads", Save: "saves", Renewal: "renewals"}


class ScriptedStore(MemoryStore):
    """Keeps blocks in memory, except for methods that a test replaces.

    Attributes:
        calls: names of the methods that were called.
        instead: by method, what is called in its place.
    """

    def __init__(self, sizes: Sequence[int], name: str = "memory") -> None:
        """Start empty."""
        options = self.Options(size_bytes=1 << 20)
        super().__init__(KVStoreContext(name=name, sizes=sizes, identity="", options=options))
        self.calls: list[str] = []
        self.instead: dict[str, Callable[..., Any]] = {}

    def _run(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        instead = self.instead.get(method)
        return getattr(super(), method)(*args) if instead is None else instead(*args)

    def lookup(self, keys: Any) -> Any:
        """See `instead`."""
        return self._run("lookup", keys)

    def store(self, key: Any, buffer: Any) -> Any:
        """See `instead`."""
        return self._run("store", key, buffer)

    def load(self, key: Any, buffer: Any) -> Any:
        """See `instead`."""
        return self._run("load", key, buffer)

    def drain(self) -> Any:
        """See `instead`."""
        return self._run("drain")

    def close(self) -> Any:
        """See `instead`."""
        return self._run("close")


class ScriptedPeers(ScriptedStore, PeerKVStore):
    """Simulates engines named "good" and "bad" with the same blocks, any number of times.

    Attributes:
        offered: blocks by key.
        fetched: peers, of each call of `fetch`.
        renewed: peers and number of keys, of each call of `renew`.
    """

    def __init__(self, sizes: Sequence[int], name: str = "peers") -> None:
        """Start empty."""
        super().__init__(sizes, name)
        self.offered: dict[bytes, bytes] = {}
        self.fetched: list[str] = []
        self.renewed: list[tuple[str | None, int]] = []

    @property
    def peers(self) -> frozenset[str]:
        """The two simulated peers."""
        return frozenset({"good", "bad"})

    def offer(self, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """See `instead`."""
        instead = self.instead.get("offer")
        if instead is not None and not instead():
            return False
        self.offered[key] = bytes(buffer.whole)
        return True

    def fetch(self, peer: str, key: bytes, buffer: BlockBuffer, seconds: float) -> bool:
        """See `instead`."""
        self.fetched.append(peer)
        if peer == "bad":
            self.instead["fetch"]()
        if (block := self.offered.get(key)) is None:
            return False
        buffer.whole[:] = block
        return True

    def renew(self, keys: Sequence[bytes], peer: str | None = None) -> None:
        """See `instead`."""
        if peer == "bad":
            self.instead["renew"]()
        self.renewed.append((peer, len(keys)))


def identity(layers: int = 2, **changes: Any) -> BlockIdentity:
    """Return the identity of a rank with some layers."""
    fields: dict[str, Any] = {
        "weights": "w",
        "config": "c",
        "architecture": "a",
        "dtype": "float32",
        "kv_layout": "l",
        "kv_layout_version": 1,
        "block_size": 4,
        "layer_bytes": (48,) * layers,
        "hash_algorithm": "sha256",
    }
    return BlockIdentity(**fields | changes)


class Rank:
    """A worker half with a KV cache of `NUM_BLOCKS` blocks, each layer in two views.

    Attributes:
        stores: nearest first.
        caches: caches of each layer, uint8 [blocks, 32] and [blocks, 16].
        faults: (component, message).
    """

    def __init__(
        self,
        *names: str,
        layers: int = 2,
        load_seconds: float = 120.0,
        stores: Sequence[ScriptedStore] = (),
        identity_changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Open stores with these names, or use existing ones."""
        self.stores: list[ScriptedStore] = list(stores)
        self.faults: list[tuple[str, str]] = []
        generator = torch.Generator().manual_seed(1)
        self.caches = [
            [
                torch.randint(256, (NUM_BLOCKS, size), dtype=torch.uint8, generator=generator)
                for size in (32, 16)
            ]
            for _ in range(layers)
        ]

        def open_stores(sizes: Sequence[int], _timeout_seconds: float) -> list[ScriptedStore]:
            self.sizes = sizes
            if not self.stores:
                self.stores += [ScriptedStore(sizes, name) for name in names or ("memory",)]
            return self.stores

        self.half = StoresWorker(
            KVConnectorContext(
                name="stores",
                options=StoresOptions(),
                config=KVConnectorConfig(stores=["memory"], load_seconds=load_seconds),
            ),
            KVWorkerContext(
                identity=identity(layers, **identity_changes or {}),
                device=torch.device("cpu"),
                open_stores=open_stores,
                report_fault=lambda *fault: self.faults.append(fault),
            ),
            StoresOptions(**{"breaker_failures": 1000, "timeout_seconds": 60.0} | options),
        )
        self.half.register_kv_caches(self.caches)
        self._totals = {store.name: KVTierStats() for store in self.stores}

    @property
    def store(self) -> ScriptedStore:
        """The nearest store."""
        return self.stores[0]

    def step(
        self, *jobs: Lookup | BlockLoad | Save | Renewal, layers: bool | None = None
    ) -> tuple[Any, set[int]]:
        """Run a step; return the results of `get_finished` and `load_errors`."""
        metadata = Jobs()
        for job in jobs:
            getattr(metadata, _FIELDS[type(job)]).append(job)
        self.half.start_load_kv(metadata if jobs else None)
        if self.half.wants_layers if layers is None else layers:
            for layer in range(len(self.caches)):
                self.half.wait_for_layer_load(layer)
                self.half.save_kv_layer(layer)
        self.half.wait_for_save()
        return frozenset(self.half.get_finished(frozenset()).loaded), self.half.load_errors()

    def until_loaded(self, load: BlockLoad) -> set[int]:
        """Load; return the blocks that could not be loaded, once the load has ended."""
        loaded, errors = self.step(load)
        while load.request_id not in loaded:
            loaded, more = self.step()
            errors |= more
        return errors

    def until_saved(self, save: Save, stores: int = 1) -> None:
        """Save, and wait until that is done."""
        count = self.kept + self.dropped + len(save.hashes) * stores
        self.step(save)
        wait_until(lambda: self.kept + self.dropped >= count, what="the saves")

    @property
    def kept(self) -> int:
        """Number of parts of blocks that were stored, in all stores together."""
        return sum(tier.stored_blocks for tier in self.totals.values())

    @property
    def dropped(self) -> int:
        """Number of blocks that were not kept."""
        return sum(tier.dropped_blocks for tier in self.totals.values())

    @property
    def totals(self) -> dict[str, Any]:
        """Statistics by store."""
        self._totals |= self.half.stats() or {}
        return self._totals

    def content(self, block: int) -> list[bytes]:
        """Return the bytes of a block, by layers."""
        return [b"".join(bytes(v[block].tolist()) for v in views) for views in self.caches]

    def wipe(self) -> None:
        """Overwrite the KV cache."""
        for views in self.caches:
            for view in views:
                view.zero_()

    def answers(self) -> WorkerMessage:
        """Wait for a message, and return it."""
        messages: list[WorkerMessage] = []
        wait_until(
            lambda: messages.append(self.half.take_message()) or messages[-1], what="answers"
        )
        return messages[-1]


@contextmanager
def opened(*names: str, **settings: Any) -> Iterator[Rank]:
    """Open a rank and close it."""
    rank = Rank(*names, **settings)
    try:
        yield rank
    finally:
        rank.half.close()
