"""Finding the largest logits of each row, and dropping all under a bound; quick on the CPU."""

from __future__ import annotations

import math

import torch

_BLOCK = 16  # logits per block in the coarse search


def drop_below_(logits: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """Set what is under each row's bound to -inf, in place.

    Args:
        logits: float32 [rows, vocab].
        smallest: float32 [rows, 1]; what equals it stays.

    Returns:
        `logits`.
    """
    if logits.device.type != "cpu":
        return logits.masked_fill_(logits < smallest, -math.inf)
    # Comparing and masking take three passes, two of them slow; a threshold takes one, but the
    # same bound for all and drops what equals it. So: row by row, with the next smaller bound.
    bounds = smallest.nextafter(smallest.new_tensor(-math.inf)).flatten().tolist()
    for row, bound in zip(logits.unbind(), bounds, strict=True):
        torch.threshold_(row, bound, -math.inf)
    return logits


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return each row's `count` largest logits, falling, as [rows, count].

    Args:
        logits: float32 [rows, vocab].
        count: from 1 to vocab.
    """
    rows, vocab = logits.shape
    width = vocab // _BLOCK  # also the number of blocks' maxima
    if logits.device.type != "cpu" or count * _BLOCK * 2 > vocab or not logits.is_contiguous():
        return logits.topk(count).values
    # Split into blocks: the `count` blocks with the largest maxima hold the `count` largest
    # logits, because each other logit is at most its block's maximum, and so at most as large as
    # each of theirs. A block is a column here, so that maxima are found many at a time.
    blocks = logits[:, : width * _BLOCK].view(rows, _BLOCK, width)
    best = blocks.amax(1).topk(count, sorted=False).indices
    index = best.unsqueeze(1).expand(rows, _BLOCK, count)
    candidates = [blocks.gather(2, index).flatten(1), logits[:, width * _BLOCK :]]
    return torch.cat(candidates, 1).topk(count).values
