"""Sampling before the first request."""

from __future__ import annotations

import torch

from hardpoint.plugins import Ops


def warm_up(ops: Ops, vocab_size: int, device: torch.device) -> None:
    """Choose tokens of a row of logits in each of the usual ways.

    What operations compile when they are first called is compiled then, and no request waits for
    it: the trial step of a model calls none of these.
    """
    logits = torch.zeros(1, vocab_size, device=device)
    one = torch.ones(1, 1, device=device)
    number = torch.ones(1, dtype=torch.int64, device=device)
    ops.argmax(logits)
    ops.divide(logits, one)
    ops.keep_top_k(logits, number.unsqueeze(1), 1)
    ops.keep_top_p(logits, one / 2)
    ops.keep_min_p(logits, one / 2)
    ops.draw(logits, number, number, torch.zeros(1, dtype=torch.bool, device=device))
