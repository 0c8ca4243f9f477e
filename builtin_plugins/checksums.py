"""Checksums of blocks of the KV cache, by the connector and the stores that keep them.

They are xxh3's of 64 bits, or BLAKE2b's where xxhash is not installed, which hardpoint-core does
without. What one of them wrote is of another version to the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

__all__ = ["VARIANT", "checksum"]

_Checksum = Callable[[Sequence[memoryview]], int]


def _choose() -> tuple[int, _Checksum]:
    try:
        import xxhash  # noqa: PLC0415
    except ModuleNotFoundError:
        return 1 << 16, _blake2b

    def xxh3(parts: Sequence[memoryview]) -> int:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        return digest.intdigest()

    return 0, xxh3


def _blake2b(parts: Sequence[memoryview]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


VARIANT, _checksum = _choose()
"""Which checksum it is: added to the version of what has one."""


def checksum(parts: Sequence[memoryview]) -> int:
    """Return the checksum of all parts, one after the other; 64 bits."""
    return _checksum(parts)
