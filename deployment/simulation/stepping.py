"""A scheduler that is driven without an engine: a function executes its plans, on any clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hardpoint.plugins import EngineCoreOutputs, ModelRunnerOutput, Scheduler, SchedulerOutput

Execute = Callable[[SchedulerOutput], ModelRunnerOutput]
"""Executes a plan: the part of executor and workers."""


class Delivered(NamedTuple):
    """A plan, its result, and the outputs that the scheduler made of it.

    Attributes:
        plan: the plan.
        result: what executing it gave.
        outputs: what the scheduler returned for it, by client index.
    """

    plan: SchedulerOutput
    result: ModelRunnerOutput
    outputs: Mapping[int, EngineCoreOutputs]


class SteppedScheduler:
    """A scheduler with its in-flight plans.

    Every simulation takes its steps here: the fleet's, which are fast, and those of the conformance
    kit, which are checked.

    Attributes:
        scheduler: the scheduler.
        in_flight: executed plans whose results were not delivered, the oldest first.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def start(self, execute: Execute) -> SchedulerOutput:
        """Schedule and execute a plan, and keep its result for `deliver`."""
        plan = self.scheduler.schedule()
        self.in_flight.append((plan, execute(plan)))
        return plan

    def deliver(self) -> Delivered:
        """Pass the oldest undelivered result to the scheduler."""
        plan, result = self.in_flight.popleft()
        return Delivered(plan, result, self.scheduler.update(plan, result))

    def lose(self) -> list[SchedulerOutput]:
        """Lose all plans in flight; return them, the oldest first."""
        lost = [plan for plan, _ in self.in_flight]
        self.in_flight.clear()
        for plan in lost:
            self.scheduler.plan_lost(plan)
        return lost
