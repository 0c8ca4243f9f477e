"""The device of a simulated engine: its results and times."""

from __future__ import annotations

from collections.abc import Callable

from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput, StepCost
from hardpoint.toolkit.step_cost import work_of

from .step_costs import CostFile

_IDLE_S = 0.001  # an engine whose requests wait for something outside looks again after so long


class SimulatedDevice:
    """Executes plans without a model: a request gets its next token once all before are computed.

    Attributes:
        num_steps: steps that computed any token.
        num_tokens: tokens that were computed.
    """

    def __init__(self, cost: StepCost | CostFile, first_token: Callable[[str], int]) -> None:
        """Begin with nothing to do.

        Args:
            cost: the time of a step, by what it computes.
            first_token: returns the first token that a request generates, by its id; the others
                are 0.
        """
        self.num_steps = self.num_tokens = 0
        self._cost, self._first_token = cost, first_token
        self._known: dict[str, int] = {}  # tokens of each request, by its id
        self._first: dict[str, int] = {}  # first tokens that are not sampled yet

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Return the tokens that a plan samples."""
        known, first = self._known, self._first
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            known.pop(request_id, None)
            first.pop(request_id, None)
        scheduled, sampled = plan.num_scheduled_tokens, {}
        cached = plan.cached_requests
        for request_id, computed in zip(
            cached.request_ids, cached.num_computed_tokens, strict=True
        ):
            end = computed + scheduled[request_id]
            if end == known[request_id]:
                known[request_id] = end + 1
                sampled[request_id] = [first.pop(request_id, 0) if first else 0]
        for new in plan.new_requests:
            request_id = new.source.request_id
            length = len(new.source.prompt_token_ids) + len(new.output_token_ids)
            known[request_id] = length
            if not new.output_token_ids:
                first[request_id] = self._first_token(request_id)
            if new.num_computed_tokens + scheduled[request_id] == length:
                known[request_id] += 1
                sampled[request_id] = [first.pop(request_id, 0)]
        self.num_steps += plan.total_num_scheduled_tokens > 0
        self.num_tokens += plan.total_num_scheduled_tokens
        return ModelRunnerOutput(sampled)

    def seconds(self, plan: SchedulerOutput, *, waits: bool) -> float:
        """Return the time of a step.

        Args:
            plan: its plan.
            waits: whether there are requests, which wait if the plan is empty.
        """
        if not plan.total_num_scheduled_tokens:
            return _IDLE_S if waits else 0.0
        return self._cost.milliseconds(**work_of(plan)._asdict()) / 1e3
