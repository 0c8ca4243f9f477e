"""Blocks as stores get them: a header, then the bytes of each layer.

The header says whose block it is, and has a checksum of all bytes. It is compared after each load,
so that damaged, foreign and outdated bytes are misses.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

_MAGIC = b"HARDPTKV"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ32sQ")
_CHECKSUM = struct.Struct("<Q")  # after the header
HEADER_BYTES = 128
"""Of the header, padding included."""


class BadBlockError(Exception):
    """A block is not what was asked for; the message says why."""


def write_header(buffer: Sequence[memoryview], key: bytes, generation: int) -> None:
    """Write the header of a block whose layers are in the buffer.

    Args:
        buffer: the header, then the layers.
        key: of the block.
        generation: a number that no other write has.
    """
    header, *layers = buffer
    header[:] = bytes(len(header))
    _HEADER.pack_into(header, 0, _MAGIC, _VERSION, len(layers), _size(layers), key, generation)
    _CHECKSUM.pack_into(header, _HEADER.size, _checksum(buffer))


def check_block(buffer: Sequence[memoryview], key: bytes) -> None:
    """Check a block that a store has loaded.

    Raises:
        BadBlockError: it is another one, or damaged.
    """
    header, *layers = buffer
    magic, version, count, size, of_key, generation = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != _VERSION:
        raise BadBlockError("it has no header of this version")
    if (count, size) != (len(layers), _size(layers)):
        raise BadBlockError(f"it has {size} bytes in {count} layers, expected {_size(layers)}")
    if of_key != key:
        raise BadBlockError(f"it is the block of another key, of generation {generation}")
    if _CHECKSUM.unpack_from(header, _HEADER.size) != (_checksum(buffer),):
        raise BadBlockError(f"its checksum is wrong, of generation {generation}")


def _size(layers: Sequence[memoryview]) -> int:
    return sum(map(len, layers))


def _checksum(buffer: Sequence[memoryview]) -> int:
    """Return the checksum of a block and the rest of its header, xxh3 with 64 bits."""
    header, *layers = buffer
    digest = xxhash.xxh3_64()
    digest.update(header[: _HEADER.size])
    digest.update(header[_HEADER.size + _CHECKSUM.size :])
    for layer in layers:
        digest.update(layer)
    return digest.intdigest()
