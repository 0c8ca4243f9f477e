"""Blocks as stores get them: a header, then the bytes of each layer.

The header says whose block it is, and has a checksum of all bytes. It is compared after each load,
so that damaged, foreign and outdated bytes are misses.
"""

from __future__ import annotations

import struct

import xxhash

from hardpoint.plugins.kv_store import BlockBuffer

_MAGIC = b"HARDPTKV"
_VERSION = 1
_CHECKSUM = struct.Struct("<Q")  # of all that follows
_HEADER = struct.Struct("<8sIIQ32sQ")
HEADER_BYTES = 128
"""Of the header, padding included."""


class BadBlockError(Exception):
    """A block is not what was asked for; the message says why."""


def write_header(buffer: BlockBuffer, key: bytes, generation: int) -> None:
    """Write the header of a block whose layers are in the buffer.

    Args:
        buffer: the header, then the layers.
        key: of the block.
        generation: a number that no other write has.
    """
    whole, size = buffer.whole, len(buffer.whole) - HEADER_BYTES
    whole[:HEADER_BYTES] = bytes(HEADER_BYTES)
    fields = (_MAGIC, _VERSION, len(buffer) - 1, size, key, generation)
    _HEADER.pack_into(whole, _CHECKSUM.size, *fields)
    _CHECKSUM.pack_into(whole, 0, _checksum(buffer))


def check_block(buffer: BlockBuffer, key: bytes) -> None:
    """Check a block that a store has loaded.

    Raises:
        BadBlockError: it is another one, or damaged.
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


def _checksum(buffer: BlockBuffer) -> int:
    """Return the checksum of all that follows it, xxh3 with 64 bits."""
    return xxhash.xxh3_64_intdigest(buffer.whole[_CHECKSUM.size :])
