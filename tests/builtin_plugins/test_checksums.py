"""Checksums of blocks."""

import xxhash

from hardpoint.builtin_plugins import checksums

PARTS = [memoryview(b"ab"), memoryview(b""), memoryview(b"c")]


def test_parts_are_read_one_after_the_other():
    assert checksums.checksum(PARTS) == xxhash.xxh3_64_intdigest(b"abc")
    assert checksums.checksum([*PARTS, memoryview(b"d")]) != checksums.checksum(PARTS)
