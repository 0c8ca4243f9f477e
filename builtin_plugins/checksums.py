"""Checksums of blocks of the KV cache, for the connector and the stores that keep them."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

__all__ = ["checksum"]


def checksum(parts: Sequence[memoryview]) -> int:
    """Return the xxh3 of 64 bits of all parts, one after the other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
