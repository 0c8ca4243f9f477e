"""Counts the leading blocks that requests share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def may_share(tables: Sequence[list[int]], ref_count: Sequence[int], count: int) -> bool:
    """Whether `count` requests can have a leading block in common in any group.

    Args:
        tables: those of one of the requests, by group.
        ref_count: by block id, how many requests have it; 0 for the null block.
    """
    return any(table and ref_count[table[0]] >= count for table in tables)


def common_prefix(
    tables: Sequence[list[int]], ref_count: Sequence[int], *, are_all: bool = False
) -> int:
    """Return how many leading blocks all tables have in common; null blocks do not count.

    The time that it takes grows with what is shared, not with the length of the tables.

    Args:
        tables: at least one.
        ref_count: by block id, how many tables have it, these and others.
        are_all: whether there are no others.
    """
    first, count = tables[0], len(tables)
    if not first or not ref_count[first[0]]:  # nobody holds the null block
        return 0
    if count == 1:
        return len(first)
    # A block stands at the same place in all tables that have it.
    most = 0
    for block in first:
        if ref_count[block] < count:
            break
        most += 1
    if are_all or not most:
        return most
    # What the smallest and the largest have in common, all in between have, too.
    heads = [table[:most] for table in tables]
    low, high = min(heads), max(heads)
    return bisect_left(range(len(low)), True, key=lambda i: low[: i + 1] != high[: i + 1])
