"""Paged attention in plain torch, on any device.

The blocks of each group of the plan are gathered, then scaled_dot_product_attention runs; matrix
products and a softmax in float32, where these are faster. Attention over shared prefixes is
merged with attention over the rest of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.plugins import AttentionBackend, AttentionContext, AttentionStep, KVSpec
from hardpoint.toolkit.kv_codes import CODE_DTYPES, dequantize_heads, quantize_heads, rotate_heads

from .plan import AttentionPlan, PaddedSequences, Piece, Rows, WindowPlan

_KEPT_BLOCKS = 64  # gathering fewer into new memory costs less than looking kept memory up
_ALIGNMENT = 64  # bytes of a cache line
_PLAIN_SCORES = 1 << 22  # scores that are computed at once where products and a softmax are used


class _Buffers:
    """Memory that is kept between layers and steps, by use.

    Memory that is asked of the system for each layer costs a fault per page.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(
        self, use: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return memory of any content; it is valid until the next call for the same use."""
        size = math.prod(shape)
        flat = self._flat.get((use, dtype))
        if flat is None or len(flat) < size:
            flat = self._flat[use, dtype] = self._allocate(size + size // 4, dtype)
        return flat[:size].view(shape)

    def _allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        # A tensor of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if self._device.type == "cpu":
                return _zeroed_pages(size * dtype.itemsize).view(dtype)
            return torch.empty(size, dtype=dtype, device=self._device)


@dataclass(frozen=True, eq=False)
class _Partial:
    """Attention over some of the keys; it can be merged with that over others.

    Attributes:
        values: [rows, num_heads, head_size].
        log_sums: logarithms of the sums of exp(score), float32 [rows, num_heads, 1].
    """

    values: torch.Tensor
    log_sums: torch.Tensor

    def store(self, rows: Rows, other: _Partial, valid: torch.Tensor | None) -> None:
        every = valid is None
        self.values[rows] = (other.values if every else other.values[valid]).float()
        self.log_sums[rows] = other.log_sums if every else other.log_sums[valid]

    def merge(self, rows: Rows, other: _Partial) -> None:
        mine = self.log_sums[rows]
        both = torch.logaddexp(mine, other.log_sums)
        values = self.values[rows] * (mine - both).exp_()
        self.values[rows] = values.add_(other.values * (other.log_sums - both).exp_())
        self.log_sums[rows] = both


Cache = tuple[torch.Tensor, ...]
"""Keys and values, each [blocks, block_size, num_kv_heads, head_size].

Keys alone where values are part of them (`KVSpec.value_size`). Where they are codes, their scales
follow, each float32 [blocks, block_size, num_kv_heads].
"""
_PARTS = ("keys", "values", "key scales", "value scales")


class TorchAttention(AttentionBackend[Cache, AttentionPlan]):
    """Paged attention with torch operations, on any device."""

    # Grouped-query attention: query heads that share a key head are laid along the query dimension,
    # or keys and values are expanded without copying (causal attention).
    # `enable_gqa=True` was measured to be five times slower on CPU.

    contract = 1
    kv_layout = "keys and values, each [blocks, block_size, num_kv_heads, head_size]"
    devices = ("cpu", "cuda")
    softcaps = True
    has_sinks = True
    sees_ahead = True
    reports_weights = True
    cache_dtypes = ("auto", *CODE_DTYPES)

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._buffers = _Buffers(context.device)
        self._is_coded = context.cache_dtype in CODE_DTYPES

    @property
    def shares_values(self) -> bool:
        """True unless the values are codes: codes of keys are rotated, codes of values are not."""
        return not self._is_coded

    def close(self) -> None:
        """Release the buffers."""
        self._buffers = _Buffers(self.context.device)

    def bytes_per_block(self, spec: KVSpec) -> int:
        """Return the size in bytes of one block of one layer, keys and values."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self._parts(spec, num_blocks=1)
        )

    def _parts(
        self, spec: KVSpec, num_blocks: int
    ) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        context, heads = self.context, (num_blocks, self.context.block_size, spec.num_kv_heads)
        side = (*heads, spec.head_size), CODE_DTYPES.get(context.cache_dtype, context.dtype)
        scales = heads, torch.float32
        if spec.value_size is not None:
            return (side,)
        return (side, side, scales, scales) if self._is_coded else (side, side)

    def allocate(self, spec: KVSpec, num_blocks: int) -> Cache:
        """Return a zeroed cache of `num_blocks` blocks; on a CPU its pages are allocated on use."""
        parts, device = self._parts(spec, num_blocks), self.context.device
        if device.type != "cpu":
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in parts)
        return tuple(
            _zeroed_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            for shape, dtype in parts
        )

    def block_views(self, cache: Cache) -> list[torch.Tensor]:
        """Return the bytes of keys, of values, and of their scales."""
        return [part.view(len(part), -1).view(torch.uint8) for part in cache]

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
        if spec.value_size is not None:  # keys are the values; the values passed in are ignored
            whole = self._attend(replace(spec, value_size=None), cache, plan, q, k, k)
            return whole[..., -spec.value_size :]
        return self._attend(spec, cache, plan, q, k, v)

    def attention_weights(
        self, spec: KVSpec, cache: Cache, step: AttentionStep, sequence: int, q: torch.Tensor
    ) -> torch.Tensor:
        """Return attention weights by products in float32; see `AttentionBackend`."""
        length, size = int(step.seq_lens[sequence]), step.block_size
        blocks = step.block_table[sequence, : -(-length // size)]
        if self._is_coded:
            q = rotate_heads(q).to(q.dtype)
        keys = self._gather(cache, blocks, 1)[0][0, :length]
        folded = q.view(len(q), spec.num_kv_heads, -1, spec.head_size).permute(1, 2, 0, 3)
        scores = folded.float().flatten(1, 2) @ keys.float().permute(1, 2, 0)
        scores = scores.view(spec.num_heads, len(q), length).mul_(spec.scale)
        if spec.softcap is not None:
            scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        key = torch.arange(length, device=q.device)
        position = key[length - len(q) :, None]
        hidden = key > position
        if step.sees is not None:
            end = step.query_starts[sequence + 1]
            hidden = key > torch.as_tensor(step.sees[end - len(q) : end, None], device=q.device)
        if spec.window is not None:
            hidden |= key <= position - spec.window
        scores.masked_fill_(hidden, -torch.inf)
        sums = scores.logsumexp(-1, keepdim=True)
        if spec.sinks is not None:
            sums = torch.logaddexp(sums, spec.sinks.view(-1, 1, 1))
        return (scores - sums).exp_().sum(1)

    def _attend(
        self,
        spec: KVSpec,
        cache: Cache,
        plan: AttentionPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if self._is_coded:
            q, k = rotate_heads(q).to(q.dtype), rotate_heads(k)
        k, v = self._write(cache, plan.slots, k, v)
        work = plan.for_window(spec.window)
        heads = spec.num_heads // spec.num_kv_heads
        if work.only is not None:
            return self._attend_decodes(spec, cache, work.only, q)
        out = torch.empty_like(q)
        for group in work.decodes:
            out[group.targets] = self._attend_decodes(spec, cache, group, q[group.rows])
        for group in work.chunks:
            queries, visible = q[group.rows], self._visible(cache, group, k, v)
            if group.pieces:
                rows = self._in_float32(spec, queries, visible, group.pieces)
            elif group.mask is None:
                rows = _causal(spec, queries, visible)
            else:
                rows = _attend(spec, queries, visible, group.folded_mask(heads))
            out[group.targets] = rows if group.valid is None else rows[group.valid]
        if work.merged is not None:
            out[work.merged] = self._attend_shared(spec, cache, work, q)
        return out

    def _write(
        self, cache: Cache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_coded:
            written: tuple[torch.Tensor, ...] = (k, v)
        else:
            sides = [quantize_heads(side, self.context.cache_dtype) for side in (k, v)]
            k, v = (dequantize_heads(*side, self.context.dtype) for side in sides)
            # torch copies rows of float8 only as bytes.
            written = (*(codes.view(torch.int8) for codes, _ in sides), *(s for _, s in sides))
        for part, rows in zip(cache, written, strict=len(cache) > 1):
            part.view(rows.dtype).flatten(0, 1).index_copy_(0, slots, rows)
        return k, v

    def _attend_decodes(
        self, spec: KVSpec, cache: Cache, group: PaddedSequences, q: torch.Tensor
    ) -> torch.Tensor:
        """Return [count, num_heads, head_size] for one query per sequence."""
        keys, values = self._gather_group(cache, group)
        heads = spec.num_heads // spec.num_kv_heads
        mask = None if group.mask is None else group.mask.expand(-1, -1, heads, -1)
        folded = (
            q.reshape(group.count, spec.num_kv_heads, heads, spec.head_size),
            keys.transpose(1, 2),
            values.transpose(1, 2),
        )
        if spec.softcap is None and spec.sinks is None:
            out = F.scaled_dot_product_attention(*folded, attn_mask=mask, scale=spec.scale)
            # On a GPU, its memory is in another order.
            return out.reshape(group.count, spec.num_heads, spec.head_size)
        out, sums = _attend_summed(spec, folded, mask)
        heads_of = (group.count, spec.num_heads)
        return _sunk(spec, out.reshape(*heads_of, -1), sums.reshape(*heads_of, 1))

    def _attend_shared(
        self, spec: KVSpec, cache: Cache, work: WindowPlan, q: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of the sequences that share prefixes, [rows, num_heads, ...]."""
        heads = spec.num_heads // spec.num_kv_heads
        merged = q[work.merged]
        total = _Partial(
            self._buffers.get("merged values", merged.shape),
            self._buffers.get("merged sums", (*merged.shape[:2], 1)),
        )
        for group in work.own:
            visible = self._gather_group(cache, group)
            mask = group.folded_mask(heads)
            part = _attend_partly(spec, q[group.rows], visible, mask)
            total.store(group.targets, part, group.valid)
        for prefix in work.prefixes:
            visible = self._gather(cache, prefix.blocks, 1)
            total.merge(prefix.rows, _attend_partly(spec, merged[prefix.rows], visible, None))
        return _sunk(spec, total.values, total.log_sums).to(q.dtype)

    def _visible(
        self, cache: Cache, group: PaddedSequences, k: torch.Tensor, v: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the keys and values of a group, from the step itself if it reads no others."""
        if group.blocks is None:
            return [side[group.rows][None] for side in (k, v)]
        return self._gather_group(cache, group)

    def _gather_group(self, cache: Cache, group: PaddedSequences) -> Sequence[torch.Tensor]:
        """Return the keys and values of a group, each [count, length, num_kv_heads, head_size]."""
        assert group.blocks is not None
        first, length = group.skip, group.length
        gathered = self._gather(cache, group.blocks, group.count)
        return [side.narrow(1, first, length) for side in gathered]

    def _gather(self, cache: Cache, blocks: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        gathered = []
        for use, side in zip(_PARTS, cache, strict=False):
            if blocks.numel() < _KEPT_BLOCKS:
                rows = side.index_select(0, blocks)
            else:
                rows = self._buffers.get(use, (len(blocks), *side.shape[1:]), side.dtype)
                torch.index_select(side, 0, blocks, out=rows)
            gathered.append(rows.view(count, -1, *side.shape[2:]))
        if len(cache) == 1:
            return gathered * 2
        if not self._is_coded:
            return gathered
        dtype = self.context.dtype
        return [dequantize_heads(gathered[i], gathered[i + 2], dtype) for i in range(2)]

    def _in_float32(
        self,
        spec: KVSpec,
        q: torch.Tensor,
        visible: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
    ) -> torch.Tensor:
        """Return the attention of one sequence by products in float32, in kept memory.

        Args:
            q: [queries, num_heads, head_size].
            visible: keys and values, each [1, length, num_kv_heads, head_size].
        """
        kv_heads, size, get = spec.num_kv_heads, spec.head_size, self._buffers.get
        folded = get("queries", (kv_heads, spec.num_heads // kv_heads, len(q), size))
        torch.mul(
            q.view(len(q), *folded.shape[:2], size).permute(1, 2, 0, 3), spec.scale, out=folded
        )
        keys, values = (
            get(use, (kv_heads, side.shape[1], size)).copy_(side[0].transpose(0, 1))
            for use, side in zip(("float keys", "float values"), visible, strict=True)
        )
        out = torch.empty_like(q)
        by_head = out.view(len(q), *folded.shape[:2], size).permute(1, 2, 0, 3)
        for piece in pieces:
            rows = folded[:, :, piece.queries]
            read = keys[:, piece.keys].transpose(1, 2)
            scores = get("scores", (*rows.shape[:-1], read.shape[2]))
            torch.bmm(rows.flatten(1, 2), read, out=scores.flatten(1, 2))
            if spec.softcap is not None:
                scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
            if piece.mask is not None:
                scores[..., -piece.mask.shape[1] :] += piece.mask
            weights = torch.softmax(scores, -1, out=get("weights", scores.shape))
            result = torch.bmm(weights.flatten(1, 2), values[:, piece.keys]).view(rows.shape)
            if spec.sinks is not None:
                sinks = spec.sinks.view(*rows.shape[:2], 1)
                result *= (scores.logsumexp(-1) - sinks).sigmoid_().unsqueeze(-1)
            by_head[:, :, piece.queries] = result
        return out


def _fold(
    spec: KVSpec, q: torch.Tensor, visible: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values by key head, each [count, num_kv_heads, ..., head_size].

    Query heads that share a key head follow each other.
    """
    keys, values = visible
    count, kv_heads, size = len(keys), spec.num_kv_heads, spec.head_size
    if len(q) > count:
        q = q.reshape(count, -1, kv_heads, spec.num_heads // kv_heads, size)
        q = q.permute(0, 2, 3, 1, 4)
    return q.reshape(count, kv_heads, -1, size), keys.transpose(1, 2), values.transpose(1, 2)


def _unfold(spec: KVSpec, rows: torch.Tensor, queries: int) -> torch.Tensor:
    """Return the result for folded queries, [count, num_kv_heads, heads * queries, size], unfolded.

    The result is [count * queries, num_heads, size].
    """
    if queries > len(rows):
        heads = spec.num_heads // spec.num_kv_heads
        rows = rows.reshape(len(rows), spec.num_kv_heads, heads, -1, rows.shape[-1])
        rows = rows.permute(0, 3, 1, 2, 4)
    return rows.reshape(queries, spec.num_heads, rows.shape[-1])


def _attend(
    spec: KVSpec,
    q: torch.Tensor,
    visible: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of a group of chunks, [count * queries, num_heads, head_size].

    Args:
        q: like the result.
        visible: keys and values, each [count, length, num_kv_heads, head_size].
        mask: mask of the folded queries.
    """
    folded = _fold(spec, q, visible)
    if spec.softcap is None and spec.sinks is None:
        out = F.scaled_dot_product_attention(*folded, attn_mask=mask, scale=spec.scale)
        return _unfold(spec, out, len(q))
    out, sums = _attend_summed(spec, folded, mask)
    return _sunk(spec, _unfold(spec, out, len(q)), _unfold(spec, sums[..., None], len(q)))


def _attend_partly(
    spec: KVSpec,
    q: torch.Tensor,
    visible: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
) -> _Partial:
    """Return the attention over some of the keys that the queries see, as `_attend`, but sinks."""
    values, sums = _attend_summed(spec, _fold(spec, q, visible), mask)
    return _Partial(_unfold(spec, values, len(q)), _unfold(spec, sums[..., None], len(q)))


def _causal(spec: KVSpec, q: torch.Tensor, visible: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [queries, num_heads, head_size] for all queries of one sequence."""
    is_plain = spec.sinks is not None and q.device.type != "cpu"
    if spec.softcap is not None or is_plain:
        out, sums = _attend_plainly(spec, _fold(spec, q, visible), None, causal=len(q))
        return _sunk(spec, _unfold(spec, out, len(q)), _unfold(spec, sums[..., None], len(q)))
    grouped = (-1, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_size)
    keys, values = (side[0].unsqueeze(2).expand(grouped).permute(1, 2, 0, 3) for side in visible)
    queries = q.reshape(grouped).permute(1, 2, 0, 3)
    if spec.sinks is None:
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=spec.scale
        )
        return out.permute(2, 0, 1, 3).flatten(1, 2)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, is_causal=True, scale=spec.scale
    )
    folded = (side.permute(2, 0, 1, 3).flatten(1, 2) for side in (out, sums[..., None]))
    return _sunk(spec, *folded)


def _sunk(spec: KVSpec, values: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """Return the attention with the layer's sinks in the sums, if there are any.

    Args:
        values: [rows, num_heads, head_size].
        log_sums: logarithms of the sums of exp(score), float32 [rows, num_heads, 1].
    """
    if spec.sinks is None:
        return values
    shares = (log_sums - spec.sinks.unsqueeze(-1)).sigmoid_()
    return (values * shares).to(values.dtype)


def _attend_summed(
    spec: KVSpec,
    folded: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention and its sums; see `_attend_plainly`."""
    if spec.softcap is not None or folded[0].device.type != "cpu":
        return _attend_plainly(spec, folded, mask)
    # The kernel of scaled_dot_product_attention on a CPU; it returns the sums as well.
    result: tuple[torch.Tensor, torch.Tensor]
    result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *folded, attn_mask=mask, scale=spec.scale
    )
    return result


def _attend_plainly(
    spec: KVSpec,
    folded: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    causal: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention by products and a softmax in float32, some rows at a time.

    scaled_dot_product_attention has no soft cap, and returns no sums.

    Args:
        folded: queries [count, num_kv_heads, rows, head_size], keys and values.
        mask: additive, [count or 1, 1, rows or 1, length].
        causal: number of queries, if the rows belong to one sequence, head after head, with the
            keys of these queries; it is masked causally.

    Returns:
        The attention output, shaped like the queries, and the logarithms of the sums of exp(score).
    """
    queries, keys, values = folded
    keys, values = keys.float().transpose(-1, -2), values.float()
    out, sums = torch.empty_like(queries), queries.new_empty(queries.shape[:-1]).float()
    length = keys.shape[-1]
    if mask is not None:
        mask = mask.expand(-1, -1, queries.shape[2], -1)
    step = max(_PLAIN_SCORES // (len(queries) * spec.num_kv_heads * length), 1)
    for start in range(0, queries.shape[2], step):
        rows = slice(start, start + step)
        scores = queries[:, :, rows].float() @ keys
        if spec.softcap is None:
            scores.mul_(spec.scale)
        else:
            scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
        if mask is not None:
            scores += mask[:, :, rows]
        if causal is not None:
            index = torch.arange(queries.shape[2], device=keys.device)[rows] % causal
            later = torch.arange(length, device=keys.device) > index[:, None]
            scores.masked_fill_(later, -torch.inf)
        sums[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = scores.softmax(-1) @ values
    return out, sums


def _zeroed_pages(size: int) -> torch.Tensor:
    """Return zeroed memory on the CPU, uint8 [size]. Pages are allocated on use."""
    # numpy asks the system for zeroed pages, which cost nothing until they are touched; torch.zeros
    # would write them all. On Linux it asks for huge ones too: a gather reads from all over them.
    pages = np.zeros(size + _ALIGNMENT, np.uint8)
    offset = -pages.ctypes.data % _ALIGNMENT
    return torch.from_numpy(pages[offset : offset + size])
