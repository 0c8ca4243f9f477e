"""What every layer of a step shares for attention: which blocks to read, and masks.

Sequences with one query are attended in groups, padded to the longest of the group. Sequences with
several queries are attended one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from hardpoint.plugins import AttentionStep

# A group of its own costs some calls per layer; they pay from about this many padded tokens on.
_SPLIT_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Singles:
    """Sequences with one query each that are attended together.

    Attributes:
        rows: their rows among the step's tokens; None is all, in order.
        blocks: [sequences * width] of the blocks to read, sequence after sequence.
        count: number of sequences.
        length: tokens to use of what each sequence's blocks hold, padding included.
        mask: additive [count, 1, 1, length]; None if no position is to be hidden.
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    count: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Chunk:
    """Several queries of one sequence.

    Attributes:
        start: row of the first query.
        end: row after the last.
        blocks: blocks to read; None if all that is seen comes with this step.
        length: tokens to use of what the blocks hold.
        skip: tokens at the front of the first block that no query sees.
        mask: additive [queries, length]; None is plainly causal.
    """

    start: int
    end: int
    blocks: torch.Tensor | None
    length: int
    skip: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Share:
    """The work of one step for all layers with the same window."""

    singles: tuple[Singles, ...]
    chunks: tuple[Chunk, ...]


class Plan:
    """One step. Layers with the same sliding window share indices and masks."""

    def __init__(self, step: AttentionStep, dtype: torch.dtype) -> None:
        """`dtype` is that of the queries, and so of additive masks."""
        self.slots = step.slots
        self._step = step
        self._dtype = dtype
        self._device = step.block_table.device
        self._longest = int(step.seq_lens.max(initial=0))
        self._shares: dict[int | None, Share] = {}

    def share(self, window: int | None) -> Share:
        """Return the work of a layer with this window; computed once per window and step."""
        effective = None if window is None or window >= self._longest else window
        if effective not in self._shares:
            step = self._step
            lengths = step.seq_lens[: step.num_single]
            groups = _groups(lengths if effective is None else np.minimum(lengths, effective))
            multi = range(step.num_single, len(step.seq_lens))
            self._shares[effective] = Share(
                tuple(self._singles(group, effective) for group in groups),
                tuple(self._chunk(index, effective) for index in multi),
            )
        return self._shares[effective]

    def _singles(self, group: np.ndarray | None, window: int | None) -> Singles:
        step, size = self._step, self._step.block_size
        rows = np.arange(step.num_single) if group is None else group
        lengths = step.seq_lens[rows]
        first_seen = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        first, last = first_seen // size, (lengths - 1) // size
        width = int((last - first).max()) + 1
        # Padding repeats a sequence's own last block: nothing of other sequences is ever read.
        columns = np.minimum(first[:, None] + np.arange(width), last[:, None])
        table = step.block_table
        blocks = table[self._tensor(rows)[:, None], self._tensor(columns)].flatten()
        low, high = first_seen - first * size, lengths - first * size
        length = int(high.max())
        mask = None
        if low.any() or (high != length).any():
            place = np.arange(length)
            seen = (place >= low[:, None]) & (place < high[:, None])
            mask = self._additive(self._tensor(seen))[:, None, None, :]
        return Singles(
            None if group is None else self._tensor(group), blocks, len(rows), length, mask
        )

    def _chunk(self, index: int, window: int | None) -> Chunk:
        step, size = self._step, self._step.block_size
        start, end = int(step.query_starts[index]), int(step.query_starts[index + 1])
        total, queries = int(step.seq_lens[index]), end - start
        context = total - queries
        if context == 0:
            hidden = window is not None and window < queries
            mask = self._causal(0, 0, queries, queries, window) if hidden else None
            return Chunk(start, end, None, queries, 0, mask)
        oldest = 0 if window is None else max(context + 1 - window, 0)
        first = oldest // size
        skip = oldest - first * size
        blocks = step.block_table[index, first : -(-total // size)]
        length = total - oldest
        mask = self._causal(context, oldest, queries, length, window)
        return Chunk(start, end, blocks, length, skip, mask)

    def _causal(
        self, first_query: int, first_key: int, queries: int, keys: int, window: int | None
    ) -> torch.Tensor:
        """Return an additive mask [queries, keys]; both are consecutive positions."""
        query = torch.arange(first_query, first_query + queries, device=self._device)[:, None]
        key = torch.arange(first_key, first_key + keys, device=self._device)[None, :]
        seen = key <= query
        return self._additive(seen if window is None else seen & (key > query - window))

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, -torch.inf)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _groups(lengths: np.ndarray) -> Sequence[np.ndarray | None]:
    """Split sequences so that padding wastes little; [None] is all of them in the given order.

    Args:
        lengths: tokens that each sequence reads.

    Returns:
        Row indices of each group. Within one the shortest is at least half the longest, so at
        most half of what is read is padding, and there are few groups.
    """
    if not len(lengths):
        return []
    padded = len(lengths) * int(lengths.max())
    if padded - int(lengths.sum()) <= max(padded // 2, _SPLIT_TOKENS):
        return [None]
    order = np.argsort(-lengths, kind="stable")
    borders = [0]
    for place, row in enumerate(order):
        if 2 * lengths[row] < lengths[order[borders[-1]]]:
            borders.append(place)
    return [order[a:b] for a, b in pairwise([*borders, len(order)])]
