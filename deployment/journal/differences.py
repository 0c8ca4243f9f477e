"""Differences between a journal and its replay, as a person reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.plugins import StepRecord

from .records import PlanRecord, Result

_MOST_CHARACTERS = 400


class Difference(msgspec.Struct, frozen=True):
    """The first thing that is not as it was recorded.

    Attributes:
        event: number of the event, from 0.
        step: number of the plan; None outside of any.
        what: such as "tokens", "plan" or "gate".
        request_id: the request; None if it is about several.
        recorded: what the journal has.
        own: what there was in the replay.
        why: why the scheduler of the replay decided so.
    """

    event: int
    step: int | None
    what: str
    request_id: str | None = None
    recorded: str = "nothing"
    own: str = "nothing"
    why: str = ""

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        request = "" if self.request_id is None else f"request {self.request_id!r}: "
        lines = [
            f"{step}{request}{self.what} (event {self.event})",
            f"  recorded: {self.recorded[:_MOST_CHARACTERS]}",
            f"  replayed: {self.own[:_MOST_CHARACTERS]}",
        ]
        if self.why:
            lines.append(f"  why: {self.why}")
        return "\n".join(lines)


def plan_difference(
    event: int, noted: PlanRecord | None, replayed: PlanRecord, reasons: StepRecord | None
) -> Difference | None:
    """Return the first difference between two plans; None if they are the same."""
    if noted is None:
        return Difference(event, replayed.step, "plan", own=_scheduled(replayed))
    if noted == replayed and list(noted.scheduled or ()) == list(replayed.scheduled or ()):
        return None
    request_id = _first_request(noted, replayed)
    if request_id is None:
        fields = [
            name for name in PlanRecord.__struct_fields__ if _of(noted, name) != _of(replayed, name)
        ]
        name = fields[0] if fields else "scheduled"
        subject, recorded, mine = f"plan.{name}", str(_of(noted, name)), str(_of(replayed, name))
    else:
        subject = "scheduled tokens"
        recorded = f"{_tokens(noted, request_id)} of the plan {_scheduled(noted)}"
        mine = f"{_tokens(replayed, request_id)} of the plan {_scheduled(replayed)}"
    return Difference(
        event, noted.step, subject, request_id, recorded, mine, why_of(reasons, request_id)
    )


def token_difference(event: int, noted: Result, replayed: Result) -> Difference | None:
    """Return the first difference between the tokens of two results; None if they are the same."""
    assert isinstance(noted.tokens, dict)
    assert isinstance(replayed.tokens, dict)
    for name in [*noted.tokens, *replayed.tokens]:
        first, second = noted.tokens.get(name), replayed.tokens.get(name)
        if first != second:
            return Difference(event, noted.step, "tokens", name, str(first), str(second))
    for name in [*noted.faults, *replayed.faults]:
        fault, mine = noted.faults.get(name), replayed.faults.get(name)
        if (fault is None) != (mine is None):
            shown = [
                str(fault_or_none[0]) if fault_or_none else "no fault"
                for fault_or_none in (fault, mine)
            ]
            return Difference(event, noted.step, "fault", name, *shown)
    return None


def _first_request(noted: PlanRecord, replayed: PlanRecord) -> str | None:
    first, second = noted.scheduled or {}, replayed.scheduled or {}
    differing = (name for name in [*first, *second] if first.get(name) != second.get(name))
    return next(differing, None)


def _tokens(plan: PlanRecord, request_id: str) -> str:
    count = (plan.scheduled or {}).get(request_id, 0)
    return f"{count} tokens" if count else "no tokens"


def _scheduled(plan: PlanRecord) -> str:
    return str(plan.scheduled)


def _of(plan: PlanRecord, name: str) -> Any:
    return getattr(plan, name)


def why_of(reasons: StepRecord | None, request_id: str | None) -> str:
    """Return why a request runs, or does not, in a step; empty if that is not known."""
    if reasons is None or request_id is None:
        return ""
    if (reason := reasons.waiting.get(request_id)) is not None:
        return f"it waits: {reason.message}"
    if request_id in reasons.preempted:
        return f"it was preempted: {reasons.preempted[request_id]}"
    if request_id in reasons.scheduled:
        return f"it runs, {reasons.num_running} run and {reasons.num_waiting} wait"
    if reasons.admission_stopped is not None:
        return f"others are before it: {reasons.admission_stopped.message}"
    return ""
