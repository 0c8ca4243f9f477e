"""Changes of one row of logits by its stages, on the host, where numpy is quicker than torch."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any, get_args

import numpy as np
import torch

from hardpoint.plugins import LogitsRequest
from hardpoint.plugins.exponential_race import mixed_seed, token_noise
from hardpoint.plugins.sampling import LogitsStage
from hardpoint.toolkit.trace import (
    Candidate,
    Change,
    PhaseName,
    TokenChange,
    TokenTrace,
    probability,
)

Row = np.ndarray[Any, np.dtype[np.float32]]
"""Logits, [vocab]."""

Stages = list[tuple[LogitsStage, Row]]
"""Each stage with the logits after it; the model is the first."""

_PHASES: tuple[PhaseName, ...] = get_args(PhaseName)


def token_trace(
    request: LogitsRequest,
    position: int,
    token: int | None,
    stages: Stages,
    num_tokens: int,
    *,
    draws: bool,
    **fields: Any,
) -> TokenTrace:
    """Return the trace of a position.

    Args:
        request: the request, or its view after drafts.
        position: output position.
        token: the chosen token; None if the request ended there.
        stages: logits after each stage.
        num_tokens: tokens to show of candidates, and of each change, at most.
        draws: see `Sampler`.
        fields: further fields of the trace.
    """
    rows = [stages[0][1]]
    changes = []
    for stage, row in stages[1:]:
        if (changed := _differ(rows[-1], row)).any():
            changes.append(_change(stage, rows[-1], row, changed, num_tokens))
            rows.append(row)
    seed = None
    if draws and not request.params.greedy:
        seed = mixed_seed(request.params.seed, request.child_index)
    return TokenTrace(
        position=position,
        token_id=token,
        rank=None if token is None else 1 + int((rows[0] > rows[0][token]).sum()),
        log_total=_log_total(rows[0]),
        candidates=_candidates(rows, token, num_tokens, seed, position),
        changes=changes,
        **fields,
    )


def _change(
    stage: LogitsStage, before: Row, after: Row, changed: np.ndarray[Any, Any], num_tokens: int
) -> Change:
    assert stage.phase is not None  # of the model alone
    was_out, is_out = before == -math.inf, after == -math.inf
    switched = was_out ^ is_out
    # Tokens that moved come first, then tokens that vanished or appeared, by likelihood.
    with np.errstate(invalid="ignore"):
        moved = np.abs(after - before)
    moved[np.isnan(moved)] = math.inf
    moved[~changed | switched] = -math.inf
    likely = np.where(switched, np.fmax(before, after), -math.inf)
    tokens = [*_largest(moved, num_tokens), *_largest(likely, num_tokens)][:num_tokens]
    source = stage.source
    return Change(
        phase=_PHASES[stage.phase],
        plugin="" if source is None else source.name,
        package="" if source is None else source.package,
        num_changed=int(changed.sum()),
        num_removed=int((switched & is_out).sum()),
        num_restored=int((switched & was_out).sum()),
        num_left=len(after) - int(is_out.sum()),
        num_bad=int((np.isnan(after) | (after == math.inf)).sum()),
        log_total=_log_total(after),
        tokens=[
            TokenChange(token_id=t, before=_number(before[t]), after=_number(after[t]))
            for t in tokens
        ],
    )


def _candidates(
    rows: list[Row], token: int | None, num_tokens: int, seed: int | None, position: int
) -> list[Candidate]:
    """Return the candidates of a position, the likeliest in the end first.

    Args:
        rows: logits of the model, then the logits after each change.
        token: the chosen token.
        num_tokens: how many, at most.
        seed: seed of the race that chooses the token, mixed; None if something else does.
        position: output position.
    """
    first, last = rows[0], rows[-1]
    chosen = [] if token is None else [token]
    pairs = zip_longest(_largest(last, num_tokens), _largest(first, num_tokens))
    likely = [t for pair in pairs for t in pair if t is not None]
    tokens = list(dict.fromkeys([*chosen, *likely]))[:num_tokens]
    total = _log_total(last)
    noise: dict[int, float] = {}
    if seed is not None:
        ids = torch.tensor(tokens, dtype=torch.int32)
        exponential = token_noise(ids, torch.full((len(tokens),), seed), torch.tensor(position))
        noise = dict(zip(tokens, exponential.log().neg().tolist(), strict=True))
    candidates = [
        Candidate(
            token_id=t,
            logit=_number(first[t]),
            logits=[_number(row[t]) for row in rows[1:]],
            probability=probability(_number(last[t]), total),
            noise=noise.get(t),
        )
        for t in tokens
    ]
    return sorted(
        candidates, key=lambda candidate: (-candidate.probability, -(candidate.logit or 0.0))
    )


def _differ(before: Row, after: Row) -> np.ndarray[Any, Any]:
    """Return which logits differ, bool [vocab]; NaN equals NaN."""
    differing: np.ndarray[Any, Any] = before != after
    if differing.any():
        differing &= ~(np.isnan(before) & np.isnan(after))
    return differing


def _largest(values: Row, count: int) -> list[int]:
    """Return the indices of the largest values, the largest first; neither of NaN nor of -inf."""
    known = np.where(np.isnan(values), -math.inf, values)
    if known.max() == -math.inf:
        return []
    count = min(count, len(known))
    top = np.argpartition(known, len(known) - count)[len(known) - count :]
    ordered = top[np.lexsort((top, -known[top]))]
    return [int(index) for index in ordered if known[index] > -math.inf]


def _log_total(logits: Row) -> float | None:
    best = float(logits.max())
    if not math.isfinite(best):
        return None
    return best + math.log(float(np.exp(logits - best, dtype=np.float64).sum()))


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
