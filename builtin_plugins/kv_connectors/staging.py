"""Blocks in host memory: a header, then the bytes of each layer; copies to and from the KV cache.

The header identifies the block, and has a checksum of all bytes. It is compared after each load,
so that damaged, foreign and outdated bytes are misses. With a secret it also has a message
authentication code (keyed BLAKE2b): who can write to a store can choose tokens without one.

Stores never touch the KV cache: a store that goes on writing after its time would overwrite the
blocks of other requests.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hardpoint.builtin_plugins import checksums
from hardpoint.builtin_plugins.secret_files import read_secret
from hardpoint.plugins import ConfigError
from hardpoint.plugins.kv_store import BlockBuffer

_MAGIC = b"HARDPTKV"
_VERSION = 1
_CHECKSUM = struct.Struct("<Q")  # of all that follows
_HEADER = struct.Struct("<8sIIQ32sQ")
_MAC = slice(_CHECKSUM.size + _HEADER.size, _CHECKSUM.size + _HEADER.size + 32)
_MOST_SECRET_BYTES = 4096
_LEAST_SECRET_BYTES = 32
HEADER_BYTES = 128
"""Of the header, padding included."""


class BadBlockError(Exception):
    """A block is not the requested one; the message gives the reason."""


def read_mac_key(file: str | None, path: str) -> bytes:
    """Return the secret of authentication codes that a file has; nothing without a file.

    Args:
        file: its name.
        path: path of the setting that names it, for messages.

    Raises:
        ConfigError: it cannot be read, others can read it, or it is too short.
    """
    if file is None:
        return b""
    content = read_secret(file, path, _MOST_SECRET_BYTES).strip()
    if len(content) < _LEAST_SECRET_BYTES:
        raise ConfigError(
            f"{path}: {file!r}: expected at least {_LEAST_SECRET_BYTES} random bytes, as of "
            f"`openssl rand -hex 32`, got {len(content)}"
        )
    return hashlib.blake2b(content, person=b"hardpoint kv").digest()


def write_header(buffer: BlockBuffer, key: bytes, generation: int, secret: bytes = b"") -> None:
    """Write the header of a block after its layers are in the buffer.

    Args:
        buffer: the header, then the layers.
        key: key of the block.
        generation: a number that no other write has.
        secret: from `read_mac_key`; nothing for no authentication code.
    """
    whole, size = buffer.whole, len(buffer.whole) - HEADER_BYTES
    whole[:HEADER_BYTES] = bytes(HEADER_BYTES)
    fields = (_MAGIC, _VERSION, len(buffer) - 1, size, key, generation)
    _HEADER.pack_into(whole, _CHECKSUM.size, *fields)
    if secret:
        whole[_MAC] = _mac(buffer, secret)
    _CHECKSUM.pack_into(whole, 0, _checksum(buffer))


def check_block(buffer: BlockBuffer, key: bytes, secret: bytes = b"") -> None:
    """Check a block that a store has loaded.

    Args:
        buffer: the header, then the layers.
        key: key of the block.
        secret: from `read_mac_key`; nothing to check no authentication code.

    Raises:
        BadBlockError: it is another one, or damaged, or was written without the secret.
    """
    whole, expected = buffer.whole, len(buffer.whole) - HEADER_BYTES
    fields = _HEADER.unpack_from(whole, _CHECKSUM.size)
    magic, version, count, size, of_key, generation = fields
    if magic != _MAGIC or version != _VERSION:
        raise BadBlockError("it has no header of this version")
    if (count, size) != (len(buffer) - 1, expected):
        raise BadBlockError(f"it has {size} bytes in {count} layers, expected {expected}")
    if of_key != key:
        raise BadBlockError(f"it is the block of another key, of generation {generation}")
    if _CHECKSUM.unpack_from(whole) != (_checksum(buffer),):
        raise BadBlockError(f"its checksum is wrong, of generation {generation}")
    if secret and not hmac.compare_digest(whole[_MAC], _mac(buffer, secret)):
        raise BadBlockError("its authentication code is not of the key in mac_key_file")


def _checksum(buffer: BlockBuffer) -> int:
    return checksums.checksum([buffer.whole[_CHECKSUM.size :]])


def _mac(buffer: BlockBuffer, secret: bytes) -> bytes:
    whole = buffer.whole
    code = hashlib.blake2b(whole[_CHECKSUM.size : _MAC.start], key=secret, digest_size=32)
    code.update(whole[_MAC.stop :])
    return code.digest()


def copy_buffer(source: BlockBuffer, target: BlockBuffer) -> None:
    """Copy all bytes; other threads run in the meantime."""
    np.copyto(np.frombuffer(target.whole, np.uint8), np.frombuffer(source.whole, np.uint8))


class Buffer:
    """Room for one block of some layers in host memory.

    Attributes:
        layers: uint8 [bytes] of each layer; pinned tensors, or arrays.
        views: views of the header and of each layer, for stores.
    """

    def __init__(self, layer_bytes: Sequence[int], *, pin_memory: bool) -> None:
        size = HEADER_BYTES + sum(layer_bytes)
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
        _, *layers = torch.split(memory, [HEADER_BYTES, *layer_bytes])
        self.layers: list[Any] = layers if pin_memory else [part.numpy() for part in layers]
        self.views = BlockBuffer(memory.numpy().data, [HEADER_BYTES, *layer_bytes])


class CacheBlocks:
    """The KV cache of this rank as bytes by block."""

    def __init__(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """`caches` are the views of each layer, uint8 [num_blocks, bytes]."""
        # Of arrays, which copy small parts in a third of the time that tensors take.
        self._caches: list[list[Any]] = [
            [view.numpy() if view.device.type == "cpu" else view for view in views]
            for views in caches
        ]
        self.layer_bytes = [sum(view.shape[1] for view in views) for views in caches]

    @torch.inference_mode()  # in which the cache may have been allocated
    def read(self, block_id: int, layers: range, buffer: Buffer) -> None:
        """Copy a block of the cache into a buffer."""
        for layer, room in zip(layers, buffer.layers, strict=True):
            start = 0
            for view in self._caches[layer]:
                end = start + view.shape[1]
                room[start:end] = view[block_id]
                start = end

    @torch.inference_mode()  # as the cache may have been allocated, in another thread
    def write(self, block_id: int, layers: range, buffer: Buffer) -> None:
        """Copy a buffer into a block of the cache."""
        for layer, array in zip(layers, buffer.layers, strict=True):
            start = 0
            for view in self._caches[layer]:
                end = start + view.shape[1]
                view[block_id] = array[start:end]
                start = end


class BufferPool:
    """Buffers that are used again; there are so many at most."""

    def __init__(self, layer_bytes: Sequence[int], limit: int, *, pin_memory: bool) -> None:
        """Allocate none yet; at least one may be taken."""
        self._layer_bytes = layer_bytes
        self._pin_memory = pin_memory
        self._free: list[Buffer] = []
        self._room = max(1, limit // (HEADER_BYTES + sum(layer_bytes)))
        self._returned = threading.Condition()

    def acquire(self, timeout: float = 0.0) -> Buffer | None:
        """Return a buffer; None if all are in use for so many seconds."""
        with self._returned:
            if not self._free and not self._room:
                self._returned.wait_for(lambda: self._free or self._room, timeout)
            if self._free:
                return self._free.pop()
            if not self._room:
                return None
            self._room -= 1
        try:
            return Buffer(self._layer_bytes, pin_memory=self._pin_memory)
        except BaseException:
            with self._returned:
                self._room += 1
            raise

    def release(self, buffer: Buffer) -> None:
        """Return a buffer that is not used any more."""
        with self._returned:
            self._free.append(buffer)
            self._returned.notify()
