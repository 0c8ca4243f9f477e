"""Figures that an engine tells of itself."""

from __future__ import annotations

import msgspec

__all__ = ["PrefixCacheStats", "SchedulerStats"]


class PrefixCacheStats(msgspec.Struct, array_like=True):
    """What the prefix cache did since the start.

    Attributes:
        requests: lookups.
        queried_tokens: tokens of the requests that were looked up.
        hit_tokens: those of them that were there.
    """

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, kw_only=True):
    """How a scheduler stands now, with totals since the start.

    Attributes:
        num_waiting: requests that do not run, for whatever reason.
        kv_cache_usage: share of the blocks that requests hold, from 0 to 1.
        num_preemptions: so far.
        num_drafts, num_accepted_drafts: draft tokens verified and accepted so far.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache: PrefixCacheStats
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
