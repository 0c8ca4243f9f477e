"""Changes of an engine's KV cache on their way to a client: several become one."""

from __future__ import annotations

from hardpoint.plugins.engine_state import KVCacheChanges

MOST_UNREAD = 65_536
"""Blocks in unread changes of a client; if there are more, they are dropped."""


def merged_changes(
    held: KVCacheChanges | None, later: KVCacheChanges | None
) -> KVCacheChanges | None:
    """Return two changes as one, None if there are none.

    Args:
        held: changes that only the caller has; they may be changed in place.
        later: those that come after them; they stay as they are.
    """
    if held is None or later is None:
        return held if later is None else copied(later)
    if later.first != held.last + 1:  # what is missing makes the earlier ones void
        return copied(later)
    held.last = later.last
    if later.cleared:
        held.cleared, held.stored, held.removed = True, set(later.stored), set()
    else:
        held.stored -= later.removed
        held.stored |= later.stored
        if not held.cleared:
            held.removed -= later.stored
            held.removed |= later.removed
    if len(held.stored) + len(held.removed) > MOST_UNREAD:
        return KVCacheChanges(first=held.last + 1, last=held.last)
    return held


def copied(changes: KVCacheChanges) -> KVCacheChanges:
    """Return a copy with sets of its own."""
    return KVCacheChanges(
        first=changes.first,
        last=changes.last,
        cleared=changes.cleared,
        stored=set(changes.stored),
        removed=set(changes.removed),
    )
