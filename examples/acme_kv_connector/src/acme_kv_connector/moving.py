"""The worker half: reads files into the KV cache, and writes them, layer by layer."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.plugins.kv_connector import (
    FinishedTransfers,
    KVConnectorWorker,
    KVWorkerContext,
    block_key,
)

from .jobs import Jobs, Move

if TYPE_CHECKING:
    import torch

_CHECKSUM_BYTES = 32


@dataclass
class Load:
    """A load of this step.

    Attributes:
        layers: the bytes of each block of a layer, up to the first that is not there.
        num_right: blocks that are loaded in all layers so far.
    """

    move: Move
    layers: list[Future[list[bytes]]]
    num_right: int


class FilesWorker(KVConnectorWorker):
    """Reads ahead in threads while layers are computed; writes in threads after the step."""

    def __init__(
        self,
        folder: Path,
        context: KVWorkerContext,
        threads: int,
        max_unwritten: int,
        timeout: float,
    ) -> None:
        """Start the threads.

        Args:
            folder: folder of the files.
            context: context of the half.
            threads: number of them.
            max_unwritten: blocks that may wait to be written.
            timeout: seconds to wait for a layer.
        """
        self._folder = folder
        self._identity = context.identity.digest()
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(threads, "LayeredFiles")
        self._room = threading.Semaphore(max_unwritten)
        self._sizes = context.identity.layer_bytes
        self._caches: Sequence[Sequence[torch.Tensor]] = ()
        self._loads: list[Load] = []
        self._saves: dict[bytes, int] = {}  # block id by key: requests may complete equal blocks
        self._copies: dict[bytes, list[bytes]] = {}
        self._errors: set[int] = set()

    def handshake(self) -> bytes:
        """Return the key of this rank's blocks."""
        return self._identity

    def register_kv_caches(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the cache."""
        self._caches = caches

    @property
    def wants_layers(self) -> bool:  # type: ignore[override] # read in each step
        """Whether the step loads or saves anything."""
        return bool(self._loads or self._saves)

    def start_load_kv(self, metadata: Jobs | None) -> None:
        """Let threads read all layers of the step's loads, the first layer first."""
        self._loads, self._saves, self._copies = [], {}, {}
        if metadata is None:
            return
        for save in metadata.saves:
            for block_hash, block_id in zip(save.hashes, save.block_ids, strict=True):
                self._saves[self._key(block_hash)] = block_id
        self._copies = {key: [] for key in self._saves}
        self._loads = [Load(move, [], len(move.hashes)) for move in metadata.loads]
        for layer in range(len(self._sizes)):
            for load in self._loads:
                load.layers.append(self._pool.submit(self._read, load.move, layer))

    def wait_for_layer_load(self, layer: int) -> None:
        """Copy the blocks that were read for a layer; the others are computed."""
        for load in self._loads:
            try:
                blocks = load.layers[layer].result(self._timeout)
            except TimeoutError:
                blocks = []
            for block_id, data in zip(load.move.block_ids, blocks, strict=False):
                self._write_to_cache(layer, block_id, data)
            load.num_right = min(load.num_right, len(blocks))

    def save_kv_layer(self, layer: int) -> None:
        """Copy the blocks to save."""
        for key, block_id in self._saves.items():
            self._copies[key].append(self._read_from_cache(layer, block_id))

    def wait_for_save(self) -> None:
        """Let threads write the copied blocks of all layers."""
        for load in self._loads:
            self._errors.update(load.move.block_ids[load.num_right :])
        for key, copies in self._copies.items():
            if self._room.acquire(blocking=False):
                self._pool.submit(self._write, key, copies)
        self._loads, self._saves, self._copies = [], {}, {}

    def get_finished(self, ended: frozenset[str]) -> FinishedTransfers:  # noqa: ARG002
        """Return nothing: all loads are done within their step."""
        return FinishedTransfers()

    def load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        errors, self._errors = self._errors, set()
        return errors

    def close(self) -> None:
        """Write the pending blocks."""
        self._pool.shutdown()

    def _key(self, block_hash: bytes) -> bytes:
        return block_key(self._identity, block_hash)

    # In threads

    def _read(self, move: Move, layer: int) -> list[bytes]:
        """Return a layer of blocks, up to the first that is not there or not right."""
        size = _CHECKSUM_BYTES + self._sizes[layer]
        start = sum(self._sizes[:layer]) + layer * _CHECKSUM_BYTES
        blocks: list[bytes] = []
        for block_hash in move.hashes:
            key = self._key(block_hash)
            path = self._folder / key.hex()
            try:
                with path.open("rb") as file:
                    part = os.pread(file.fileno(), size, start)
            except OSError:
                break
            data = part[_CHECKSUM_BYTES:]
            if part[:_CHECKSUM_BYTES] != _checksum(key, layer, data):
                with suppress(OSError):
                    path.unlink()  # it is written again
                break
            blocks.append(data)
        return blocks

    def _write(self, key: bytes, layers: Sequence[bytes]) -> None:
        """Write a file, under another name until it is complete."""
        path = self._folder / key.hex()
        try:
            if path.exists():
                return
            descriptor, temporary = tempfile.mkstemp(dir=self._folder)
            try:
                with open(descriptor, "wb") as file:
                    for layer, data in enumerate(layers):
                        file.write(_checksum(key, layer, data) + data)
                Path(temporary).replace(path)
            except OSError:
                Path(temporary).unlink()
        except OSError:
            pass  # what cannot be written is not kept
        finally:
            self._room.release()

    # The KV cache

    def _write_to_cache(self, layer: int, block_id: int, data: bytes) -> None:
        import torch  # noqa: PLC0415 - the scheduler half needs none

        source, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
        for view in self._caches[layer]:
            view[block_id].copy_(source[start : start + view.shape[1]])
            start += view.shape[1]

    def _read_from_cache(self, layer: int, block_id: int) -> bytes:
        return b"".join(view[block_id].cpu().numpy().tobytes() for view in self._caches[layer])


def _checksum(key: bytes, layer: int, data: bytes) -> bytes:
    return hashlib.sha256(key + layer.to_bytes(4, "little") + data).digest()
