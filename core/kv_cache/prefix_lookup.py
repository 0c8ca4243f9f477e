"""Search for the longest cached prefix of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardpoint.plugins.kv_cache import KVCacheGroup

from .block_pool import NULL_BLOCK


def first_seen(position: int, window: int) -> int:
    """Return the first token position that the token at `position` sees through a window."""
    return max(0, position - window + 1)


def longest_prefix(
    groups: Sequence[KVCacheGroup],
    indices: Sequence[Mapping[bytes, int]],
    hashes: Sequence[bytes],
    limit: int,
    block_size: int,
) -> tuple[int, list[list[int]]]:
    """Return the length in blocks of the longest prefix that every group has, and its block ids.

    A group without a window needs every block of the prefix. A group with a window needs those
    that the first token after the prefix sees; in place of the others comes the null block.

    Args:
        groups: groups of the cache.
        indices: per group, hash to block id.
        hashes: hashes of the request's blocks.
        limit: longest prefix to consider, in blocks.
        block_size: tokens per block.
    """
    full: dict[int, list[int]] = {}
    for group, (spec, index) in enumerate(zip(groups, indices, strict=True)):
        if spec.window is None:
            full[group] = _leading(index, hashes, limit)
            limit = len(full[group])
    length = _common_length(groups, indices, hashes, limit, block_size)
    tables = []
    for group, (spec, index) in enumerate(zip(groups, indices, strict=True)):
        if spec.window is None:
            tables.append(full[group][:length])
            continue
        unseen = first_seen(length * block_size, spec.window) // block_size
        seen = [index[key] for key in hashes[unseen:length]]
        tables.append([NULL_BLOCK] * min(unseen, length) + seen)
    return length, tables


def _leading(index: Mapping[bytes, int], hashes: Sequence[bytes], limit: int) -> list[int]:
    """Return the blocks of the longest leading run of hashes that are in the index."""
    blocks = []
    get = index.get
    for key in hashes[:limit]:
        block = get(key)
        if block is None:
            break
        blocks.append(block)
    return blocks


def _common_length(
    groups: Sequence[KVCacheGroup],
    indices: Sequence[Mapping[bytes, int]],
    hashes: Sequence[bytes],
    length: int,
    block_size: int,
) -> int:
    """Shorten `length` until every windowed group has the blocks that its window sees there."""
    windows = [
        (-(-(spec.window - 1) // block_size), index)
        for spec, index in zip(groups, indices, strict=True)
        if spec.window is not None
    ]
    while True:
        before = length
        for needed, index in windows:
            length = _trailing(index, hashes, length, needed)
        if length == before:
            return length


def _trailing(index: Mapping[bytes, int], hashes: Sequence[bytes], limit: int, needed: int) -> int:
    """Return the longest length up to `limit` whose last `needed` blocks are in the index."""
    length = position = limit
    while position > max(0, length - needed):
        position -= 1
        if hashes[position] not in index:
            length = position
    return length
