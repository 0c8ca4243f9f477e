"""Engines that exchange blocks, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardpoint.builtin_plugins.kv_stores.p2p import PeerToPeerStore
from hardpoint.plugins import KVStoreContext
from hardpoint.plugins.kv_store import BlockBuffer
from hardpoint.typed import convert

SIZES = (128, 5000, 3000)
BLOCK = sum(SIZES)
PATIENT = {"lookup_seconds": 60.0, "connect_seconds": 60.0, "wait_seconds": 60.0}
"""Options with which no answer comes too late."""


def peer_context(name: str, options: dict[str, Any], **fields: Any) -> KVStoreContext:
    """Return the context of a store, with its options checked as the engine does."""
    checked = convert(options, PeerToPeerStore.Options, path="plugin.p2p")
    defaults: dict[str, Any] = {"sizes": SIZES, "identity": "model", "timeout_seconds": 60.0}
    return KVStoreContext(name="p2p", options=checked, engine_id=name, **{**defaults, **fields})


class Peers:
    """Stores that know each other by sockets in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []
        self.stores: dict[str, PeerToPeerStore] = {}

    def address(self, name: str) -> str:
        return f"ipc://{self.folder}/sockets/{name}.sock"

    def options(self, name: str, **options: Any) -> dict[str, Any]:
        peers = {peer: self.address(peer) for peer in ("a", "b")}
        known = {"listen": self.address(name), "peers": peers}
        return {**known, **PATIENT, **options}

    def open(self, name: str, *, identity: str = "model", **options: Any) -> PeerToPeerStore:
        context = peer_context(
            name,
            self.options(name, **options),
            identity=identity,
            report_fault=self.faults.append,
        )
        self.stores[name] = PeerToPeerStore(context)
        return self.stores[name]

    def close(self, name: str) -> None:
        self.stores.pop(name).close()

    def close_all(self) -> None:
        for name in list(self.stores):
            self.close(name)


def block(fill: int = 0) -> BlockBuffer:
    """Return a buffer of a block that is filled with one byte."""
    return BlockBuffer(memoryview(bytearray([fill]) * BLOCK), SIZES)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def holds(buffer: BlockBuffer, fill: int) -> bool:
    return bytes(buffer.whole) == bytes([fill]) * BLOCK
