"""Draft tokens: further rows for a request, and verification of the drafts by its own tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from hardpoint.plugins import LogitsRequest, RequestFault
from hardpoint.plugins.device import to_device

from .fault_isolation import Recompute
from .grammar_mask import GrammarMask
from .pipeline import LogitsPipeline
from .sampling_stage import SamplingStage


def with_drafts(
    requests: Sequence[LogitsRequest],
    drafts: Sequence[Sequence[int]],
    pipeline: LogitsPipeline,
    scratch_row: int,
) -> list[LogitsRequest]:
    """Return one row per position to sample: each request, then a view per draft.

    Args:
        requests: those that are sampled.
        drafts: the tokens drafted for each; may be empty.
        pipeline: forks the processors' states.
        scratch_row: first row beyond the batch, for the views' device state.

    Raises:
        PluginContractError: an enabled processor does not support drafts.
    """
    pipeline.check_drafts()
    rows: list[LogitsRequest] = []
    forks: list[tuple[LogitsRequest, LogitsRequest, int]] = []
    for request, tokens in zip(requests, drafts, strict=True):
        source = request
        rows.append(source)
        for token in tokens:
            view = pipeline.fork(source, token, scratch_row + len(forks))
            forks.append((source, view, token))
            rows.append(view)
            source = view
    pipeline.fork_device_state(forks)
    return rows


@dataclass
class Verified:
    """The drafts of one request after verification.

    Attributes:
        tokens: the accepted drafts, then one sampled token.
        logprobs: logprobs of the tokens, for processors that observe them.
        fault: ends the request.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    fault: RequestFault | None = None


def verify_in_turn(
    stage: SamplingStage,
    requests: Sequence[LogitsRequest],
    drafts: Sequence[Sequence[int]],
    recompute: Recompute,
    scratch_row: int,
    mask: GrammarMask | None = None,
) -> list[Verified]:
    """Verify drafts of requests with processors that observe: one position after the other.

    The state after a draft depends on the processed logits of the row before. So the rows of one
    request run one after the other, on copies of its states, up to the first draft that is not
    accepted; those of different requests run together.

    Args:
        stage: samples the rows.
        requests: those that are sampled.
        drafts: the tokens drafted for each; may be empty.
        recompute: returns the logits of all rows, in the order of `with_drafts`.
        scratch_row: first row beyond the batch, for the views' device state.
        mask: mask of the rows that a grammar constrains, in the same order.

    Raises:
        PluginContractError: an enabled processor does not support drafts.
    """
    pipeline = stage.pipeline
    pipeline.check_drafts()
    starts = list(accumulate((1 + len(tokens) for tokens in drafts), initial=0))
    results = [Verified() for _ in requests]
    views = dict(enumerate(requests))  # of the requests whose drafts were all accepted so far
    logits = recompute()
    depth = 0
    while views:
        at = [starts[index] + depth for index in views]
        rows = to_device(at, logits.device)
        again = functools.partial(_some_rows, recompute, rows)
        part = None if mask is None else mask.rows(at)
        sampled = stage.run(logits[rows], list(views.values()), again, part)
        forks: list[tuple[LogitsRequest, LogitsRequest, int]] = []
        following: dict[int, LogitsRequest] = {}
        for row, (index, view) in enumerate(views.items()):
            result = results[index]
            if (fault := sampled.faults.get(view.request_id)) is not None:
                result.fault = fault
                continue
            token = sampled.tokens[row]
            result.tokens.append(token)
            if (logprob := sampled.observed.get(row)) is not None:
                result.logprobs.append(logprob)
            if list(drafts[index][depth : depth + 1]) == [token]:
                scratch = scratch_row + starts[index] + depth
                following[index] = pipeline.fork(view, token, scratch, logprob)
                forks.append((view, following[index], token))
        pipeline.fork_device_state(forks)
        views = following
        depth += 1
    return results


def _some_rows(recompute: Recompute, rows: torch.Tensor) -> torch.Tensor:
    return recompute()[rows]


def accepted(chosen: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens of each request: the accepted drafts, then one sampled token.

    A sampled token depends on logits, seed and position only, so a draft is accepted if it equals
    the token that is sampled at its position.

    Args:
        chosen: the sampled tokens, one per row of `with_drafts`.
        drafts: the same as for `with_drafts`.
    """
    result: list[list[int]] = []
    first = 0
    for tokens in drafts:
        sampled = list(chosen[first : first + len(tokens) + 1])
        first += len(tokens) + 1
        num_accepted = 0
        while num_accepted < len(tokens) and sampled[num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        result.append(sampled[: num_accepted + 1])
    return result
