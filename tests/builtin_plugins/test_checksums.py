"""Checksums of blocks, with xxhash and without."""

from __future__ import annotations

import importlib
import sys

import pytest
import xxhash

from hardpoint.builtin_plugins import checksums

PARTS = [memoryview(b"ab"), memoryview(b""), memoryview(b"c" * 5000)]


@pytest.fixture
def without_xxhash(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "xxhash", None)
        yield importlib.reload(checksums)
    importlib.reload(checksums)


def test_they_are_those_of_xxh3():
    assert checksums.VARIANT == 0
    assert checksums.checksum(PARTS) == xxhash.xxh3_64_intdigest(b"".join(PARTS))


def test_without_xxhash_they_are_others_of_another_version(without_xxhash):
    assert without_xxhash.VARIANT == 1 << 16
    found = without_xxhash.checksum(PARTS)
    assert 0 <= found < 1 << 64
    assert found == without_xxhash.checksum([memoryview(b"".join(PARTS))])
    assert found != without_xxhash.checksum([*PARTS, memoryview(b"d")])
    assert found != xxhash.xxh3_64_intdigest(b"".join(PARTS))
