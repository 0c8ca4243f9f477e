"""Log-probabilities of the chosen and the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.plugins.requests import TokenLogprobs


def logprob_tensors(
    logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return what `token_logprobs` needs of each row on the host.

    Args:
        logits: float32 [rows, vocab].
        chosen: int64 [rows]; the tokens of which to return the log-probability.
        counts: per row, the number of most likely tokens; -1 is the whole vocabulary.
    """
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logprobs > picked).sum(1) + 1
    vocab = logits.shape[1]
    top_values, top_ids = logprobs.topk(max(_wanted(count, vocab) for count in counts), dim=1)
    return [ranks, top_ids, picked.squeeze(1), top_values]


def token_logprobs(
    lists: Sequence[Any], tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Return each row's log-probabilities: the chosen token, then the `counts[row]` most likely.

    Args:
        lists: the numbers of what `logprob_tensors` returned for the rows.
        tokens: the chosen ones.
        counts: the same as for `logprob_tensors`.
    """
    ranks, top_ids, picked, top_values = lists
    limit = len(top_ids[0]) if top_ids else 0
    wanted = [_wanted(count, limit) for count in counts]
    rows = zip(tokens, picked, ranks, top_ids, top_values, wanted, strict=True)
    return [
        TokenLogprobs([token, *ids[:count]], [logprob, *values[:count]], rank)
        for token, logprob, rank, ids, values, count in rows
    ]


def _wanted(count: int, limit: int) -> int:
    return limit if count == -1 else min(count, limit)
