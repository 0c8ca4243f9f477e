"""What the kernels compute, in plain torch: the reference that their tests compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["PagedSequences", "paged_attention"]


@dataclass(frozen=True, eq=False)
class PagedSequences:
    """The sequences of a step.

    Attributes:
        counts: tokens of each in the step; their queries, keys and values follow one another.
        lengths: tokens of each altogether.
        blocks: block ids of each.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    blocks: Sequence[Sequence[int]]


def paged_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    sequences: PagedSequences,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Write keys and values to a cache, then attend causally, in float32.

    Args:
        qkv: queries [tokens, heads, head_size], keys and values [tokens, kv_heads, head_size].
        cache: keys and values, each [blocks, block_size, kv_heads, head_size].
        sequences: the step.
        scale: multiplies the scores.
        window: sliding window in tokens, the token itself included; None is unlimited.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); None leaves it.

    Returns:
        float32 [tokens, heads, head_size].
    """
    q, *written = qkv
    parts = [torch.split(part, list(sequences.counts)) for part in (q, *written)]
    block_size, heads_per_kv_head = cache[0].shape[1], q.shape[1] // written[0].shape[1]
    spans = [
        torch.arange(length - count, length)
        for count, length in zip(sequences.counts, sequences.lengths, strict=True)
    ]
    for blocks, span, *new in zip(sequences.blocks, spans, *parts[1:], strict=True):
        table = torch.tensor(blocks)
        for side, values in zip(cache, new, strict=True):
            side[table[span // block_size], span % block_size] = values
    results = []
    for queries, blocks, span in zip(parts[0], sequences.blocks, spans, strict=True):
        length = int(span[-1]) + 1
        keys, values = (
            side[torch.tensor(blocks)]
            .flatten(0, 1)[:length]
            .float()
            .repeat_interleave(heads_per_kv_head, 1)
            for side in cache
        )
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = span[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        # Not 0 * what is hidden, which may be NaN.
        oldest = 0 if window is None else max(int(span[0]) + 1 - window, 0)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights[..., oldest:], values[oldest:]))
    return torch.cat(results)
