"""The sums of the Prometheus sink: plain numbers, since a step may end many requests at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hardpoint.plugins import (
    EngineReport,
    IterationStats,
    KVTierStats,
    PrefixCacheStats,
    SchedulerStats,
)

if TYPE_CHECKING:
    from hardpoint.plugins.requests.stats import FinishedRequest, PluginReport

# The bounds are vLLM's, with smaller ones for small models: sums over instances of both
# engines are right from vLLM's first bound on.
_FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_NEXT_TOKEN = (
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_REQUEST = (
    "0.001 0.01 0.05 0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 "
    "7680"
)
_TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000 1000000"
_STEP_TOKENS = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"
_COMPLETIONS = "1 2 5 10 20"
_PREEMPTIONS = "1 2 3 4 5 10 20"
_MOST_OPEN_PROMPTS = 10_000

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition", "timeout")


class Histogram:
    """Counts of values by the smallest bound that is not below them.

    Attributes:
        sum: sum of all values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: str) -> None:
        """Start empty; `bounds` rise, without infinity, and are separated by blanks."""
        self._bounds = [float(bound) for bound in bounds.split()]
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float | None) -> None:
        """Add a value; None is ignored."""
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self.sum += value

    def add_all(self, values: Sequence[float]) -> None:
        """Add several values."""
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound as text, infinity too, and the number of values up to it."""
        result, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return result


class Total:
    """Follows a total that starts again with a new engine; never falls."""

    __slots__ = ("_last", "value")

    def __init__(self) -> None:
        self._last = self.value = 0.0

    def follow(self, now: float) -> None:
        """Add the growth of the total; a smaller total than before has started again."""
        self.value += now - self._last if now >= self._last else now
        self._last = now


class TierFigures:
    """The figures of the tiers of a KV connector, by name, nearest first.

    Attributes:
        used_bytes: by tier, for tiers that report it.
    """

    _TOTALS = tuple(name for name in KVTierStats.__struct_fields__ if name != "used_bytes")

    def __init__(self) -> None:
        self._tiers: dict[str, dict[str, Total]] = {}
        self.used_bytes: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def follow(self, tiers: Mapping[str, KVTierStats]) -> None:
        """Read totals; totals of a missing tier start again."""
        for name in tiers:
            if name not in self._tiers:
                self._tiers[name] = {field: Total() for field in self._TOTALS}
        for name, totals in self._tiers.items():
            tier = tiers.get(name)
            for field, total in totals.items():
                total.follow(0 if tier is None else getattr(tier, field))
        self.used_bytes = {
            name: tier.used_bytes for name, tier in tiers.items() if tier.used_bytes is not None
        }

    def totals(self, field: str) -> dict[str, float]:
        """Return a total, a field of `KVTierStats`, by tier."""
        return {name: totals[field].value for name, totals in self._tiers.items()}

    def sum(self, field: str) -> float:
        """Return a total of all tiers together."""
        return sum(self.totals(field).values())

    def nearest(self, field: str) -> float:
        """Return a total of the nearest tier; 0 without tiers."""
        return next(iter(self.totals(field).values()), 0.0)


class EngineFigures:
    """The figures of one engine and of its requests.

    Attributes:
        scheduler: its state; its totals are followed by other attributes.
        sleep_level: 0 is awake.
        restarts: how often it was restarted.
        resumes: requests that went on there, after they had left another engine.
        tiers: figures of the KV connector's tiers.
        retains: whether requests have asked for blocks to be kept (`retain_seconds`).
    """

    def __init__(self) -> None:
        self.scheduler = SchedulerStats(
            num_running=0, num_waiting=0, kv_cache_usage=0.0, prefix_cache=PrefixCacheStats()
        )
        self.sleep_level = self.restarts = self.resumes = 0
        self.prompt_tokens = self.prompt_tokens_cached = self.prompt_tokens_external = 0
        self.generation_tokens = 0
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.prefix_cache_queries, self.prefix_cache_hits = Total(), Total()
        self.external_queries, self.external_hits = Total(), Total()
        self.tiers = TierFigures()
        self.preemptions = Total()
        self.drafts, self.draft_tokens, self.accepted_tokens = Total(), Total(), Total()
        self.accepted_by_position: list[Total] = []
        self.waits_for_results: defaultdict[str, Total] = defaultdict(Total)
        self.retained_hits, self.retained_evictions = Total(), Total()
        self.retains = False
        self.iteration_tokens = Histogram(_STEP_TOKENS)
        self.time_to_first_token = Histogram(_FIRST_TOKEN)
        self.inter_token_latency = Histogram(_NEXT_TOKEN)
        self.time_per_output_token = Histogram(_NEXT_TOKEN)
        self.e2e, self.queue, self.prefill = (Histogram(_REQUEST) for _ in range(3))
        self.decode, self.inference = Histogram(_REQUEST), Histogram(_REQUEST)
        self.request_prompt_tokens, self.request_generation_tokens = _tokens(), _tokens()
        self.params_n, self.params_max_tokens = Histogram(_COMPLETIONS), _tokens()
        self.prefill_computed_tokens, self.longest_completion = _tokens(), _tokens()
        self.request_preemptions = Histogram(_PREEMPTIONS)
        self._open_prompts: dict[str, tuple[int, int]] = {}

    def record(self, stats: IterationStats) -> None:
        """Add the statistics of a batch, all but the state of the scheduler."""
        self.prompt_tokens += stats.num_prompt_tokens
        self.prompt_tokens_cached += stats.num_cached_tokens
        self.prompt_tokens_external += stats.num_external_tokens
        self.generation_tokens += stats.num_generation_tokens
        if tokens := stats.num_prompt_tokens + stats.num_generation_tokens:
            self.iteration_tokens.add(tokens)
        self.time_to_first_token.add_all(stats.time_to_first_token)
        self.inter_token_latency.add_all(stats.inter_token_latency)
        if stats.finished:
            self._add_finished(stats)

    def read(self, report: EngineReport) -> None:
        """Read the state of the engine, if there are several."""
        self.restarts, self.resumes = report.restarts, report.num_resumes
        if report.sleep_level is not None:
            self.sleep_level = report.sleep_level

    def follow(self, scheduler: SchedulerStats) -> None:
        """Read the state of the scheduler, and follow its totals."""
        self.scheduler = scheduler
        self.prefix_cache_queries.follow(scheduler.prefix_cache.queried_tokens)
        self.prefix_cache_hits.follow(scheduler.prefix_cache.hit_tokens)
        external = scheduler.external_prefix_cache or PrefixCacheStats()
        self.external_queries.follow(external.queried_tokens)
        self.external_hits.follow(external.hit_tokens)
        self.tiers.follow(scheduler.kv_tiers)
        self.preemptions.follow(scheduler.num_preemptions)
        self.drafts.follow(scheduler.num_verified_drafts)
        self.draft_tokens.follow(scheduler.num_drafts)
        self.accepted_tokens.follow(scheduler.num_accepted_drafts)
        self.retained_hits.follow(scheduler.num_retained_hits)
        self.retained_evictions.follow(scheduler.num_retained_evictions)
        self.retains = self.retains or scheduler.num_retained_blocks > 0
        by_position = scheduler.num_accepted_by_position
        waits = scheduler.num_waits_for_results
        for part in waits.keys() | self.waits_for_results.keys():
            self.waits_for_results[part].follow(waits.get(part, 0))
        while len(self.accepted_by_position) < len(by_position):
            self.accepted_by_position.append(Total())
        for position, total in enumerate(self.accepted_by_position):
            total.follow(by_position[position] if position < len(by_position) else 0)

    def _add_finished(self, stats: IterationStats) -> None:
        for request in stats.finished:
            metrics = request.metrics
            self.finished[request.finish_reason] += 1
            self.request_prompt_tokens.add(metrics.num_prompt_tokens)
            self.request_generation_tokens.add(metrics.num_generation_tokens)
            self.params_max_tokens.add(request.max_tokens)
            self._add_longest(request)
            computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
            self.prefill_computed_tokens.add(computed)
            self.request_preemptions.add(metrics.num_preemptions)
            if request.index == 0:  # the prompt has one n, and several completions
                self.params_n.add(request.n)
            self.e2e.add(metrics.e2e_seconds)
            self.queue.add(metrics.queue_seconds)
            self.prefill.add(metrics.prefill_seconds)
            decode = metrics.decode_seconds
            self.decode.add(decode)
            if decode is None:
                continue
            if metrics.prefill_seconds is not None:
                self.inference.add(metrics.prefill_seconds + decode)
            if metrics.num_generation_tokens > 1:
                self.time_per_output_token.add(decode / (metrics.num_generation_tokens - 1))

    def _add_longest(self, request: FinishedRequest) -> None:
        """Add the length of the longest completion of a prompt once all of them have ended."""
        count, longest = self._open_prompts.pop(request.request_id, (0, 0))
        count, longest = count + 1, max(longest, request.metrics.num_generation_tokens)
        if count >= request.n:
            self.longest_completion.add(longest)
            return
        self._open_prompts[request.request_id] = count, longest
        if len(self._open_prompts) > _MOST_OPEN_PROMPTS:  # of prompts with lost completions
            del self._open_prompts[next(iter(self._open_prompts))]


class PluginFigures:
    """The costs and faults of plugins, by plugin name.

    Attributes:
        quarantined: 1 for a plugin that is quarantined, else 0.
        num_blocks: number of blocks of the KV cache; None if it is unknown.
    """

    def __init__(self) -> None:
        self._totals: dict[str, defaultdict[str, Total]] = defaultdict(lambda: defaultdict(Total))
        self.quarantined: dict[str, float] = {}
        self.num_blocks: int | None = None

    def follow(self, report: PluginReport) -> None:
        """Read a report."""
        health = report.health
        for name, meter in report.meters.items():
            self._totals["seconds"][name].follow(meter.seconds)
            self._totals["rows"][name].follow(meter.rows)
            self._totals["steps"][name].follow(meter.steps)
        for name, count in health.faults.items():
            self._totals["faults"][name].follow(count)
        for field, faults in (("fallbacks", health.fallbacks), ("slow_steps", health.slow)):
            for name, fault in faults.items():
                self._totals[field][name].follow(fault.count)
        known = {*self.quarantined, *report.meters, *health.faults, *health.quarantined}
        self.quarantined = {name: float(name in health.quarantined) for name in sorted(known)}
        self.num_blocks = report.num_blocks

    def totals(self, field: str) -> Mapping[str, float]:
        """Return a total by plugin name: seconds, rows, steps, faults, fallbacks or slow_steps."""
        return {name: total.value for name, total in sorted(self._totals[field].items())}


def _tokens() -> Histogram:
    return Histogram(_TOKENS)
