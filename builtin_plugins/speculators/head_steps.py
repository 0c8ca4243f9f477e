"""Attention of drafting heads over the blocks of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.plugins import AttentionStep
from hardpoint.plugins.device import to_device


@dataclass(frozen=True)
class HeadTokens:
    """The tokens of a request in a step of a head.

    Attributes:
        block_ids: blocks of the request.
        cache_start: first position that the head sees, where a block begins.
        start: position of the first hidden state.
        token_ids: the token after each hidden state.
    """

    block_ids: Sequence[int]
    cache_start: int
    start: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """Position after the last hidden state."""
        return self.start + len(self.token_ids)


def plan_step(
    sequences: Sequence[HeadTokens], block_size: int, device: torch.device
) -> tuple[AttentionStep, torch.Tensor]:
    """Return the attention of a step, and the position of each token.

    Args:
        sequences: sequences with a single token first.
        block_size: tokens per block.
        device: device of the head.
    """
    counts = [len(sequence.token_ids) for sequence in sequences]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    lens = np.array([s.end - s.cache_start for s in sequences], dtype=np.int64)
    table = np.zeros((len(sequences), -(-int(lens.max()) // block_size)), dtype=np.int64)
    positions = np.empty(int(starts[-1]), dtype=np.int64)
    slots = np.empty_like(positions)
    for row, sequence in enumerate(sequences):
        rows = slice(starts[row], starts[row + 1])
        blocks = np.asarray(sequence.block_ids, dtype=np.int64)
        positions[rows] = places = np.arange(sequence.start, sequence.end)
        slots[rows] = blocks[places // block_size] * block_size + places % block_size
        seen = blocks[sequence.cache_start // block_size :][: table.shape[1]]
        table[row, : len(seen)] = seen
    step = AttentionStep(
        query_starts=starts,
        seq_lens=lens,
        num_single=counts.count(1),
        block_table=to_device(table, device),
        slots=to_device(slots, device),
        block_size=block_size,
    )
    return step, to_device(positions, device)
