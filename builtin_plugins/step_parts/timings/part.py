"""Timings of requests as a step part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hardpoint.plugins import ModelRunnerOutput, Request, RequestFault, SchedulerOutput, StepPart
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    OutputFigures,
    PlanData,
    RequestLifecycle,
    StepObserver,
)


class Timings(StepPart):
    """Gives the timings of requests with "timings" in `include`: `part_figures["timings"]`.

    A fault of it costs timings, and no request.
    """

    contract = 1
    fault_scope = "step"

    def engine_half(self, context: EngineHalfContext) -> RequestTimer:
        """Return the half that knows the steps."""
        return RequestTimer(context.clock)


@dataclass
class _Timed:
    """A request, with times on the engine's clock; None is a stage that it did not reach."""

    request: Request
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_drafts: int = 0
    num_accepted_drafts: int = 0


class RequestTimer(AdmissionGate, RequestLifecycle, PlanData, StepObserver, OutputFigures):
    """Notes when requests are scheduled, and when their tokens come."""

    only_included = True

    def __init__(self, clock: Callable[[], float]) -> None:
        """Time nothing yet; `clock` returns seconds."""
        self._clock = clock
        self._timed: dict[str, _Timed] = {}

    def gate(self, request: Request) -> None:
        """Begin with a request; it never waits for it."""
        self._timed[request.request_id] = _Timed(request)

    def begin(self, plan: SchedulerOutput) -> None:
        """Note the requests that a plan computes for the first time."""
        new = [self._timed[n] for n in plan.num_scheduled_tokens if n in self._timed]
        if waited := [timed for timed in new if timed.scheduled_at is None]:
            now = self._clock()
            for timed in waited:
                timed.scheduled_at = now

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Note the requests that have new tokens, and count their drafts."""
        request_ids = [n for n in result.sampled_token_ids if n in self._timed]
        now = self._clock() if request_ids else 0.0
        for request_id in request_ids:
            timed, sampled = self._timed[request_id], result.sampled_token_ids[request_id]
            if not sampled:
                continue
            timed.last_token_at = now
            if timed.first_token_at is None:
                timed.first_token_at = now
            drafts = plan.draft_token_ids.get(request_id, ())
            timed.num_drafts += sum(token != SchedulerOutput.NO_DRAFT for token in drafts)
            timed.num_accepted_drafts += len(sampled) - 1
        return {}

    def figures(self, request_id: str) -> Mapping[str, float | str | Sequence[float]]:
        """Return the timings of a request so far; stages that it did not reach are left out."""
        if (timed := self._timed.get(request_id)) is None:
            return {}
        arrived, scheduled = timed.request.arrival_time, timed.scheduled_at
        first, last = timed.first_token_at, timed.last_token_at
        stages = {
            "queue_ms": (arrived, scheduled),
            "prefill_ms": (scheduled, first),
            "decode_ms": (first, last),
        }
        return {
            **{
                name: 1e3 * (end - begin)
                for name, (begin, end) in stages.items()
                if begin is not None and end is not None
            },
            "num_cached_tokens": max(timed.request.num_cached_tokens, 0),
            "num_drafts": timed.num_drafts,
            "num_accepted_drafts": timed.num_accepted_drafts,
            "num_preemptions": timed.request.num_preemptions,
        }

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._timed.pop(request_id, None)
