"""Figures and arrays of requests that step parts give: who asked for them, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
)
from hardpoint.plugins.requests import PartArray

from .bound_half import BoundPart


def has_figures(part: BoundPart) -> bool:
    """Return whether a part has figures or arrays of requests."""
    return part.overrides("figures") or part.overrides("arrays")


def asked_for_figures(
    request: EngineCoreRequest, users: Sequence[BoundPart], parts: Sequence[BoundPart]
) -> dict[BoundPart, ArrayForms]:
    """Return the parts that a request includes figures of.

    Args:
        users: parts that it uses.
        parts: all parts.

    Raises:
        RequestError: it uses no such part, or has arguments of a part that it does not include.
    """
    if request.plugin_args:
        _check_arguments(request, parts)
    if not request.params.include:
        return {}
    having = {part.name: part for part in users if has_figures(part)}
    for name in request.params.include:
        if name not in having:
            could = [part.name for part in parts if part.only_included]
            options = " or ".join(sorted(map(repr, {*having, *could})))
            options = options or "none, as no part has any of it"
            raise RequestError(f"include: expected {options}, got {name!r}")
    return {having[name]: ArrayForms() for name in request.params.include}


def _check_arguments(request: EngineCoreRequest, parts: Sequence[BoundPart]) -> None:
    included = request.params.include
    for part in parts:
        is_given = part.only_included and f"step_parts/{part.name}" in request.plugin_args
        if is_given and part.name not in included:
            raise RequestError(
                f"plugin_args.{part.name}: expected none without include = [{part.name!r}], as "
                f"only requests that include it use it, got include = {list(included)}"
            )


def figures_defect(figures: Any) -> str | None:
    """Return the defect of figures of a request, for the end of a sentence; None without one."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float)

    def is_figure(value: Any) -> bool:
        if isinstance(value, list):
            return all(map(is_number, value))
        return is_number(value) or isinstance(value, str)

    if isinstance(figures, Mapping) and all(
        isinstance(name, str) and is_figure(value) for name, value in figures.items()
    ):
        return None
    return f"gave {shown(figures)}, expected numbers, lists of numbers, or texts, by name"


class ArrayForms:
    """The forms of a part's arrays for a request; arrays of a name are joined."""

    def __init__(self) -> None:
        self._forms: dict[str, tuple[Any, ...]] = {}  # by name: dtype, shape of a row

    def defect(self, arrays: Any, num_positions: int | None) -> str | None:
        """Return the defect of further arrays, as the end of a sentence; None if they have none.

        Args:
            num_positions: positions of the request that are computed; None if it is not known.
        """
        if not isinstance(arrays, Mapping) or not all(
            isinstance(name, str) and _is_array(array) for name, array in arrays.items()
        ):
            return (
                f"gave {shown(arrays)}, expected arrays with a row per position, ascending, by name"
            )
        for name, array in arrays.items():
            if (outside := position_outside(array, num_positions)) is not None:
                return f"gave position {outside} as {name!r}, {_expected_positions(num_positions)}"
            form = array.values.dtype, array.values.shape[1:]
            first = self._forms.setdefault(name, form)
            if form != first:
                return (
                    f"gave rows of {form[0]} {list(form[1])} as {name!r}, expected "
                    f"{first[0]} {list(first[1])}, as it gave before"
                )
        return None


def position_outside(array: PartArray, num_positions: int | None) -> int | None:
    """Return a position of an array that is not computed; None if all are.

    Args:
        array: with positions in ascending order.
        num_positions: number of computed positions; None if it is not known.
    """
    if not len(array.positions):
        return None
    first, last = int(array.positions[0]), int(array.positions[-1])
    if first < 0:
        return first
    return last if num_positions is not None and last >= num_positions else None


def _expected_positions(num_positions: int | None) -> str:
    if num_positions is None:
        return "expected positions from 0"
    return (
        f"expected positions in 0..{num_positions - 1}, which are computed; the token that was "
        f"sampled last is not: its position is {num_positions}, and the next step computes it"
    )


def num_positions(plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, tuple[int, int]]:
    """Return the numbers of computed positions and of sampled tokens of each request of a plan.

    Positions of rejected drafts are left out.
    """
    numbers: dict[str, tuple[int, int]] = {}
    computed = plan.num_computed_tokens()
    for name in computed.keys() & plan.num_scheduled_tokens.keys():
        new = len(result.sampled_token_ids.get(name, ()))
        rejected = len(plan.draft_token_ids.get(name, ())) + 1 - max(new, 1)
        numbers[name] = computed[name] + plan.num_scheduled_tokens[name] - rejected, new
    return numbers


def add(
    output: EngineCoreOutput,
    part: str,
    figures: Mapping[str, Any] | None,
    arrays: Mapping[str, PartArray] | None,
    num_positions: int | None,
    num_sampled: int,
) -> None:
    """Add the figures and arrays of a part to an output, which may end before accepted drafts."""
    if figures:
        output.part_figures = {**(output.part_figures or {}), part: dict(figures)}
    if arrays:
        new = {name: [array] for name, array in arrays.items()}
        if num_positions and (surplus := num_sampled - len(output.new_token_ids)) > 0:
            for name, array in arrays.items():
                end = array.positions.searchsorted(num_positions - surplus)
                new[name] = [PartArray(array.positions[:end], array.values[:end])]
        output.part_arrays = {**(output.part_arrays or {}), part: new}


def end_by(output: EngineCoreOutput, fault: RequestFault | None) -> None:
    """Let the last output of a request end it with the error of a fault, unless it has one."""
    if fault is None or output.error is not None:
        return
    output.finish_reason, output.stop_reason = FinishReason.ERROR, None
    output.error, output.faulty_plugin = fault.message, fault.plugin


def _is_array(value: Any) -> bool:
    if not isinstance(value, PartArray):
        return False
    positions, values = value.positions, value.values
    both = isinstance(positions, np.ndarray) and isinstance(values, np.ndarray)
    if not both or positions.dtype != np.int64 or positions.ndim != 1 or not values.ndim:
        return False
    return len(positions) == len(values) and bool((np.diff(positions) > 0).all())
