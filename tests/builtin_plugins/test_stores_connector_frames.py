"""Headers of blocks: whatever is not the very block that was written is refused."""

from __future__ import annotations

import re
import struct

import pytest

from hardpoint.builtin_plugins import checksums
from hardpoint.builtin_plugins.kv_connectors.staging import (
    HEADER_BYTES,
    BadBlockError,
    check_block,
    read_mac_key,
    write_header,
)
from hardpoint.plugins import ConfigError
from hardpoint.plugins.kv_store import BlockBuffer

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SIZES = (HEADER_BYTES, 48, 16)


def written(key: bytes = KEY, generation: int = 7, sizes: tuple[int, ...] = SIZES) -> bytearray:
    """Return a block as stores get it: header and layers."""
    data = bytearray(b"?" * sum(sizes))
    data[HEADER_BYTES:] = bytes(range(64))
    write_header(BlockBuffer(memoryview(data), sizes), key, generation)
    return data


def check(data: bytearray, key: bytes = KEY) -> None:
    check_block(BlockBuffer(memoryview(data), SIZES), key)


def test_what_was_written_is_accepted():
    check(written())
    check(written(OTHER, 0), OTHER)


def test_each_damaged_byte_is_found():
    """Of the header's fields, its padding, the checksum and each layer."""
    for at in range(sum(SIZES)):
        block = written()
        block[at] ^= 1 << at % 8
        with pytest.raises(BadBlockError):
            check(block)


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("part", [slice(0, 8), slice(0, 128), slice(128, 176), slice(176, 192)])
def test_parts_that_were_not_written_are_found(part, value):
    block = written()
    block[part] = bytes([value]) * len(block[part])
    with pytest.raises(BadBlockError):
        check(block)


def test_layers_that_changed_places_are_found():
    block = written()
    block[128:144], block[176:192] = block[176:192], block[128:144]
    with pytest.raises(BadBlockError, match="checksum is wrong, of generation 7"):
        check(block)


@pytest.mark.parametrize(
    ("offset", "field", "message"),
    [
        (0, bytes(8), "checksum is wrong, of generation 7"),
        (8, b"HARDPTKX", "no header of this version"),
        (16, struct.pack("<I", 2), "no header of this version"),
        (20, struct.pack("<I", 3), "64 bytes in 3 layers, expected 64"),
        (24, struct.pack("<Q", 1 << 63), f"{1 << 63} bytes in 2 layers, expected 64"),
        (32, OTHER, "the block of another key, of generation 7"),
        (64, struct.pack("<Q", 8), "checksum is wrong, of generation 8"),
    ],
)
def test_each_field_is_compared(offset, field, message):
    block = written()
    block[offset : offset + len(field)] = field
    with pytest.raises(BadBlockError, match=re.escape(message)):
        check(block)


def test_the_block_of_another_key_is_refused():
    with pytest.raises(BadBlockError, match="another key"):
        check(written(OTHER))


def test_blocks_of_other_sizes_are_refused():
    """Blocks of an engine with other layers would be such, if their key were the same."""
    with pytest.raises(BadBlockError, match="64 bytes in 1 layers, expected 64"):
        check(written(sizes=(HEADER_BYTES, 64)))


SECRET = b"s" * 64


def sealed(secret: bytes = SECRET, fill: int = 0) -> bytearray:
    """Return a block with an authentication code."""
    data = written()
    data[HEADER_BYTES] = fill
    write_header(BlockBuffer(memoryview(data), SIZES), KEY, 7, secret)
    return data


def test_with_a_secret_only_who_has_it_can_write_blocks():
    check_block(BlockBuffer(memoryview(sealed()), SIZES), KEY, SECRET)
    check(sealed())  # an engine without a secret does not ask for the code
    moved = sealed(fill=1)
    moved[72:104] = sealed()[72:104]  # the code of another block, with the right checksum
    struct.pack_into("<Q", moved, 0, checksums.checksum([memoryview(moved)[8:]]))
    check(moved)
    for block in (written(), sealed(b"t" * 64), moved):
        with pytest.raises(BadBlockError, match="authentication code is not of the key"):
            check_block(BlockBuffer(memoryview(block), SIZES), KEY, SECRET)


def test_a_file_with_a_secret_is_read_and_checked(tmp_path):
    file, path = tmp_path / "key", "plugin.stores.mac_key_file"
    assert read_mac_key(None, path) == b""
    file.write_text("ab" * 16 + "\n")
    file.chmod(0o600)
    assert len(read_mac_key(str(file), path)) == 64
    file.write_text("short\n")
    with pytest.raises(ConfigError, match=f"^{path}: .*at least 32 random bytes.*, got 5$"):
        read_mac_key(str(file), path)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"^{path}: .*with mode 0600 or 0640, got mode 0644"):
        read_mac_key(str(file), path)
