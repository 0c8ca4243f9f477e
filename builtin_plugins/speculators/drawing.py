"""Draws drafts from logits as requests would draw their tokens, with the same noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.plugins import DraftRequest, LogitsOps
from hardpoint.plugins.device import to_device


def draw(
    ops: LogitsOps,
    logits: torch.Tensor,
    requests: Sequence[DraftRequest],
    positions: Sequence[int],
) -> list[int]:
    """Return the token that the request of each row would draw from these logits.

    With the same noise, two distributions choose the same token nearly as often as they overlap
    (M. Daliri, C. Musco, A. T. Suresh, "Coupling without communication and drafter-invariant
    speculative decoding", 2024).

    Args:
        ops: operations on logits.
        logits: float32 [rows, vocab_size]; overwritten.
        requests: request of each row.
        positions: output position of each row.
    """
    device, params = logits.device, [request.params for request in requests]
    greedy = [sampling.greedy for sampling in params]
    if all(greedy):
        return [int(token) for token in ops.argmax(logits).tolist()]

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, device, dtype).unsqueeze(1)

    temperatures = [1.0 if sampling.greedy else sampling.temperature for sampling in params]
    ops.divide(logits, column(temperatures, torch.float32))
    k = [sampling.top_k if 0 < sampling.top_k < logits.shape[1] else 0 for sampling in params]
    if any(k):
        ops.keep_top_k(logits, column(k, torch.int64), max(k))
    if any(sampling.top_p < 1 for sampling in params):
        ops.keep_top_p(logits, column([sampling.top_p for sampling in params], torch.float32))
    if any(sampling.min_p > 0 for sampling in params):
        ops.keep_min_p(logits, column([sampling.min_p for sampling in params], torch.float32))
    drawn = ops.draw(
        logits,
        to_device([request.seed for request in requests], device, torch.int64),
        to_device(positions, device, torch.int64),
        to_device(greedy, device, torch.bool),
    )
    return [int(token) for token in drawn.tolist()]
