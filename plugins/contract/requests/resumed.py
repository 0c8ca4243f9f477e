"""The state of a request that moves from one engine to another."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = ["WeightRun"]


class WeightRun(msgspec.Struct, frozen=True):
    """Output tokens of one version of the weights.

    Attributes:
        start: the first one of them, from 0; they end where the next run begins.
        version: version of the weights that they were sampled with.
        kv_version: the oldest weight version of their keys and values.
    """

    start: int
    version: str
    kv_version: str


class ResumedOutputs(
    msgspec.Struct, omit_defaults=True, frozen=True, forbid_unknown_fields=True, gc=False
):
    """The outputs of a request that another engine has sent, after which this one goes on.

    The request is the same in all other fields, its seed and `timeout` included: the time that is
    left. Outputs of the engine continue after it.

    Attributes:
        output_token_ids: the output so far; may be empty.
        observed_logprobs: all `EngineCoreOutput.observed_logprobs` so far, one for each of these
            tokens; None if there were none.
        num_prompt_logprobs: entries of all `prompt_logprobs` of the outputs.
        num_routed_positions: rows of all `routed_experts` of the outputs.
        num_resumes: how often the request has moved to another engine, this time included.
        part_figures: the last ones of the outputs; a step part adds to them.
        weight_runs: the last ones of the outputs.
    """

    output_token_ids: list[int]
    observed_logprobs: list[float] | None = None
    num_prompt_logprobs: Annotated[int, Meta(ge=0)] = 0
    num_routed_positions: Annotated[int, Meta(ge=0)] = 0
    num_resumes: Annotated[int, Meta(ge=1)] = 1
    part_figures: dict[str, dict[str, Any]] | None = None
    weight_runs: list[WeightRun] | None = None
