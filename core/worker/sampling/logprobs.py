"""Log-probabilities of the chosen and the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.plugins.requests import TokenLogprobs


def gather_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Return each row's log-probabilities: the chosen token, then the `counts[row]` most likely.

    Args:
        logits: float32 [rows, vocab].
        chosen: int64 [rows].
        counts: per row, the number of most likely tokens; -1 is the whole vocabulary.
    """
    logprobs = logits.log_softmax(-1)
    picked = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = (logprobs > picked).sum(1) + 1
    vocab = logits.shape[1]
    wanted = [vocab if count == -1 else min(count, vocab) for count in counts]
    top_values, top_ids = logprobs.topk(max(wanted), dim=1)
    rows = zip(
        chosen.tolist(),
        picked.squeeze(1).tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_values.tolist(),
        wanted,
        strict=True,
    )
    return [
        TokenLogprobs([token, *ids[:count]], [logprob, *values[:count]], rank)
        for token, logprob, rank, ids, values, count in rows
    ]
