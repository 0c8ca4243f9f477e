"""The stat sink that writes a line into the log."""

from __future__ import annotations

import logging

from hardpoint.plugins import (
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
    StatSink,
    StatSinkContext,
)

_log = logging.getLogger("hardpoint")


class LogSink(StatSink):
    """Writes averages since its last line, at level INFO; nothing while nothing happens."""

    contract = 1

    def __init__(self, context: StatSinkContext) -> None:
        """Begin to count."""
        super().__init__(context)
        self._since: float | None = None  # loading the model is no time without tokens
        self._prompt_tokens = self._generation_tokens = 0
        self._news = False
        self._engines: dict[int, SchedulerStats] = {}
        self._shown: dict[int, PrefixCacheStats] = {}

    def record(self, stats: IterationStats) -> None:
        """Add a batch."""
        self._news = True
        if self._since is None:
            self._since = self.context.clock() - max(stats.time_to_first_token, default=0.0)
        self._prompt_tokens += stats.num_prompt_tokens
        self._generation_tokens += stats.num_generation_tokens
        if stats.scheduler is not None:
            self._engines[stats.engine_index] = stats.scheduler

    def report(self) -> None:
        """Write the line and begin anew."""
        if self._since is None:
            return
        now = self.context.clock()
        seconds, self._since = now - self._since, now
        engines = self._engines.values()
        running = sum(engine.num_running for engine in engines)
        waiting = sum(engine.num_waiting for engine in engines)
        if self._news or running:
            usage = max((engine.kv_cache_usage for engine in engines), default=0.0)
            _log.info(
                "%s: prompt %s tokens/s, generation %s tokens/s, running %d, waiting %d, "
                "KV cache %.1f %%, prefix cache hits %s",
                self.context.model,
                _rate(self._prompt_tokens, seconds),
                _rate(self._generation_tokens, seconds),
                running,
                waiting,
                100 * usage,
                self._hits(),
            )
        self._prompt_tokens = self._generation_tokens = 0
        self._news = False

    def _hits(self) -> str:
        """Return the share of tokens that were found since the last line, in words."""
        queried = hit = 0
        for index, engine in self._engines.items():
            total, before = engine.prefix_cache, self._shown.get(index)
            if before is None or before.queried_tokens > total.queried_tokens:
                before = PrefixCacheStats()  # the engine is new, or was started anew
            queried += total.queried_tokens - before.queried_tokens
            hit += total.hit_tokens - before.hit_tokens
            self._shown[index] = PrefixCacheStats(
                total.requests, total.queried_tokens, total.hit_tokens
            )
        return f"{100 * hit / queried:.1f} %" if queried else "none looked up"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f}" if seconds > 0 else "0.0"
