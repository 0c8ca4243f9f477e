"""Paged attention in plain torch: gather the blocks, then scaled_dot_product_attention."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.plugins import AttentionBackend, AttentionStep, KVSpec

from .plan import AttentionPlan, Chunk, DecodeGroup

Cache = tuple[torch.Tensor, ...]
"""Keys and values, each [blocks, block_size, num_kv_heads, head_size]."""


class TorchAttention(AttentionBackend):
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
