"""Headers of blocks: whatever is not the very block that was written is refused."""

from __future__ import annotations

import re
import struct

import pytest

from hardpoint.builtin_plugins.kv_connectors.frames import (
    HEADER_BYTES,
    BadBlockError,
    check_block,
    write_header,
)

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SIZES = (HEADER_BYTES, 48, 16)


def written(key: bytes = KEY, generation: int = 7) -> list[bytearray]:
    """Return a block as stores get it: header and two layers."""
    parts = [bytearray(b"?" * size) for size in SIZES]
    parts[1][:] = bytes(range(48))
    write_header([memoryview(part) for part in parts], key, generation)
    return parts


def check(parts: list[bytearray], key: bytes = KEY) -> None:
    check_block([memoryview(part) for part in parts], key)


def test_what_was_written_is_accepted():
    check(written())
    check(written(OTHER, 0), OTHER)


def test_each_damaged_byte_is_found():
    """Of the header's fields, its padding, the checksum and each layer."""
    for part in range(len(SIZES)):
        for at in range(SIZES[part]):
            block = written()
            block[part][at] ^= 1 << at % 8
            with pytest.raises(BadBlockError):
                check(block)


@pytest.mark.parametrize("value", [0, 255])
def test_parts_that_were_not_written_are_found(value):
    for part in range(len(SIZES)):
        block = written()
        block[part][:] = bytes([value]) * SIZES[part]
        with pytest.raises(BadBlockError):
            check(block)


def test_layers_that_changed_places_are_found():
    parts = [bytearray(HEADER_BYTES), bytearray(b"a" * 16), bytearray(b"b" * 16)]
    write_header([memoryview(part) for part in parts], KEY, 1)
    check(parts)
    with pytest.raises(BadBlockError, match="checksum is wrong, of generation 1"):
        check([parts[0], parts[2], parts[1]])


@pytest.mark.parametrize(
    ("offset", "field", "words"),
    [
        (0, b"HARDPTKX", "no header of this version"),
        (8, struct.pack("<I", 2), "no header of this version"),
        (12, struct.pack("<I", 3), "64 bytes in 3 layers, expected 64"),
        (16, struct.pack("<Q", 1 << 63), f"{1 << 63} bytes in 2 layers, expected 64"),
        (24, OTHER, "the block of another key, of generation 7"),
        (56, struct.pack("<Q", 8), "checksum is wrong, of generation 8"),
        (64, bytes(8), "checksum is wrong, of generation 7"),
    ],
)
def test_each_field_is_compared(offset, field, words):
    block = written()
    block[0][offset : offset + len(field)] = field
    with pytest.raises(BadBlockError, match=re.escape(words)):
        check(block)


def test_the_block_of_another_key_is_refused():
    with pytest.raises(BadBlockError, match="another key"):
        check(written(OTHER))


def test_blocks_of_other_sizes_are_refused():
    """As those of an engine with other layers would be, if their key were the same."""
    parts = [bytearray(HEADER_BYTES), bytearray(64)]
    write_header([memoryview(part) for part in parts], KEY, 1)
    with pytest.raises(BadBlockError, match="64 bytes in 1 layers, expected 64"):
        check([parts[0], parts[1][:48], parts[1][48:]])
