"""The fields that choices of all routes with choices share: how a completion ended."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.builtin_plugins.server.routes.answers import EncodedArrays, encoded_arrays
from hardpoint.plugins import CompletionOutput, Tokenizer
from hardpoint.plugins.requests import WeightRun
from hardpoint.toolkit.trace import TRACE, CompletionTrace, completion_trace


class EndedChoice(msgspec.Struct, kw_only=True):
    """Base of a completion, or of the new part of it, in an answer."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET
    validation_error: str | msgspec.UnsetType = msgspec.UNSET
    part_figures: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    part_arrays: EncodedArrays | msgspec.UnsetType = msgspec.UNSET
    trace: CompletionTrace | msgspec.UnsetType = msgspec.UNSET
    weight_runs: list[WeightRun] | msgspec.UnsetType = msgspec.UNSET
    num_resumes: int | msgspec.UnsetType = msgspec.UNSET


def ended(completion: CompletionOutput, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the fields of a choice about how its completion ended.

    Args:
        completion: may still run.
        tokenizer: gives the texts of tokens in a trace; None leaves them out.
    """
    fields: dict[str, Any] = {}
    if completion.finish_reason is not None:
        fields["stop_reason"] = completion.stop_reason
    if completion.warning:
        fields["warning"] = completion.warning
    if completion.validation_error:
        fields["validation_error"] = completion.validation_error
    figures = dict(completion.part_figures or {})
    if figures.pop(TRACE, None):
        decode = None if tokenizer is None else tokenizer.decode
        fields["trace"] = completion_trace(completion, decode)
    if figures:
        fields["part_figures"] = figures
    if completion.part_arrays is not None:
        fields["part_arrays"] = encoded_arrays(completion.part_arrays)
    if completion.weight_runs is not None and completion.finish_reason is not None:
        fields["weight_runs"] = completion.weight_runs
    if completion.num_resumes:
        fields["num_resumes"] = completion.num_resumes
    return fields
