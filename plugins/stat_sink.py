"""Stat sinks: who is told how the engine does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from .component import Component, Context
from .stats import IterationStats

__all__ = ["StatSink", "StatSinkContext"]


@dataclass(frozen=True, kw_only=True)
class StatSinkContext(Context):
    """What a stat sink is built with.

    Attributes:
        clock: seconds; the frontend's.
        model: as the configuration names it.
        engine_index: of the engine whose figures come, the first one of several.
    """

    clock: Callable[[], float]
    model: str
    engine_index: int = 0


class StatSink(Component):
    """Is told how the engine does: for a log, a dashboard, a bill. May not block.

    One call comes at a time, though not always in the same thread. A call that raises is counted
    in `LLM.health()`; requests and other sinks do not notice. `close` comes last.
    """

    context: StatSinkContext

    @abstractmethod
    def record(self, stats: IterationStats) -> None:
        """Take what a batch of outputs brought; for reading, since all sinks get the same."""

    def report(self) -> None:
        """Show what was gathered; called about every `stats.interval_seconds`, and at the end.

        `AsyncLLM` calls it also while nothing happens, `LLM` and `LLMEngine` only where they step.
        """
