"""Observers of the outputs of a frontend's requests: statistics, usage reports, audits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins.requests.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.stats import IterationStats, PluginReport, RequestMetrics

__all__ = ["OutputObserver", "PreparedPartChange"]


class OutputObserver:
    """Observes all requests of a frontend and their outputs; every method is optional.

    For one thread at a time, except `end` and `report`: closing the engine may call them in any
    thread. All of it should be fast, because other requests wait; `update` is called once per
    output. A fault is counted under the part's name and affects no request. A `PluginFaultError` of
    `flush`, `record`, `report` or `exposition` ends the engine: a component with faults that end
    the engine (`plugins.on_error`) raises it.

    Attributes:
        interval_seconds: time between two calls of `report`; None is never.
    """

    interval_seconds: float | None = None

    @property
    def has_exports(self) -> bool:
        """Whether `exposition` may return a text."""
        return False

    def add(self, request: EngineCoreRequest, arrived: float) -> Any:
        """Return the state of a new request, which `update` and `end` get.

        Args:
            request: one completion of a prompt, complete.
            arrived: seconds on the frontend's clock.
        """

    def begin(self, outputs: EngineCoreOutputs) -> None:
        """Start a batch of outputs of an engine."""

    def update(self, state: Any, output: EngineCoreOutput, num_tokens: int) -> None:
        """Observe an output of the batch.

        Args:
            state: state of its request.
            output: output of the engine.
            num_tokens: number of output tokens that the request has now.
        """

    def end(self, state: Any, reason: FinishReason) -> RequestMetrics | None:  # noqa: ARG002
        """Observe the end of a request, within a batch or between two.

        Returns:
            Metrics for its last output; None for none. The first metrics of several parts count.
        """
        return None

    def flush(self) -> None:
        """Report a batch after all its outputs were observed."""

    def record(self, stats: IterationStats) -> None:
        """Report the figures that a frontend in another process has gathered."""

    def engine_ended(self) -> None:
        """Observe the end of the engine; its requests have ended before."""

    def report(self) -> None:
        """Report collected figures; called about every `interval_seconds`."""

    def exposition(self, report: PluginReport) -> str:  # noqa: ARG002
        """Return exported metrics in Prometheus's text format; nothing by default.

        Args:
            report: report of this moment.
        """
        return ""


@dataclass(frozen=True, kw_only=True)
class PreparedPartChange:
    """Replacements of the components of a half, built for the next generation of the plugins.

    Attributes:
        switch: called between two steps: with True to use the new components, or with False to
            return to the old ones. Must not fail, and takes no time.
        close_old: closes the old components, once all processes have switched.
        close_new: closes the new components, if the change is undone.
    """

    switch: Callable[[bool], None]
    close_old: Callable[[], None]
    close_new: Callable[[], None]
