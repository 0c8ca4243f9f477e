"""The observers of a frontend's outputs, which step parts have: the frontend calls all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.faults import CALL_LOST, StepFaults
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    IterationStats,
    PluginReport,
)
from hardpoint.plugins.requests.stats import RequestMetrics
from hardpoint.plugins.step_part.observer import OutputObserver

_LOST = object()
"""State of a request that an observer failed to take."""

Describe = Callable[[str, BaseException], str]
"""Returns the message of a fault of a method; raises the cause if it is not a fault."""


class Observers:
    """Calls all observers, guarded. Without any, it is false, and need not be called.

    Args:
        observers: each with the name of its part, and the description of its faults.
        faults: counts their faults, and the faults of the components that they drive.
        clock: seconds.

    Attributes:
        exist: whether there are any.
        interval_seconds: time between two reports; None without any.
        has_exports: whether `exposition` may return a text.
    """

    def __init__(
        self,
        observers: Sequence[tuple[str, OutputObserver, Describe]] = (),
        faults: StepFaults | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._observers, self.exist = list(observers), bool(observers)
        self._updates = [observer.update for _, observer, _ in observers]
        self._faults, self._clock = faults or StepFaults(), clock
        self._reported_at = clock()
        intervals = [observer.interval_seconds for _, observer, _ in observers]
        self.interval_seconds = min((s for s in intervals if s is not None), default=None)

    def __bool__(self) -> bool:
        return self.exist

    @property
    def has_exports(self) -> bool:
        """Whether `exposition` may return a text."""
        return any(observer.has_exports for _, observer, _ in self._observers)

    def add(self, request: EngineCoreRequest, arrived: float) -> list[Any]:
        """Return the state of a new request for each observer."""
        return self._call("add", request, arrived, lost=_LOST)

    def begin(self, outputs: EngineCoreOutputs) -> None:
        """Start a batch of outputs."""
        self._call("begin", outputs)

    def update(self, states: Sequence[Any], output: EngineCoreOutput, num_tokens: int) -> None:
        """Observe an output of a request, which has so many tokens now."""
        for index, update in enumerate(self._updates):
            if (state := states[index]) is not _LOST:
                try:
                    update(state, output, num_tokens)
                except BaseException as cause:
                    name, _, describe = self._observers[index]
                    self._note(name, describe("update", cause), cause)

    def end(self, states: Sequence[Any], reason: FinishReason) -> RequestMetrics | None:
        """Observe the end of a request; return metrics for its last output."""
        metrics: RequestMetrics | None = None
        for (name, observer, describe), state in zip(self._observers, states, strict=True):
            if state is not _LOST:
                try:
                    result = observer.end(state, reason)
                except BaseException as cause:
                    self._note(name, describe("end", cause), cause)
                else:
                    metrics = metrics or result
        return metrics

    def flush(self) -> None:
        """Report a batch.

        Raises:
            PluginFaultError: a component with faults of scope engine failed; all were called.
        """
        self._call("flush")

    def record(self, stats: IterationStats) -> None:
        """Report the figures that a frontend in another process has gathered.

        Raises:
            PluginFaultError: as `flush`.
        """
        self._call("record", stats)

    def engine_ended(self) -> None:
        """Observe the end of the engine."""
        self._call("engine_ended")

    def report(self) -> None:
        """Report collected figures.

        Raises:
            PluginFaultError: as `flush`.
        """
        self._reported_at = self._clock()
        self._call("report")

    def report_if_due(self) -> None:
        """Report if the interval has passed.

        Raises:
            PluginFaultError: as `flush`.
        """
        interval = self.interval_seconds
        if interval is not None and self._clock() - self._reported_at >= interval:
            self.report()

    def exposition(self, report: PluginReport) -> str:
        """Return exported metrics, joined.

        Raises:
            PluginFaultError: as `flush`.
        """
        return "".join(self._call("exposition", report, lost=""))

    def close(self, live: Iterable[Sequence[Any]]) -> None:
        """Observe the end of all live requests, with their states; the parts close the rest."""
        for states in live:
            self.end(states, FinishReason.ABORT)

    def _call(self, method: str, *args: Any, lost: Any = None) -> list[Any]:
        results, fatal = [], None  # type: list[Any], PluginFaultError | None
        for name, observer, describe in self._observers:
            try:
                results.append(getattr(observer, method)(*args))
            except PluginFaultError as fault:
                fatal = fatal or fault
            except BaseException as cause:
                self._note(name, describe(method, cause), cause)
                results.append(lost)
        self._faults.check_slow()
        if fatal is not None:
            raise fatal
        return results

    def _note(self, name: str, message: str, cause: BaseException) -> None:
        self._faults.note(name, message, cause, CALL_LOST)
