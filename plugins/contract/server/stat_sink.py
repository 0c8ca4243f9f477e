"""Stat sinks: receive the statistics of an engine and of its requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import NO_TEXT, TEXT, notifies, returns
from hardpoint.plugins.requests.stats import IterationStats, PluginReport

__all__ = ["StatSink", "StatSinkContext"]


@dataclass(frozen=True, kw_only=True)
class StatSinkContext(Context["StatSink"]):
    """Context of a stat sink.

    Attributes:
        clock: clock of the frontend, in seconds.
        model: as configured.
        engine_index: index of the engine, the first one of several.
        model_name: name of the model in exported metrics; None is as configured.
        aliases: engines that give the exported metrics further names (`metrics.aliases`).
        block_size: block size of the KV cache, in tokens; None if it is unknown.
        prefix_caching: whether the KV cache keeps the blocks of common prefixes.
    """

    clock: Callable[[], float]
    model: str
    engine_index: int = 0
    model_name: str | None = None
    aliases: Sequence[str] = ()
    block_size: int | None = None
    prefix_caching: bool = True


class StatSink(Component):
    """Receives statistics: for a log, a dashboard, a bill. Must not block.

    Calls do not overlap, but may come from different threads. A call that raises is counted in
    `LLM.plugins.health()` and affects neither requests nor other sinks. `close` is the last call; a
    second one, and a record after it, must do no harm.
    """

    context: StatSinkContext

    @notifies
    @abstractmethod
    def record(self, stats: IterationStats) -> None:
        """Record the statistics of a batch; they are read-only, for all sinks share the object."""

    @notifies
    def report(self) -> None:
        """Report collected statistics; called about every `stats.interval_seconds`, and at the end.

        `AsyncLLM` also calls it while idle, `LLM` and `LLMEngine` only in steps.
        """

    @returns(TEXT, otherwise=NO_TEXT)
    def exposition(self, plugins: PluginReport) -> str:  # noqa: ARG002
        """Return the exported metrics, in Prometheus's text format; nothing by default.

        `metrics()` and the server's `GET /metrics` join the results of all sinks. Called in the
        frontend's process, by `AsyncLLM` in the thread of the event loop.

        Args:
            plugins: report of this moment; read-only.
        """
        return ""

    @notifies
    def close(self) -> None:
        """Release resources; a second call must do no harm."""
