"""An executor with step times that were measured on another model, or another machine."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Annotated

from msgspec import Meta

from hardpoint.plugins import Executor, ModelRunnerOutput, SchedulerOutput, Wrapper
from hardpoint.plugins.executor import ExecutorContext
from hardpoint.plugins.requests.plan import GrammarBitmask
from hardpoint.toolkit.step_cost import work_of

from .step_costs import read_cost

_CAUGHT_UP = 0.01  # seconds between two steps that count as part of the second one


class PacedExecutor(Wrapper[Executor], Executor):
    """Runs steps with another executor, and returns their results once their time is over.

    The time is that from the end of the step before, as it was measured: planning and sending
    outputs are part of it. A step that takes longer than that ends when it ends.
    """

    contract = 2

    class Options(Wrapper.Options):
        """Options of the executor.

        Attributes:
            wraps: the executor that runs the steps.
            cost: path of a file of `hardpoint calibrate`.
            speed: how many times as fast steps are; 2 halves their time.
        """

        wraps: str = "uniproc"
        cost: str = "calibrated.json"
        speed: Annotated[float, Meta(gt=0)] = 1.0

    def __init__(self, context: ExecutorContext) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or has another format.
        """
        super().__init__(context)
        self._cost = read_cost(self.options.cost)
        self._ends = float("-inf")  # when the last step was to end
        self._due: dict[int, float] = {}  # the same of steps that are not sampled, by their numbers

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Run a step."""
        began = time.monotonic()
        due = began
        if plan.total_num_scheduled_tokens:
            seconds = self._cost.milliseconds(**work_of(plan)._asdict()) / 1e3
            due = max(self._ends, began - _CAUGHT_UP) + seconds / self.options.speed
            self._ends = max(due, began)
        result = self.wrapped.execute_model(plan)
        if result.result() is None and plan.total_num_scheduled_tokens:
            self._due[plan.step] = due  # `sample_tokens` follows
            return result
        _wait_until(due)
        return result

    def sample_tokens(
        self, plan: SchedulerOutput, bitmask: GrammarBitmask | None = None
    ) -> Future[ModelRunnerOutput]:
        """Sample the tokens of a step, which then takes as long as it has to."""
        result = self.wrapped.sample_tokens(plan, bitmask)
        result.result()
        _wait_until(self._due.pop(plan.step, 0.0))
        return result


def _wait_until(due: float) -> None:
    if (left := due - time.monotonic()) > 0:
        time.sleep(left)
