"""The test of the time of calls, of kinds without a budget of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.pace import EVIDENCE, TENSORS, cost_of
from hardpoint.testing.suite import Rule

from .call_times import CallTimes

__all__ = ["SPEED", "TimedSuite"]

SPEED = Rule(
    "speed: 99 of 100 calls stay within the budget, if the suite states one",
    "compute less in a call, or set budget_us_per_call",
)

_USES = 100
_ROUNDS = 5
_MOST_SECONDS = 2.0


class TimedSuite(GeneralComponentSuite):
    """Base class of suites that time the calls of a component.

    Attributes:
        budget_us_per_call: maximum of the 99th percentile of the microseconds of a call; None
            reports it only.
        max_wait_seconds: the longest time for which a call may wait without computing; None
            accepts any.
    """

    budget_us_per_call: ClassVar[float | None] = None
    max_wait_seconds: ClassVar[float | None] = 1.0
    _times: CallTimes | None = None

    def test_speed(self) -> None:
        """The 99th percentile of the time of a call is reported, and stays within the budget if
        `budget_us_per_call` states one. No call waits longer than `max_wait_seconds`.
        """
        self._run_checks(SPEED.text, self._check_speed)

    def _timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the component; return its result.

        Raises:
            Violation: it waited longer than it may.
        """
        if self._is_counting:
            return method(*arguments)
        times = self._times or CallTimes(self.max_wait_seconds)
        return times.call(method, *arguments)

    def _check_speed(self) -> None:
        budget = self.budget_us_per_call
        with self._in_use() as (component, use):
            for number in range(3):  # what the first uses load is not part of a use
                use(number)

            def measure() -> float:
                self._times = CallTimes(self.max_wait_seconds)
                for number in range(_USES):
                    use(number)
                    if sum(self._times.seconds) > _MOST_SECONDS:
                        break
                return self._times.p99()

            if budget is None:
                EVIDENCE.p99_seconds = measure()
            else:
                limit = budget / 1e6
                cost = cost_of(measure, limit, rounds=_ROUNDS, reference=TENSORS)
                EVIDENCE.p99_seconds = cost
                if cost > limit:
                    raise SPEED.violation(
                        f"the 99th percentile of the time of a call is {cost * 1e6:.0f} "
                        f"microseconds, expected at most budget_us_per_call = {budget:g}"
                    )
            component.close()
