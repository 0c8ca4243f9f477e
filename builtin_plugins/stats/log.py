"""The stat sink that logs a line at intervals."""

from __future__ import annotations

import logging

from hardpoint.plugins import (
    IterationStats,
    KVTierStats,
    PrefixCacheStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)

_log = logging.getLogger("hardpoint")


class LogSink(StatSink):
    """Logs averages since its last line, at level INFO; silent while the engine is idle."""

    contract = 1

    def __init__(self, context: StatSinkContext) -> None:
        super().__init__(context)
        self._since: float | None = None  # set by the first batch: loading the model does not count
        self._prompt_tokens = self._generation_tokens = 0
        self._has_new = False
        self._engines: dict[int, SchedulerStats] = {}
        self._logged_hits: dict[int, PrefixCacheStats] = {}
        self._logged_loads: dict[int, PrefixCacheStats] = {}
        self._logged_tiers: dict[tuple[int, str], KVTierStats] = {}

    def record(self, stats: IterationStats) -> None:
        """Add the statistics of a batch."""
        self._has_new = True
        if self._since is None:
            self._since = self.context.clock() - max(stats.time_to_first_token, default=0.0)
        self._prompt_tokens += stats.num_prompt_tokens
        self._generation_tokens += stats.num_generation_tokens
        if isinstance(scheduler := stats.scheduler, SchedulerStats):
            self._engines |= scheduler.engines or {stats.engine_index: scheduler}

    def report(self) -> None:
        """Log the line and reset the counters."""
        if self._since is None:
            return
        now = self.context.clock()
        seconds, self._since = now - self._since, now
        engines = self._engines.values()
        running = sum(engine.num_running for engine in engines)
        waiting = sum(engine.num_waiting for engine in engines)
        if self._has_new or running:
            usage = max((engine.kv_cache_usage for engine in engines), default=0.0)
            _log.info(
                "%s: prompt %s tokens/s, generation %s tokens/s, running %d, waiting %d, "
                "KV cache %.1f %%, prefix cache hits %s%s",
                self.context.model,
                _rate(self._prompt_tokens, seconds),
                _rate(self._generation_tokens, seconds),
                running,
                waiting,
                100 * usage,
                self._hits(),
                self._external(),
            )
        self._prompt_tokens = self._generation_tokens = 0
        self._has_new = False

    def _hits(self) -> str:
        """Return the share of tokens found in the prefix cache since the last line, as text."""
        totals = {index: engine.prefix_cache for index, engine in self._engines.items()}
        return _share(totals, self._logged_hits)

    def _external(self) -> str:
        """Return the work of the KV connector since the last line; nothing if there is none."""
        totals = {
            index: engine.external_prefix_cache
            for index, engine in self._engines.items()
            if engine.external_prefix_cache is not None
        }
        if not totals:
            return ""
        tiers = self._tiers()
        return f", KV connector hits {_share(totals, self._logged_loads)}" + (
            f" ({'; '.join(tiers)})" if tiers else ""
        )

    def _tiers(self) -> list[str]:
        """Return the work of each tier since the last line, all engines together."""
        moved: dict[str, tuple[int, int]] = {}
        for index, engine in self._engines.items():
            for name, total in engine.kv_tiers.items():
                before = self._logged_tiers.get((index, name))
                if before is None or (
                    before.loaded_bytes > total.loaded_bytes
                    or before.stored_bytes > total.stored_bytes
                ):
                    before = KVTierStats()  # a new or restarted engine
                loaded, stored = moved.get(name, (0, 0))
                moved[name] = (
                    loaded + total.loaded_bytes - before.loaded_bytes,
                    stored + total.stored_bytes - before.stored_bytes,
                )
                self._logged_tiers[index, name] = KVTierStats(
                    loaded_bytes=total.loaded_bytes, stored_bytes=total.stored_bytes
                )
        return [
            f"{name}: {loaded / 1e6:.1f} MB loaded, {stored / 1e6:.1f} MB stored"
            for name, (loaded, stored) in moved.items()
        ]


def _share(totals: dict[int, PrefixCacheStats], logged: dict[int, PrefixCacheStats]) -> str:
    """Return the share of hits since the last line, as text; `logged`: totals at that time."""
    queried = hit = 0
    for index, total in totals.items():
        before = logged.get(index)
        if before is None or before.queried_tokens > total.queried_tokens:
            before = PrefixCacheStats()  # a new or restarted engine
        queried += total.queried_tokens - before.queried_tokens
        hit += total.hit_tokens - before.hit_tokens
        logged[index] = PrefixCacheStats(total.requests, total.queried_tokens, total.hit_tokens)
    return f"{100 * hit / queried:.1f} %" if queried else "none looked up"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f}" if seconds > 0 else "0.0"
