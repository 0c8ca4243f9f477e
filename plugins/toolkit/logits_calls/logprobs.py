"""Log-probabilities of the chosen and the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from hardpoint.plugins.device import to_device
from hardpoint.plugins.requests import TokenLogprobs


def logprob_tensors(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    counts: Sequence[int],
    given: Sequence[Sequence[int]] = (),
) -> list[torch.Tensor]:
    """Return the tensors that `token_logprobs` needs of each row on the host.

    Args:
        logits: float32 [rows, vocab].
        chosen: int64 [rows]; the tokens to return the log-probability of.
        counts: per row, the number of most likely tokens; -1 is the whole vocabulary.
        given: further tokens, per row; empty if there are none.
    """
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logprobs > picked).sum(1) + 1
    vocab = logits.shape[1]
    top_values, top_ids = logprobs.topk(max(_wanted(count, vocab) for count in counts), dim=1)
    tensors = [ranks, top_ids, picked.squeeze(1), top_values]
    if pairs := [(row, token) for row, ids in enumerate(given) for token in ids]:
        rows, tokens = to_device(pairs, logits.device).T
        tensors.append(logprobs[rows, tokens])
    return tensors


def token_logprobs(
    lists: Sequence[Any],
    tokens: Sequence[int],
    counts: Sequence[int],
    given: Sequence[Sequence[int]] = (),
) -> list[TokenLogprobs]:
    """Return each row's log-probabilities: of the chosen token, the likeliest, the given ones.

    Args:
        lists: the numbers in the results of `logprob_tensors` for the rows.
        tokens: the chosen ones.
        counts: the same as for `logprob_tensors`.
        given: the same.
    """
    ranks, top_ids, picked, top_values, *more = lists
    limit = len(top_ids[0]) if top_ids else 0
    wanted = [_wanted(count, limit) for count in counts]
    rows = zip(tokens, picked, ranks, top_ids, top_values, wanted, strict=True)
    entries = [
        TokenLogprobs([token, *ids[:count]], [logprob, *values[:count]], rank)
        for token, logprob, rank, ids, values, count in rows
    ]
    if more:
        values = iter(more[0])
        for entry, ids in zip(entries, given, strict=True):
            entry.token_ids += ids
            entry.logprobs += islice(values, len(ids))
    return entries


def _wanted(count: int, limit: int) -> int:
    return limit if count == -1 else min(count, limit)
