"""Measurement of step times, and a least-squares fit of the cost of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from hardpoint.plugins import SchedulerOutput, StepCost

_MEMORY = 50
"""Number of steps of a kind that count; older ones are forgotten."""
_PACE_MEMORY = 5
"""The same of the pace, which follows clocks and neighbors."""
_ERROR_MEMORY = 50
"""The same of the error."""
_OUTLIER = 2.0
"""A step counts as at most so many times its prediction: it may have waited for something else."""
_ENOUGH = 3
"""Steps without prompts before the fit is used; before, the cost of a query may be unknown."""
_SWEEPS = 2
"""Rounds over the coefficients after each step; later steps go on from there."""


class StepTime(NamedTuple):
    """The time of a step, in seconds.

    Attributes:
        total: from its start to its results.
        own: the same without the time in which results of the step before it were awaited.
    """

    total: float
    own: float


class StepTimes:
    """Measures the time of each step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._began: dict[int, float] = {}
        self._ended = float("-inf")

    def begins(self, plan: SchedulerOutput) -> None:
        """Record the start of a step."""
        self._began[plan.step] = self._clock()

    def ends(self, plan: SchedulerOutput) -> StepTime:
        """Return the time of a step after its results were processed."""
        began, now = self._began[plan.step], self._clock()
        # Results come in order, so steps before this one have ended or were lost.
        self._began = {step: start for step, start in self._began.items() if step > plan.step}
        taken = StepTime(now - began, now - max(began, self._ended))
        self._ended = now
        return taken


class StepWork(NamedTuple):
    """Work of a step: the arguments of `StepCost.milliseconds`."""

    single_queries: int = 0
    context: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0
    drafts: int = 0


class StepCostFit:
    """Fits `StepCost` to the steps that ran: least squares of the relative error, after each step.

    No coefficient is negative. Steps with and without prompts are forgotten apart, so that a
    thousand steps without any do not blur the costs of prompts. A factor on all coefficients, the
    pace, follows the latest steps.
    """

    def __init__(self, start: StepCost | None = None) -> None:
        self._cost: StepCost | None = start or StepCost()
        self._starts_trained = self._is_trained = self._cost.is_trained
        self._with_prompts = _Sums(range(len(_NAMES)))
        self._without_prompts = _Sums(_WITHOUT_PROMPTS)
        self._coefficients = [float(getattr(self._cost, name)) for name in _NAMES]
        self._pace = 1.0
        self._shortest = float("inf")
        self._error: float | None = None

    def current(self) -> StepCost:
        """Return the cost as fitted to the steps so far."""
        if self._cost is None:
            coefficients = [self._pace * x for x in self._coefficients]
            named = dict(zip(_NAMES, coefficients, strict=True))
            self._cost = StepCost(**named, is_trained=self._is_trained, error=self._error)
        return self._cost

    def learn(self, plan: SchedulerOutput, milliseconds: float) -> None:
        """Take a step's time into account, unless it did other work than `StepWork` counts."""
        if not plan.total_num_scheduled_tokens or plan.encoder_inputs or milliseconds <= 0:
            return
        features = _features(work_of(plan))
        expected = milliseconds
        self._shortest = min(self._shortest, milliseconds)
        if self._is_trained:
            expected = self._pace * sum(map(mul, self._coefficients, features))
            self._compare(expected, milliseconds)
            expected = max(expected, self._shortest)  # else a cost of nearly 0 would stay so
            milliseconds = min(milliseconds, _OUTLIER * expected)
        # By the prediction: weights by the measured time would make slow steps count less. That may
        # be far too small, which would make the step count too much.
        scale = 1 / max(expected, milliseconds / _OUTLIER)
        sums = self._with_prompts if features[_PROMPTS] else self._without_prompts
        sums.add([scale * features[i] for i in sums.indices], scale * milliseconds / self._pace)
        if self._is_trained:
            ratio = min(_OUTLIER, max(1 / _OUTLIER, milliseconds * self._pace / expected))
            self._pace += (ratio - self._pace) / _PACE_MEMORY
        self._solve()
        self._is_trained = self._starts_trained or (
            self._with_prompts.count > 0 and self._without_prompts.count >= _ENOUGH
        )
        self._cost = None

    def _compare(self, expected: float, milliseconds: float) -> None:
        error = abs(milliseconds - expected) / milliseconds
        last = error if self._error is None else self._error
        self._error = last + (error - last) / _ERROR_MEMORY

    def _solve(self) -> None:
        products = [row.copy() for row in self._with_prompts.products]
        targets, coefficients = self._with_prompts.targets.copy(), self._coefficients
        others = self._without_prompts
        for index, row, target in zip(others.indices, others.products, others.targets, strict=True):
            targets[index] += target
            for column, x in zip(others.indices, row, strict=True):
                products[index][column] += x
        for _ in range(_SWEEPS):
            for index, row in enumerate(products):
                if (diagonal := row[index]) > 0:
                    rest = targets[index] - sum(map(mul, row, coefficients))
                    coefficients[index] = max(0.0, coefficients[index] + rest / diagonal)


def work_of(plan: SchedulerOutput) -> StepWork:
    """Return the work of a step."""
    tokens, cached, drafted = plan.num_scheduled_tokens, plan.cached_requests, plan.draft_token_ids
    if not plan.new_requests and plan.total_num_scheduled_tokens == len(tokens):
        return StepWork(len(tokens), sum(cached.num_computed_tokens) + len(tokens))
    single = context = prompts = prompt_tokens = 0
    pairs = 0.0
    for name, computed in plan.num_computed_tokens().items():
        if (count := tokens.get(name, 0) - len(drafted.get(name, ()))) == 1:
            single += 1
            context += computed + 1
        elif count:
            prompts += 1
            prompt_tokens += count
            pairs += count * (computed + count / 2)
    drafts = sum(map(len, drafted.values()))
    return StepWork(single, context, prompts, prompt_tokens, pairs, drafts)


_NAMES = ("prompt_token", "step", "single_query", "context_token", "prompt_pair", "prompt", "draft")
"""In this order, so that the first ones explain shared variance."""
_PROMPTS = _NAMES.index("prompt")
_WITHOUT_PROMPTS = tuple(i for i, name in enumerate(_NAMES) if not name.startswith("prompt"))
"""The features that a step without prompts may have."""


def _features(work: StepWork) -> list[float]:
    single_queries, context, prompts, prompt_tokens, prompt_pairs, drafts = work
    return [prompt_tokens, 1.0, single_queries, context, prompt_pairs, prompts, drafts]


class _Sums:
    """Sums over steps of the products of features, and of the features with the step times."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices
        self.count = 0
        self.products = [[0.0] * len(indices) for _ in indices]
        self.targets = [0.0] * len(indices)

    def add(self, features: list[float], target: float) -> None:
        """Add a step; earlier ones lose some of their weight."""
        keep = 1 - 1 / _MEMORY
        self.count += 1
        for index, (row, x) in enumerate(zip(self.products, features, strict=True)):
            self.products[index] = [keep * a + x * b for a, b in zip(row, features, strict=True)]
            self.targets[index] = keep * self.targets[index] + x * target
