"""Merged statistics of several schedulers, and the rate at which they compute prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.plugins import PrefixCacheStats, SchedulerStats

_HALF_LIFE_S = 60.0  # of the rate at which prompts are computed


def _added(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        names = dict.fromkeys(name for value in known for name in value)
        return {name: _added(value.get(name) for value in known) for name in names}
    if isinstance(known[0], list):
        longest = max(map(len, known))
        return [
            sum(values_of_engine[i] for values_of_engine in known if i < len(values_of_engine))
            for i in range(longest)
        ]
    if isinstance(known[0], msgspec.Struct):
        return added_structs(known)
    return sum(known)


def added_structs(values: Sequence[Any]) -> Any:
    """Return the field by field sum of structs of one type."""
    names = values[0].__struct_fields__
    return type(values[0])(
        **{name: _added(getattr(value, name) for value in values) for name in names}
    )


def merged_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Return the merged state of several schedulers: sums, and means of shares."""
    if len(stats) == 1:
        return stats[0]
    if not stats:
        return ended_stats(None)
    without = [msgspec.structs.replace(engine_stats, weight_version=None) for engine_stats in stats]
    merged: SchedulerStats = added_structs(without)
    return _with_shares(merged, stats)


def _with_shares(merged: SchedulerStats, stats: Collection[SchedulerStats]) -> SchedulerStats:
    errors = [
        engine_stats.step_cost_error
        for engine_stats in stats
        if engine_stats.step_cost_error is not None
    ]
    versions = {engine_stats.weight_version for engine_stats in stats}
    return msgspec.structs.replace(
        merged,
        kv_cache_usage=sum(engine_stats.kv_cache_usage for engine_stats in stats)
        / max(len(stats), 1),
        step_cost_error=sum(errors) / len(errors) if errors else None,
        weight_version=versions.pop() if len(versions) == 1 else None,
    )


def ended_stats(stats: SchedulerStats | None) -> SchedulerStats:
    """Return the statistics of an engine after its end: its totals, and nothing that it holds."""
    held: dict[str, Any] = {
        "num_running": 0,
        "num_waiting": 0,
        "num_deferred": 0,
        "kv_cache_usage": 0.0,
        "num_without_overlap": {},
        "num_requests_by_adapter": {},
        "num_waiting_by_adapter": {},
        "num_adapter_slots": 0,
        "num_retained_blocks": 0,
    }
    if stats is None:
        return SchedulerStats(prefix_cache=PrefixCacheStats(), **held)
    return msgspec.structs.replace(stats, **held)


class Totals:
    """Statistics of several engines, with totals that do not fall when an engine ends or restarts.

    Attributes:
        num_resumes: by rank, requests that went on at an engine after they had left another one.
        num_restarts: by rank, how often the engine was started again.
    """

    def __init__(self) -> None:
        self._ended: dict[int, SchedulerStats] = {}
        self.num_resumes: Counter[int] = Counter()
        self.num_restarts: Counter[int] = Counter()

    def end(self, rank: int, stats: SchedulerStats | None) -> None:
        """Keep the totals of an engine that has ended."""
        if stats is not None:
            self._ended[rank] = ended_stats(self._of(rank, stats))

    def of(self, engines: Mapping[int, SchedulerStats | None]) -> SchedulerStats:
        """Return the statistics of the engines that serve, merged and each.

        Args:
            engines: what they reported last, by rank.
        """
        known = {rank: stats for rank, stats in engines.items() if stats is not None}
        totals = {rank: self._of(rank, stats) for rank, stats in known.items()}
        totals |= {rank: stats for rank, stats in self._ended.items() if rank not in known}
        merged = merged_stats(list(totals.values()))
        if self._ended:
            merged = _with_shares(merged, known.values())
        return msgspec.structs.replace(merged, engines=dict(sorted(totals.items())))

    def _of(self, rank: int, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics of an engine, with the totals of earlier engines of its rank."""
        ended = self._ended.get(rank)
        return stats if ended is None else _with_shares(merged_stats([stats, ended]), [stats])


class PrefillRate:
    """Tokens of prompts that an engine computes in a second, while it has some to compute.

    The mean over the engines and the time that they were busy with prompts, of which earlier ones
    count less. For one thread at a time.

    Attributes:
        busy_seconds: the time that counts.
    """

    def __init__(self, decay_seconds: float = _HALF_LIFE_S) -> None:
        """`decay_seconds`: busy time after which a measurement counts half."""
        self._decay_seconds = decay_seconds
        self._tokens = self.busy_seconds = 0.0

    @property
    def per_second(self) -> float | None:
        """The tokens per second; None before any were computed."""
        return self._tokens / self.busy_seconds if self.busy_seconds > 0 else None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count tokens that an engine took so long for."""
        share = 0.5 ** (seconds / self._decay_seconds)
        self._tokens = self._tokens * share + num_tokens
        self.busy_seconds = self.busy_seconds * share + seconds
