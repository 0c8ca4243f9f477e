"""The engine half of token traces: the work of each step, and the records of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins import (
    GrammarBitmask,
    ModelRunnerOutput,
    Request,
    RequestFault,
    SchedulerOutput,
)
from hardpoint.plugins.requests import RequestStatus
from hardpoint.plugins.scheduling import WaitReason
from hardpoint.plugins.step_part import (
    AdmissionGate,
    OutputFigures,
    PlanData,
    RequestLifecycle,
    StepObserver,
)
from hardpoint.toolkit.trace import StepTrace, TraceRecord

from .messages import Asked, Report

if TYPE_CHECKING:
    from hardpoint.plugins.component.base import Source


_replace = msgspec.structs.replace

MAX_STEPS = 8192
"""Entries of steps that are kept of a request; waits for the same thing are one."""

_FEW, _SELDOM = 512, 64
"""Up to so many positions, each output has the record so far; beyond, one in so many."""


@dataclass
class _Traced:
    """A traced request.

    Attributes:
        positions: `TokenTrace` as JSON, by output position.
        steps: by the number of the first step of each.
        num_left_out: steps beyond `MAX_STEPS`.
        num_candidates: how many it asks for; None if it does not.
        is_preempted: since the last step.
    """

    request: Request
    positions: dict[int, bytes] = field(default_factory=dict)
    steps: dict[int, StepTrace] = field(default_factory=dict)
    num_left_out: int = 0
    num_candidates: int | None = None
    is_preempted: bool = False
    error: str | None = None

    def add(self, entry: StepTrace) -> None:
        """Add the work of a step; a continued wait extends the entry of its first step."""
        last = next(reversed(self.steps.values()), None)
        if last is not None and entry.num_tokens == last.num_tokens == 0:
            same = (entry.waits_for, entry.is_preempted) == (last.waits_for, False)
            if same and last.step + last.num_steps == entry.step:
                self.steps[last.step] = _replace(last, num_steps=last.num_steps + 1)
                return
        if len(self.steps) >= MAX_STEPS:
            self.num_left_out += 1
        else:
            self.steps[entry.step] = entry

    def change(self, step: int, **fields: object) -> None:
        """Change the entry of a step, if it is kept."""
        if (entry := self.steps.get(step)) is not None:
            self.steps[step] = _replace(entry, **fields)


class TraceRecorder(AdmissionGate, RequestLifecycle, PlanData, StepObserver, OutputFigures):
    """Keeps the records of traced requests until they end."""

    only_included = True

    def __init__(
        self, name: str, num_positions: int, why_waiting: Callable[[str], WaitReason | None]
    ) -> None:
        """Trace nothing yet.

        Args:
            num_positions: output positions that are traced.
            why_waiting: see `EngineHalfContext`.
        """
        self._name, self._num_positions = name, num_positions
        self._why_waiting = why_waiting
        self._traced: dict[str, _Traced] = {}

    def gate(self, request: Request) -> None:
        """Begin the record of a request; it never waits for it."""
        arguments = request.source.plugin_args.get(f"step_parts/{self._name}", {})
        number = arguments.get("candidates")
        self._traced[request.request_id] = _Traced(request, num_candidates=number)

    def preempted(self, request_id: str) -> None:
        """Record that a request had to leave the batch."""
        if (traced := self._traced.get(request_id)) is not None:
            traced.is_preempted = True

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._traced.pop(request_id, None)

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Record a plan's work for each request; return data if the workers are to read it."""
        computed = plan.num_computed_tokens()
        resumed = {new.source.request_id for new in plan.new_requests if new.resumed}
        is_used, counts = False, Asked()
        for request_id, traced in self._traced.items():
            request, number = traced.request, plan.num_scheduled_tokens.get(request_id, 0)
            if request.status is RequestStatus.FINISHED:
                continue
            reason = None if number else self._why_waiting(request_id)
            begins = number and not any(entry.num_tokens for entry in traced.steps.values())
            traced.add(
                StepTrace(
                    step=plan.step,
                    num_requests=len(plan.num_scheduled_tokens),
                    num_tokens=number,
                    num_computed=computed.get(request_id, request.num_computed_tokens),
                    num_cached=max(request.num_cached_tokens, 0) if begins else None,
                    waits_for=None if reason is None else reason.waiting_for.value,
                    reason=None if reason is None else reason.message,
                    is_preempted=traced.is_preempted,
                    is_resumed=request_id in resumed,
                    drafts=[
                        token
                        for token in plan.draft_token_ids.get(request_id, ())
                        if token != SchedulerOutput.NO_DRAFT
                    ],
                )
            )
            traced.is_preempted = False
            is_used |= bool(number)
            if number and traced.num_candidates is not None:
                counts[request_id] = traced.num_candidates
        return msgspec.msgpack.encode(counts) if is_used else None

    def masked(self, plan: SchedulerOutput, masks: Mapping[Source, GrammarBitmask]) -> None:
        """Record the masks of the requests of a step."""
        for request_id in plan.num_scheduled_tokens.keys() & self._traced.keys():
            makers = [s for s, mask in masks.items() if request_id in mask.request_ids]
            if makers:
                named = [(source.name, source.package) for source in makers]
                self._traced[request_id].change(plan.step, masks=named)

    def result(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> Mapping[str, RequestFault]:
        """Take the records of a step's positions, and which drafts were accepted."""
        for report in result.part_reports.get(self._name, {}).values():
            records = msgspec.msgpack.decode(report, type=Report)
            for request_id, positions in records.items():
                if (traced := self._traced.get(request_id)) is not None:
                    traced.positions |= {reading.position: reading.record for reading in positions}
        for request_id in plan.num_scheduled_tokens.keys() & self._traced.keys():
            traced = self._traced[request_id]
            if (fault := result.faults.get(request_id)) is not None:
                traced.error = fault.message
            if plan.draft_token_ids.get(request_id):
                tokens = result.sampled_token_ids.get(request_id, ())
                traced.change(plan.step, num_accepted=max(len(tokens) - 1, 0))
        return {}

    def lost(self, plan: SchedulerOutput) -> None:
        """Record that a plan was not executed to its end."""
        for request_id in plan.num_scheduled_tokens.keys() & self._traced.keys():
            self._traced[request_id].change(plan.step, is_lost=True)

    def figures(self, request_id: str) -> Mapping[str, float | str | Sequence[float]]:
        """Return the record so far, as JSON: a frontend may end a request, as at a stop string."""
        traced = self._traced.get(request_id)
        if traced is None:
            return {}
        is_last = traced.request.status is RequestStatus.FINISHED
        may_be_last = is_last or bool(traced.request.source.params.stop_strings)
        number = len(traced.positions)
        if not may_be_last and number > _FEW and number % _SELDOM:
            return {}
        return {"record": msgspec.json.encode(self._record(traced)).decode()}

    def _record(self, traced: _Traced) -> TraceRecord:
        request = traced.request
        length = len(request.output_token_ids) + (traced.error is not None)
        resumed = request.source.resumed
        before = 0 if resumed is None else len(resumed.output_token_ids)
        return TraceRecord(
            token_ids=list(request.output_token_ids),
            tokens=[
                msgspec.Raw(record)
                for position, record in sorted(traced.positions.items())
                if position < length
            ],
            steps=list(traced.steps.values()),
            error=traced.error,
            notes=self._notes(traced, before, length),
        )

    def _notes(self, traced: _Traced, before: int, length: int) -> list[str]:
        notes = []
        if before:
            notes.append(
                f"positions before {before} came with the request, of a fork or another engine: "
                "no record"
            )
        if length > self._num_positions:
            notes.append(
                f"positions from {self._num_positions} on have no record "
                f"(plugin.{self._name}.positions)"
            )
        known = range(before, min(length, self._num_positions))
        if missing := len(known) - sum(position in known for position in traced.positions):
            notes.append(
                f"{missing} positions have no record: more of them were sampled at once than are "
                f"traced (plugin.{self._name}.rows), or reading them failed"
            )
        if traced.num_left_out:
            notes.append(f"{traced.num_left_out} steps have no record, beyond {MAX_STEPS}")
        return notes
