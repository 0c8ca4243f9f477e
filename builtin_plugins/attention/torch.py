"""Paged attention in plain torch: gather the blocks, then scaled_dot_product_attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.plugins import AttentionBackend, AttentionStep, KVSpec

# A further group costs some calls per layer; it saves time from about this many padded tokens on.
_SPLIT_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences with one query each that are attended together.

    Attributes:
        rows: their rows among the step's tokens; None is the first `count` rows, in order.
        blocks: ids of the blocks to read, [count * width], sequence after sequence.
        count: number of sequences.
        length: number of cached tokens per sequence to use, padding included.
        mask: additive, [count, 1, 1, length]; None if all positions are visible.
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    count: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive queries of one sequence.

    Attributes:
        start: row of the first query.
        end: row after the last query.
        blocks: ids of the blocks to read; None if all visible tokens are in this step.
        length: number of cached tokens to use.
        skip: leading tokens of the first block that no query sees.
        mask: additive, [queries, length]; None is the causal mask.
    """

    start: int
    end: int
    blocks: torch.Tensor | None
    length: int
    skip: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The attention plan of the layers with one sliding window."""

    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class AttentionPlan:
    """The attention plan of a step; layers with the same window share indices and masks."""

    def __init__(self, step: AttentionStep, dtype: torch.dtype) -> None:
        """`dtype` is that of the queries and of the masks."""
        self.slots = step.slots
        self._step = step
        self._dtype = dtype
        self._device = step.block_table.device
        self._max_seq_len = int(step.seq_lens.max(initial=0))
        self._windows: dict[int | None, WindowPlan] = {}

    def for_window(self, window: int | None) -> WindowPlan:
        """Return the plan of layers with this window; computed once per window and step."""
        effective = None if window is None or window >= self._max_seq_len else window
        if effective not in self._windows:
            step = self._step
            lengths = step.seq_lens[: step.num_single]
            groups = _groups(lengths if effective is None else np.minimum(lengths, effective))
            multi = range(step.num_single, len(step.seq_lens))
            self._windows[effective] = WindowPlan(
                tuple(self._decode_group(group, effective) for group in groups),
                tuple(self._chunk(index, effective) for index in multi),
            )
        return self._windows[effective]

    def _decode_group(self, group: np.ndarray | None, window: int | None) -> DecodeGroup:
        step, size = self._step, self._step.block_size
        rows = np.arange(step.num_single) if group is None else group
        lengths = step.seq_lens[rows]
        first_visible = (
            np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        )
        first, last = first_visible // size, (lengths - 1) // size
        width = int((last - first).max()) + 1
        # Padding repeats a sequence's own last block, so no block of another sequence is read.
        columns = np.minimum(first[:, None] + np.arange(width), last[:, None])
        table = step.block_table
        blocks = table[self._tensor(rows)[:, None], self._tensor(columns)].flatten()
        low, high = first_visible - first * size, lengths - first * size
        length = int(high.max())
        mask = None
        if low.any() or (high != length).any():
            position = np.arange(length)
            visible = (position >= low[:, None]) & (position < high[:, None])
            mask = self._additive(self._tensor(visible))[:, None, None, :]
        return DecodeGroup(
            None if group is None else self._tensor(group), blocks, len(rows), length, mask
        )

    def _chunk(self, index: int, window: int | None) -> Chunk:
        step, size = self._step, self._step.block_size
        start, end = int(step.query_starts[index]), int(step.query_starts[index + 1])
        total, queries = int(step.seq_lens[index]), end - start
        context = total - queries
        if context == 0:
            windowed = window is not None and window < queries
            mask = self._causal(0, 0, queries, queries, window) if windowed else None
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
        visible = key <= query
        return self._additive(visible if window is None else visible & (key > query - window))

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~visible, -torch.inf)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _groups(lengths: np.ndarray) -> Sequence[np.ndarray | None]:
    """Split sequences into groups of similar length, to limit padding.

    Args:
        lengths: number of tokens that each sequence reads.

    Returns:
        Row indices of each group; [None] is one group of all rows in the given order. In a group
        the shortest is at least half the longest, so at most half of what is read is padding.
    """
    if not len(lengths):
        return []
    padded = len(lengths) * int(lengths.max())
    if padded - int(lengths.sum()) <= max(padded // 2, _SPLIT_TOKENS):
        return [None]
    order = np.argsort(-lengths, kind="stable")
    borders = [0]
    for position, row in enumerate(order):
        if 2 * lengths[row] < lengths[order[borders[-1]]]:
            borders.append(position)
    return [order[a:b] for a, b in pairwise([*borders, len(order)])]


Cache = tuple[torch.Tensor, ...]
"""Keys and values, each [blocks, block_size, num_kv_heads, head_size]."""


class TorchAttention(AttentionBackend[Cache, AttentionPlan]):
    """Paged attention with torch operations, on any device."""

    # Grouped-query attention: query heads that share a key head are laid along the query dimension
    # (one query), or keys and values are expanded without copying (several queries).
    # `enable_gqa=True` was measured to be five times slower on CPU.

    contract = 1
    kv_layout = "keys and values, each [blocks, block_size, num_kv_heads, head_size]"
    devices = ("cpu", "cuda")

    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the size in bytes of one block of one layer, keys and values."""
        elements = 2 * self.context.block_size * spec.num_kv_heads * spec.head_size
        return elements * self.context.dtype.itemsize

    def allocate(self, spec: KVSpec, num_blocks: int) -> Cache:
        """Return a zeroed cache of `num_blocks` blocks; on a CPU its pages are allocated on use."""
        shape = (num_blocks, self.context.block_size, spec.num_kv_heads, spec.head_size)
        dtype, device = self.context.dtype, self.context.device
        if device.type != "cpu":
            return tuple(torch.zeros(2, *shape, dtype=dtype, device=device).unbind())
        # numpy asks the system for zeroed pages, which cost nothing until they are touched;
        # torch.zeros would write them all.
        size = math.prod(shape) * dtype.itemsize
        sides = (torch.from_numpy(np.zeros(size, np.uint8)) for _ in range(2))
        return tuple(side.view(dtype).view(shape) for side in sides)

    def plan(self, step: AttentionStep) -> AttentionPlan:
        """Return the plan that the step's layers share."""
        return AttentionPlan(step, self.context.dtype)

    def attend(
        self,
        spec: KVSpec,
        cache: Cache,
        plan: AttentionPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v to the cache, then attend causally; shapes as in `AttentionBackend`."""
        keys, values = cache
        keys.flatten(0, 1).index_copy_(0, plan.slots, k)
        values.flatten(0, 1).index_copy_(0, plan.slots, v)
        work = plan.for_window(spec.window)
        if not work.chunks and len(work.decodes) == 1 and work.decodes[0].rows is None:
            return _attend_decodes(spec, cache, work.decodes[0], q)
        out = torch.empty_like(q)
        for group in work.decodes:
            if group.rows is None:
                out[: group.count] = _attend_decodes(spec, cache, group, q[: group.count])
            else:
                out[group.rows] = _attend_decodes(spec, cache, group, q[group.rows])
        for chunk in work.chunks:
            out[chunk.start : chunk.end] = _attend_chunk(spec, cache, chunk, q, k, v)
        return out


def _attend_decodes(
    spec: KVSpec, cache: Cache, group: DecodeGroup, q: torch.Tensor
) -> torch.Tensor:
    """Return [count, num_heads, head_size] for one query per sequence."""
    keys, values = (
        side.index_select(0, group.blocks)
        .view(group.count, -1, spec.num_kv_heads, spec.head_size)[:, : group.length]
        .transpose(1, 2)
        for side in cache
    )
    heads_per_kv_head = spec.num_heads // spec.num_kv_heads
    queries = q.reshape(group.count, spec.num_kv_heads, heads_per_kv_head, spec.head_size)
    mask = None if group.mask is None else group.mask.expand(-1, -1, heads_per_kv_head, -1)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=spec.scale)
    return out.reshape(group.count, spec.num_heads, spec.head_size)


def _attend_chunk(
    spec: KVSpec, cache: Cache, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Return [queries, num_heads, head_size] for consecutive queries of one sequence."""
    heads_per_kv_head = spec.num_heads // spec.num_kv_heads
    grouped = (-1, spec.num_kv_heads, heads_per_kv_head, spec.head_size)
    rows = slice(chunk.start, chunk.end)
    if chunk.blocks is None:
        keys, values = k[rows], v[rows]
    else:
        visible = slice(chunk.skip, chunk.skip + chunk.length)
        keys, values = (side.index_select(0, chunk.blocks).flatten(0, 1)[visible] for side in cache)
    out = F.scaled_dot_product_attention(
        q[rows].reshape(grouped).permute(1, 2, 0, 3),
        keys.unsqueeze(2).expand(grouped).permute(1, 2, 0, 3),
        values.unsqueeze(2).expand(grouped).permute(1, 2, 0, 3),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=spec.scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)
