"""What the stages of one row of logits changed."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any, get_args

import torch

from hardpoint.plugins import LogitsOps, LogitsRequest
from hardpoint.plugins.exponential_race import advantages, mixed_seed
from hardpoint.plugins.logits import LogitsStage
from hardpoint.toolkit.trace.records import (
    Candidate,
    Change,
    PhaseName,
    TokenChange,
    TokenTrace,
    probability,
)

Stages = list[tuple[LogitsStage, torch.Tensor]]
"""Each stage with the logits after it, float32 [vocab]; the model is the first."""

_PHASES: tuple[PhaseName, ...] = get_args(PhaseName)


def _change(
    stage: LogitsStage, before: torch.Tensor, after: torch.Tensor, num_tokens: int
) -> Change:
    """Return what a stage changed, with the most changed tokens, at most `num_tokens`."""
    assert stage.phase is not None  # of the model alone
    changed = _differ(before, after)
    removed, restored = (changed & (x == -math.inf) for x in (after, before))
    # Tokens that moved come first, those that vanished or appeared after them, by likelihood.
    switched = removed | restored
    moved = (after - before).abs().nan_to_num(math.inf)
    moved[~changed | switched] = -math.inf
    likely = torch.maximum(before, after).nan_to_num(math.inf)
    likely[~switched] = -math.inf
    tokens = [*_largest(moved, num_tokens), *_largest(likely, num_tokens)][:num_tokens]
    source = stage.source
    return Change(
        phase=_PHASES[stage.phase],
        plugin="" if source is None else source.name,
        package="" if source is None else source.package,
        num_changed=int(changed.sum()),
        num_removed=int(removed.sum()),
        num_restored=int(restored.sum()),
        num_left=int((after > -math.inf).sum()),
        num_bad=int((after.isnan() | (after == math.inf)).sum()),
        log_total=_number(after.logsumexp(-1)),
        tokens=[
            TokenChange(token_id=t, before=_number(before[t]), after=_number(after[t]))
            for t in tokens
        ],
    )


def _candidates(
    rows: list[torch.Tensor], token: int | None, num_tokens: int, seed: int | None, position: int
) -> list[Candidate]:
    """Return the candidates of a position, the likeliest in the end first.

    Args:
        rows: logits of the model, then those after each change.
        token: the chosen token.
        num_tokens: how many, at most.
        seed: of the race that chose the token, mixed; None if another way did.
        position: output position.
    """
    first, last = rows[0], rows[-1]
    chosen = [] if token is None else [token]
    pairs = zip_longest(_largest(last, num_tokens), _largest(first, num_tokens))
    likely = [t for pair in pairs for t in pair if t is not None]
    tokens = list(dict.fromkeys([*chosen, *likely]))[:num_tokens]
    total = _number(last.logsumexp(-1))
    noise = (
        {} if seed is None else dict(zip(tokens, advantages(seed, position, tokens), strict=True))
    )
    found = [
        Candidate(
            token_id=t,
            logit=_number(first[t]),
            logits=[_number(row[t]) for row in rows[1:]],
            probability=probability(_number(last[t]), total),
            noise=noise.get(t),
        )
        for t in tokens
    ]
    return sorted(found, key=lambda one: (-one.probability, -(one.logit or 0.0)))


def token_trace(
    request: LogitsRequest,
    position: int,
    token: int | None,
    stages: Stages,
    num_tokens: int,
    **fields: Any,
) -> TokenTrace:
    """Return the trace of a position.

    Args:
        request: the request, or its view after drafts.
        position: output position.
        token: the chosen token; None if the request ended there.
        stages: what the logits were.
        num_tokens: tokens to show of candidates, and of each change, at most.
        fields: further fields of the trace.
    """
    kept = stages[:1]
    changes = []
    for stage, row in stages[1:]:
        if bool(_differ(kept[-1][1], row).any()):
            changes.append(_change(stage, kept[-1][1], row, num_tokens))
            kept.append((stage, row))
    rows = [row for _, row in kept]
    seed = None
    if token is not None and not request.params.greedy:
        mixed = mixed_seed(request.params.seed, request.child_index)
        seed = mixed if _wins(token, rows[-1], mixed, position) else None
    return TokenTrace(
        position=position,
        token_id=token,
        rank=None if token is None else 1 + int((rows[0] > rows[0][token]).sum()),
        log_total=_number(rows[0].logsumexp(-1)),
        candidates=_candidates(rows, token, num_tokens, seed, position),
        changes=changes,
        **fields,
    )


def _wins(token: int, logits: torch.Tensor, seed: int, position: int) -> bool:
    """Return whether the race of `LogitsOps.draw` gives a token; other samplers may not run it."""
    greedy = torch.zeros(1, dtype=torch.bool)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    return int(LogitsOps().draw(logits[None].clone(), seeds, positions, greedy)) == token


def _differ(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return which logits differ; NaN equals NaN."""
    return (before != after) & ~(before.isnan() & after.isnan())


def _largest(values: torch.Tensor, count: int) -> list[int]:
    """Return the indices of the largest values that are not -inf."""
    top = values.topk(min(count, len(values)))
    return [
        i for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True) if v > -math.inf
    ]


def _number(value: torch.Tensor) -> float | None:
    """Return a logit; None if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None
