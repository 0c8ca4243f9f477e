"""The measured time of steps: its file, and its fit.

The time is a function of the tokens that a step computes, linear between points that were measured,
and linear terms for what these tokens attend to: a matrix product of few rows takes as long as one
of a single row, and then longer with each.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import reason_of
from hardpoint.plugins import ConfigError, StepCost
from hardpoint.toolkit.step_cost import StepWork
from hardpoint.typed import Strict

_MAX_BYTES = 16 << 20
_NEAR = 1.15  # times the fastest step of a size, for the first fit
_TOLERANCE = 0.5  # relative error of a fit of the steps that count for the next one
_ROUNDS = 4  # of the fit
_SWEEPS = 4000

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1, le=2**40)]
Vector = np.ndarray[Any, np.dtype[np.float64]]


class TimedStep(Strict):
    """Work of a step, and the time until the next one.

    Attributes:
        single_queries, context, prompts, prompt_tokens, prompt_pairs: as for
            `StepCost.milliseconds`.
        milliseconds: the time.
    """

    single_queries: Annotated[int, Meta(ge=0)]
    context: Annotated[int, Meta(ge=0)]
    prompts: Annotated[int, Meta(ge=0)]
    prompt_tokens: Annotated[int, Meta(ge=0)]
    prompt_pairs: NotNegative
    milliseconds: Positive

    @property
    def tokens(self) -> int:
        """Number of tokens that it computed."""
        return self.single_queries + self.prompt_tokens

    @property
    def work(self) -> StepWork:
        """The same as the scheduler's fit has it."""
        return StepWork(
            self.single_queries, self.context, self.prompts, self.prompt_tokens, self.prompt_pairs
        )


class Residuals(Strict):
    """Relative errors of the fit over measured steps, from 0.

    Attributes:
        steps: number of steps.
        p50, p95: percentiles of the error of a step, 0.1 is 10 %.
        bias: error of the sum of all times; above 0 if that of the fit is greater.
    """

    steps: Annotated[int, Meta(ge=0)]
    p50: NotNegative
    p95: NotNegative
    bias: float


class CostFile(Strict):
    """Measured cost of steps, as `hardpoint calibrate` writes it.

    Attributes:
        format, version: format of the file.
        model, machine, hardpoint, made: what was measured, where, by which version, and when.
        max_model_len, num_blocks, block_size: limits of the engine that was measured.
        tokens: milliseconds of a step without the terms below, by the tokens that it computes.
        single_query, context_token, prompt, prompt_pair: terms, as of `StepCost`.
        step_cost: a fit without points.
        disturbed: share of the measured steps that took half more or less than the fit, for other
            programs ran, or for another reason; they do not count.
        residuals: errors of the fit: "decode" of steps without prompts, "prompts" of the others,
            and "step_cost" of the other fit over all.
    """

    format: Literal["hardpoint step cost"]
    version: Literal[1]
    model: str
    machine: str
    hardpoint: str
    made: str
    max_model_len: Count
    num_blocks: Count
    block_size: Count
    tokens: list[tuple[Count, Positive]]
    single_query: NotNegative
    context_token: NotNegative
    prompt: NotNegative
    prompt_pair: NotNegative
    step_cost: StepCost
    disturbed: Annotated[float, Meta(ge=0, le=1)] = 0.0
    residuals: dict[str, Residuals] = {}

    def milliseconds(
        self,
        *,
        single_queries: int = 0,
        context: int = 0,
        prompts: int = 0,
        prompt_tokens: int = 0,
        prompt_pairs: float = 0,
        drafts: int = 0,
    ) -> float:
        """Return the time of a step, by the amounts that `StepCost.milliseconds` takes."""
        return (
            _interpolated(self.tokens, single_queries + prompt_tokens + drafts)
            + self.single_query * single_queries
            + self.context_token * context
            + self.prompt * prompts
            + self.prompt_pair * prompt_pairs
        )


def read_cost(path: Path | str) -> CostFile:
    """Return a file of `hardpoint calibrate`.

    Raises:
        ConfigError: it cannot be read, or has another format; names file and field.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: expected a file of `hardpoint calibrate`, got one of more than "
                f"{_MAX_BYTES} bytes"
            )
        plain = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; `hardpoint calibrate MODEL --output {path}` makes one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected a file of `hardpoint calibrate`, {reason_of(error)}"
        ) from None
    try:
        cost = typed.convert(plain, CostFile, path="")
        _check(cost)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return cost


def _check(cost: CostFile) -> None:
    counts = [count for count, _ in cost.tokens]
    if not counts or counts != sorted(set(counts)):
        raise ConfigError(
            f"tokens: expected points in ascending order, at least one, got the counts "
            f"{typed.shown(counts)}"
        )
    times = [time for _, time in cost.tokens]
    if times != sorted(times):
        raise ConfigError("tokens: expected times that do not fall from one point to the next")
    if not cost.step_cost.is_trained or cost.step_cost.step < 0:
        raise ConfigError("step_cost: expected is_trained = true and step >= 0")


def write_cost(cost: CostFile, path: Path | str) -> None:
    """Write a file that `read_cost` reads.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(msgspec.to_builtins(cost), indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _interpolated(points: Sequence[tuple[int, float]], count: int) -> float:
    """Return the time at a count; outside of the points, by the nearest two."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(bisect.bisect_left(points, (count,)), 1), len(points) - 1)
    (low, first), (high, last) = points[place - 1], points[place]
    return max(first + (last - first) * (count - low) / (high - low), 0.0)


def fit_cost(steps: Sequence[TimedStep], **facts: Any) -> CostFile:
    """Return the cost that measured steps have.

    Args:
        steps: with prompts and without.
        facts: the fields of `CostFile` that no fit gives.

    Raises:
        ConfigError: steps with prompts, or those without, are missing.
    """
    for kind, has_prompts in (("without", False), ("with", True)):
        if not any(bool(step.prompts) is has_prompts for step in steps):
            raise ConfigError(f"steps: expected some {kind} prompts, got none")
    is_kept, fitted = _undisturbed(steps)
    undisturbed = [step for step, is_one in zip(steps, is_kept, strict=True) if is_one]
    linear = _fit(
        np.array([_linear(step) for step in undisturbed]),
        np.array([step.milliseconds for step in undisturbed]),
    )
    names = ("step", "single_query", "context_token", "prompt", "prompt_token", "prompt_pair")
    step_cost = StepCost(
        **{name: float(x) for name, x in zip(names, linear, strict=True)}, is_trained=True
    )
    cost = CostFile(
        format="hardpoint step cost",
        version=1,
        tokens=fitted.points,
        single_query=fitted.terms[0],
        context_token=fitted.terms[1],
        prompt=fitted.terms[2],
        prompt_pair=fitted.terms[3],
        step_cost=step_cost,
        disturbed=1 - len(undisturbed) / len(steps),
        **facts,
    )
    by_kind = {
        "decode": residuals_of(cost, [step for step in undisturbed if not step.prompts]),
        "prompts": residuals_of(cost, [step for step in undisturbed if step.prompts]),
        "step_cost": residuals_of(step_cost, undisturbed),
    }
    return msgspec.structs.replace(cost, residuals=by_kind)


class _Fitted(NamedTuple):
    """Coefficients, and the counts of tokens between which times are interpolated."""

    knots: Sequence[int]
    coefficients: Vector

    @property
    def points(self) -> list[tuple[int, float]]:
        base = np.cumsum(self.coefficients[: len(self.knots)])
        # Steps take some time, if only a thousandth of a millisecond.
        return [(k, max(float(t), 1e-3)) for k, t in zip(self.knots, base, strict=True)]

    @property
    def terms(self) -> list[float]:
        return [float(term) for term in self.coefficients[len(self.knots) :]]


def residuals_of(cost: CostFile | StepCost, steps: Sequence[TimedStep]) -> Residuals:
    """Return the relative errors of a cost over measured steps; all 0 without any."""
    if not steps:
        return Residuals(steps=0, p50=0.0, p95=0.0, bias=0.0)
    predicted = np.array([cost.milliseconds(**step.work._asdict()) for step in steps])
    measured = np.array([step.milliseconds for step in steps])
    p50, p95 = np.percentile(np.abs(predicted / measured - 1), (50, 95))
    bias = float(predicted.sum() / measured.sum() - 1)
    return Residuals(steps=len(steps), p50=float(p50), p95=float(p95), bias=bias)


def batch_sizes(limit: int) -> list[int]:
    """Return the batch sizes to measure: all up to 8, then four per doubling.

    Products of matrices take blocks of rows: one of 7 may take as long as one of 8, or longer.
    """
    steps = [power * quarters // 4 for power in powers(8, limit) for quarters in range(4, 8)]
    return [size for size in [*range(1, 8), *steps] if size <= limit]


def powers(first: int, last: int) -> Iterator[int]:
    """Yield `first`, twice that, and so on, up to `last`."""
    while first <= last:
        yield first
        first *= 2


def _knots(counts: Sequence[int]) -> list[int]:
    """Return the sizes near which steps were measured; the first and last points are both ends."""
    low, high = min(counts), max(counts)
    knots = set(counts)
    near = [
        size
        for size in batch_sizes(high)
        if size > low and not knots.isdisjoint(range(math.ceil(0.94 * size), int(1.06 * size) + 1))
    ]
    if high > low and near and high < 1.1 * near[-1]:
        near.pop()
    return [low, *near, high] if high > low else [low]


def _features(step: TimedStep, knots: Sequence[int]) -> list[float]:
    """Return the amounts that the coefficients are multiplied by.

    The first ones are 1 and the share of each piece between two knots that the step's tokens reach,
    so that coefficients of at least 0 give times that do not fall.
    """
    shares = [
        min(max((step.tokens - low) / (high - low), 0.0), 1.0)
        for low, high in itertools.pairwise(knots)
    ]
    terms = (step.single_queries, step.context, step.prompts, step.prompt_pairs)
    return [1.0, *shares, *map(float, terms)]


def _linear(step: TimedStep) -> list[float]:
    """Return the amounts of `StepCost`, in the order of its terms."""
    return [
        1.0,
        float(step.single_queries),
        float(step.context),
        float(step.prompts),
        float(step.prompt_tokens),
        float(step.prompt_pairs),
    ]


def _undisturbed(steps: Sequence[TimedStep]) -> tuple[Sequence[bool], _Fitted]:
    """Fit the steps that nothing else disturbed.

    On a machine that others use as well, some steps take several times as long as equal ones: their
    mean would be that of the neighbours. What is near the fastest of its size begins, and what is
    near the fit goes on.

    Returns:
        Which steps those are, and the fit.
    """
    times = np.array([step.milliseconds for step in steps])
    fastest: dict[tuple[int, bool], float] = {}
    for step in steps:
        key = step.tokens, step.prompts > 0
        fastest[key] = min(fastest.get(key, math.inf), step.milliseconds)
    near = np.array([fastest[step.tokens, step.prompts > 0] for step in steps])
    is_near = times <= _NEAR * near
    knots = _knots([step.tokens for step in steps])
    features = np.array([_features(step, knots) for step in steps])
    for _ in range(_ROUNDS):
        coefficients = _fit(features[is_near], times[is_near])
        again = np.abs(times / np.maximum(features @ coefficients, 1e-9) - 1) <= _TOLERANCE
        if again.sum() < len(coefficients):
            break
        is_near = again
    return is_near.tolist(), _Fitted(knots, _fit(features[is_near], times[is_near]))


def _fit(features: Vector, times: Vector) -> Vector:
    """Return coefficients of at least 0: least squares of the error relative to the fitted times.

    Relative to the times themselves, with which it begins, slow steps would count less than fast
    ones, and the sum of all would be too small.
    """
    coefficients = _not_negative(features / times[:, None], np.ones_like(times))
    expected = np.maximum(features @ coefficients, times / 2)
    return _not_negative(features / expected[:, None], times / expected)


def _not_negative(rows: Vector, targets: Vector) -> Vector:
    """Return the least squares without negative coefficients, one coefficient after the other."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    rows = rows / scale
    products, aims = rows.T @ rows, rows.T @ targets
    coefficients = np.zeros(rows.shape[1])
    for _ in range(_SWEEPS):
        before = coefficients.copy()
        for index in range(len(coefficients)):
            if (diagonal := products[index, index]) > 0:
                rest = aims[index] - products[index] @ coefficients
                coefficients[index] = max(0.0, coefficients[index] + rest / diagonal)
        if np.abs(coefficients - before).max() <= 1e-9 * max(np.abs(coefficients).max(), 1e-30):
            break
    return np.asarray(coefficients / scale)
