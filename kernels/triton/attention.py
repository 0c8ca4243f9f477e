"""Paged attention.

What it computes for one sequence, whose queries are those of its last tokens:

    keys, values = cache[block_table].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :length]
    scores = softcap * tanh(q @ keys.T * scale / softcap)
    hidden = (key > position) | (key <= position - window)
    scores = torch.cat((scores.masked_fill(hidden, -inf), sink of the head), -1)
    out = scores.softmax(-1)[:, :-1] @ values

The softmax is computed online, over tiles of keys. The query heads that share a key head are rows
of one tile. Sequences with a single query are split over their keys, and the parts are combined;
where, depends on a sequence's own length alone, so that what others do changes no bit of a result.

The cache is one tensor [blocks, 2 (keys, values), kv_heads, block_size, head_size]; of codes, if
there are scales, [blocks, 2, kv_heads, block_size]: see `kv_codes`. Arguments of kernels that are
None are constants: kernels without a feature have no code for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .attention_tiles import MAX_HEAD_SIZES, AttentionSizes, AttentionTiles
from .kv_codes import decode
from .launch import Variant

__all__ = ["MAX_HEAD_SIZES", "VARIANTS", "PagedStep", "attend"]

_LOG2_E = math.log2(math.e)
STEP_PROGRAMS = 4096  # of all sequences, some waves of a GPU's processors
_COMBINE_WARPS = 4


@dataclass(frozen=True, eq=False)
class PagedStep:
    """The sequences of a step, with single queries first.

    Attributes:
        starts: int64 [seqs + 1] on the device; tokens of sequence i are starts[i]:starts[i + 1].
        lens: int64 [seqs] on the device; length of each, the step's tokens included. 0 is padding,
            whose result is 0.
        block_table: int64 [seqs, blocks] on the device.
        num_single: sequences with one query.
        longest_single: length that none of these exceeds.
        sees: int64 [tokens] on the device; position of the last token that each one sees, never
            before that of the preceding token of its sequence. None: its own.
    """

    starts: torch.Tensor
    lens: torch.Tensor
    block_table: torch.Tensor
    num_single: int
    longest_single: int
    sees: torch.Tensor | None = None


@triton.jit
def _load_rows(
    at, scales_at, is_key, is_column, element: tl.constexpr, MASKED: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Load keys or values; 0 for unseen ones: their weight is 0, and 0 * NaN is NaN.

    Those that have scales are codes; they are decoded, to numbers of a dtype.
    """
    if MASKED:
        rows = tl.load(at, mask=is_key[:, None] & is_column, other=0.0)
    elif PADDED:
        rows = tl.load(at, mask=is_column, other=0.0)
    else:
        rows = tl.load(at)
    if scales_at is not None:
        scale = tl.load(scales_at, mask=is_key, other=0.0) if MASKED else tl.load(scales_at)
        rows = (decode(rows) * scale[:, None]).to(element)
    return rows


@triton.jit
def _attend_tiles(
    q, top, total, values, keys_at, scales_at, table, first, last, lowest, position, seen_to,
    window, scale, cap,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `first` to `last`, a multiple of BLOCK_N after `first` or the end.

    Args:
        q: [rows, BLOCK_D].
        top, total, values: state of what was attended to before: largest score (base 2), sum of
            2**(score - top), and weighted sum of values; returned with these keys added.
        keys_at: the key head in block 0.
        scales_at: its scales there; None: keys and values are no codes.
        lowest: first key that any row sees; what lies before may be of others.
        position: position of each row.
        seen_to: last key that each row sees: its position, but for spans.
        scale, cap: scale and cap of the scores, in base 2; see `_score_factors`.
        WIDEN: whether products are of float32, since Triton's interpreter has none of bfloat16.
        MASKED: whether some rows do not see all keys.
    """
    column = tl.arange(0, BLOCK_D)
    is_column = (column < HEAD_SIZE)[None, :]
    PADDED: tl.constexpr = BLOCK_D != HEAD_SIZE
    SIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = (key >= lowest) & (key < last)
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
        else:
            block = tl.load(table + key // BLOCK_SIZE)
        row = block * (2 * SIDE) + key % BLOCK_SIZE * HEAD_SIZE
        at = keys_at + row[:, None] + column[None, :]
        k_scales = None
        v_scales = None
        if scales_at is not None:
            k_scales = scales_at + block * (2 * KV_HEADS * BLOCK_SIZE) + key % BLOCK_SIZE
            v_scales = k_scales + KV_HEADS * BLOCK_SIZE
        k = _load_rows(at, k_scales, is_key, is_column, q.dtype, MASKED, PADDED)
        v = _load_rows(at + SIDE, v_scales, is_key, is_column, q.dtype, MASKED, PADDED)
        if WIDEN:
            k = k.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            score = cap - 2.0 * cap / (1.0 + tl.exp2(score))  # cap * tanh, by exp(2x)
        if MASKED:
            seen = key[None, :] <= seen_to[:, None]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            new_top = tl.maximum(top, tl.max(tl.where(seen, score, -float("inf")), 1))
            weight = tl.exp2(tl.where(seen, score - new_top[:, None], -float("inf")))
        else:
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(weight, 1)
        values *= shrink[:, None]
        if WIDEN:
            values = tl.dot(weight, v.to(tl.float32), values, input_precision="ieee")
        else:
            values = tl.dot(weight.to(v.dtype), v, values, input_precision="ieee")
    return top, total, values


@triton.jit
def _first_state(sinks, head, is_row, is_sunk, BLOCK_M: tl.constexpr, SUNK: tl.constexpr):
    """Return the largest score and the sum before any key: of a sink, if `is_sunk`."""
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SUNK:
        has_sink = is_row & is_sunk
        sink = tl.load(sinks + head, mask=has_sink, other=0.0)
        top = tl.where(has_sink, sink * 1.4426950408889634, top)  # base 2
        total = tl.where(has_sink, 1.0, total)
    return top, total


@triton.jit
def _find_sequence(starts, first, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """Return the sequence of a tile of queries, and the number of the tile in it.

    Sequence i has the tiles from starts[i] // BLOCK_Q + i on, which suffices for its queries.
    """
    offset = tl.load(starts + first)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + first + middle) - offset) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - ((tl.load(starts + first + low) - offset) // BLOCK_Q + low)


@triton.jit(
    do_not_specialize=["table_stride", "first", "num_seqs"],
    do_not_specialize_on_alignment=["table", "starts", "lens", "sees"],
)
def chunks_kernel(
    q, cache, scales, table, starts, lens, sees, sinks, out, q_stride, table_stride, first,
    num_seqs, window, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend for some queries of one sequence, and query heads that share a key head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    # Last queries, which see most keys, are begun with.
    sequence, tile = _find_sequence(
        starts, first, num_seqs, tl.num_programs(0) - 1 - tl.program_id(0), BLOCK_Q
    )
    sequence += first
    begin = tl.load(starts + sequence)
    count = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    query = tile.to(tl.int32) * BLOCK_Q
    if query >= count:
        return
    length = tl.load(lens + sequence).to(tl.int32)
    row = tl.arange(0, BLOCK_M)
    packed = tl.program_id(1) % PACKS * PACK + row % PACK
    kv_head = (tl.program_id(1) // PACKS).to(tl.int64)
    is_row = (query + row // PACK < count) & (packed < GROUP) & (row < BLOCK_Q * PACK)
    token = begin + query + row // PACK
    head = kv_head * GROUP + packed
    column = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (column < HEAD_SIZE)[None, :]
    q_at = q + (token * q_stride + head * HEAD_SIZE)[:, None] + column[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)

    first_position = length - count + query
    last_position = tl.minimum(first_position + BLOCK_Q, length) - 1
    position = first_position + row // PACK
    seen_to = position
    if sees is not None:
        # A tile's last row sees most; the first one, its own position at least.
        seen_to = tl.load(sees + token, mask=is_row, other=0).to(tl.int32)
        last_position = tl.max(seen_to, 0)
    top, total = _first_state(sinks, head, is_row, True, BLOCK_M, SUNK)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys_at = cache + kv_head * BLOCK_SIZE * HEAD_SIZE
    scales_at = None
    if scales is not None:
        scales_at = scales + kv_head * BLOCK_SIZE
    table += sequence.to(tl.int64) * table_stride
    lowest = 0
    masked_first = 0
    if WINDOWED:
        lowest = tl.maximum(first_position - window + 1, 0)
        masked_first = lowest // BLOCK_N * BLOCK_N
    else:
        # AttentionTiles that all queries see need no mask.
        masked_first = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
        top, total, values = _attend_tiles(
            queries, top, total, values, keys_at, scales_at, table, 0, masked_first, 0, position,
            seen_to, window, scale, cap,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D, CAPPED, WINDOWED, WIDEN, False,
        )  # fmt: skip
    top, total, values = _attend_tiles(
        queries, top, total, values, keys_at, scales_at, table, masked_first, last_position + 1,
        lowest, position, seen_to, window, scale, cap,
        KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D, CAPPED, WINDOWED, WIDEN, True,
    )  # fmt: skip
    result = values / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out + (token * HEADS + head)[:, None] * HEAD_SIZE + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _splits(
    length, window, BLOCK_N: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return the first key of a single query's splits, the keys of each, and their number."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    span = length - first
    size = (span + MAX_SPLITS * BLOCK_N - 1) // (MAX_SPLITS * BLOCK_N) * BLOCK_N
    size = tl.maximum(size, SPLIT_TOKENS)
    return first, size, (span + size - 1) // size


@triton.jit
def find_split(
    lens, place, num_seqs, window, LISTED: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return the sequence of a place in the list of all splits, and the number of the split in it.

    The sequence is `num_seqs` where the list has ended.
    """
    before = 0  # splits of the sequences before
    end = 0  # of those that were looked at
    index = 0
    for first in range(0, num_seqs, LISTED):
        sequence = first + tl.arange(0, LISTED)
        inside = sequence < num_seqs
        length = tl.load(lens + sequence, mask=inside, other=0).to(tl.int32)
        _, _, count = _splits(length, window, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS, WINDOWED)
        # Padding has one, which writes its zeros.
        ends = end + tl.cumsum(tl.where(inside, tl.maximum(count, 1), 0), 0)
        is_before = (ends <= place) & inside
        index += tl.sum(is_before.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
        end = tl.max(ends, 0)
    return index, place - before


@triton.jit
def _attend_split(
    sequence, split, q, cache, scales, table, lens, sinks, out, split_sums, split_values, q_stride,
    table_stride, num_splits, window, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend for the only query of a sequence to a split; program 1 gives the heads."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    length = tl.load(lens + sequence).to(tl.int32)
    start, size, count = _splits(length, window, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS, WINDOWED)
    row = tl.arange(0, BLOCK_M)
    packed = tl.program_id(1) % PACKS * PACK + row
    kv_head = (tl.program_id(1) // PACKS).to(tl.int64)
    head = kv_head * GROUP + packed
    column = tl.arange(0, BLOCK_D)
    is_row = (row < PACK) & (packed < GROUP)
    inside = is_row[:, None] & (column < HEAD_SIZE)[None, :]
    q_at = q + sequence * q_stride + head[:, None] * HEAD_SIZE + column[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    lowest = tl.maximum(length - window, 0) if WINDOWED else 0
    first = start + split * size
    top, total = _first_state(sinks, head, is_row, split == 0, BLOCK_M, SUNK)
    position = tl.full([BLOCK_M], 0, tl.int32) + length - 1
    scales_at = None
    if scales is not None:
        scales_at = scales + kv_head * BLOCK_SIZE
    # Only what is loaded needs a mask: a split's keys are seen by all rows.
    top, total, values = _attend_tiles(
        queries, top, total, tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        cache + kv_head * BLOCK_SIZE * HEAD_SIZE, scales_at,
        table + sequence * table_stride, first, tl.minimum(first + size, length), lowest,
        position, position, window, scale, cap,
        KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D, CAPPED, WINDOWED, WIDEN, True,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    result = values / total[:, None]
    target = sequence * HEADS + head
    if count <= 1:
        out_at = out + target[:, None] * HEAD_SIZE + column[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = target * num_splits + split
        values_at = split_values + part[:, None] * HEAD_SIZE + column[None, :]
        tl.store(split_sums + part, top + tl.log2(total), mask=is_row)
        tl.store(values_at, result, mask=inside)


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "num_seqs"],
    do_not_specialize_on_alignment=["table", "lens"],
)
def singles_kernel(
    q, cache, scales, table, lens, sinks, out, split_sums, split_values, q_stride, table_stride,
    num_splits, num_seqs, window, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, LISTED: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend for sequences with one query, query heads that share a key head, to some splits.

    Programs take turns in one list of the splits of all sequences, so that those of a long one are
    shared by all programs, whatever the others need.
    """
    place = tl.program_id(0)
    sequence, split = find_split(
        lens, place, num_seqs, window, LISTED, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS, WINDOWED
    )
    while sequence < num_seqs:
        _attend_split(
            sequence.to(tl.int64), split, q, cache, scales, table, lens, sinks, out, split_sums,
            split_values, q_stride, table_stride, num_splits, window, scale, cap,
            HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, PACK, BLOCK_M, BLOCK_N, BLOCK_D,
            SPLIT_TOKENS, MAX_SPLITS, CAPPED, WINDOWED, SUNK, WIDEN,
        )  # fmt: skip
        place += tl.num_programs(0)
        # Found again: what is kept would take registers.
        sequence, split = find_split(
            lens, place, num_seqs, window, LISTED, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS, WINDOWED
        )


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lens"])
def combine_kernel(
    split_sums, split_values, lens, out, num_splits, window,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query head."""
    sequence = tl.program_id(0).to(tl.int64)
    target = sequence * HEADS + tl.program_id(1)
    length = tl.load(lens + sequence).to(tl.int32)
    _, _, count = _splits(length, window, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS, WINDOWED)
    if count <= 1:  # it is written
        return
    every = tl.arange(0, MAX_SPLITS)
    sums_at = split_sums + target * num_splits
    sums = tl.load(sums_at + every, mask=every < count, other=-float("inf"))
    top = tl.max(sums, 0)
    total = tl.sum(tl.exp2(sums - top), 0)
    column = tl.arange(0, BLOCK_D)
    result = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        share = tl.exp2(tl.load(sums_at + split, mask=split < count, other=-float("inf")) - top)
        inside = (split < count)[:, None] & (column < HEAD_SIZE)[None, :]
        at = split_values + (target * num_splits + split)[:, None] * HEAD_SIZE + column[None, :]
        part = tl.load(at, mask=inside, other=0.0)
        result += tl.sum(part * share[:, None], 0)
    out_at = out + target * HEAD_SIZE + column
    tl.store(out_at, (result / total).to(out.dtype.element_ty), mask=column < HEAD_SIZE)


def _layer(q: torch.Tensor, cache: torch.Tensor) -> AttentionSizes:
    _, _, kv_heads, block_size, head_size = cache.shape
    is_coded = cache.dtype != q.dtype
    return AttentionSizes(q.shape[1], kv_heads, head_size, block_size, q.element_size(), is_coded)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    step: PagedStep,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention to the cache, [tokens, heads, head_size].

    Args:
        q: rotated queries [tokens, heads, head_size]; heads are contiguous.
        cache: as `store` left it, or `store_codes`.
        step: the sequences.
        scale: multiplies the scores.
        window: sliding window in tokens, the token itself included; None is unlimited.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); None leaves it.
        sinks: float32 [heads], a score of each that has no value; None is without.
        scales: float32 [blocks, 2, kv_heads, block_size], of a cache of codes; None: it has none.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    factors = (scale * _LOG2_E, 0.0)
    if softcap is not None:
        factors = (2 * _LOG2_E * scale / softcap, softcap * _LOG2_E)
    limits = (window or 0, *factors)
    layer = _layer(q, cache)
    options = {
        "CAPPED": softcap is not None,
        "WINDOWED": window is not None,
        "SUNK": sinks is not None,
    }
    sinks = step.lens if sinks is None else sinks  # it is not read then
    if step.num_single:
        _attend_singles(q, (cache, scales), step, sinks, out, layer, limits, options)
    chunks = step.lens.shape[0] - step.num_single
    if chunks:
        constants, tiles = layer.chunks()
        queries = constants["BLOCK_M"] // constants["PACK"]
        programs = (q.shape[0] - step.num_single) // queries + chunks
        chunks_kernel[programs, layer.packs(tiles)](
            q, cache, scales, step.block_table, step.starts, step.lens, step.sees, sinks, out,
            q.stride(0), step.block_table.stride(0), step.num_single, chunks, *limits,
            **constants, **options, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out


def _attend_singles(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor | None],
    step: PagedStep,
    sinks: torch.Tensor,
    out: torch.Tensor,
    layer: AttentionSizes,
    limits: tuple[int, float, float],
    options: Mapping[str, bool],
) -> None:
    """Attend for the sequences with a single query, and write their rows of `out`.

    `cache` has the scales of codes second.
    """
    constants, tiles = layer.singles()
    longest = step.longest_single
    if options["WINDOWED"]:
        longest = min(longest, limits[0] + tiles.keys - 1)
    splits = min(-(-longest // constants["SPLIT_TOKENS"]), constants["MAX_SPLITS"])
    # A sequence of one split has its result written to `out` at once.
    rows = step.num_single * layer.heads * splits if splits > 1 else 0
    sums = torch.empty(rows, dtype=torch.float32, device=q.device)
    values = torch.empty(rows, layer.head_size, dtype=torch.float32, device=q.device)
    # A recorded step has the splits of the longest sequence that there may be, of which most have
    # no keys: a program takes several splits where programs are many.
    packs = layer.packs(tiles)
    programs = max(min(step.num_single * max(splits, 1), STEP_PROGRAMS // packs), 1)
    singles_kernel[programs, packs](
        q, *cache, step.block_table, step.lens, sinks, out, sums, values, q.stride(0),
        step.block_table.stride(0), splits, step.num_single, *limits,
        **constants, **options, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[step.num_single, layer.heads](
            sums, values, step.lens, out, splits, limits[0],
            **layer.combine(), WINDOWED=options["WINDOWED"], num_warps=_COMBINE_WARPS,
        )  # fmt: skip


_CODES = {"int8": "*i8", "fp8": "*u8"}
_TYPES = {
    **dict.fromkeys(("q", "cache", "out"), "*{}"),
    **dict.fromkeys(("table", "starts", "lens"), "*i64"),
    **dict.fromkeys(("sinks", "split_sums", "split_values"), "*fp32"),
    "q_stride": "i32:16",
    **dict.fromkeys(("table_stride", "first", "num_seqs", "num_splits", "window"), "i32"),
    **dict.fromkeys(("scale", "cap"), "fp32"),
}


def _variants(
    dtype: str, heads: int, kv_heads: int, head_size: int, limits: str = "", cache_dtype: str = ""
) -> Iterator[Variant]:
    """Yield the kernels of a layer; `limits` names its features, of which each has a comma."""
    itemsize = 4 if dtype == "fp32" else 2
    layer = AttentionSizes(heads, kv_heads, head_size, 16, itemsize, bool(cache_dtype))
    options: dict[str, Any] = {
        "CAPPED": "soft cap" in limits,
        "WINDOWED": "window" in limits,
        "SUNK": "sinks" in limits,
    }
    types = {name: kind.format(dtype) for name, kind in _TYPES.items()}
    if cache_dtype:
        types |= {"cache": _CODES[cache_dtype], "scales": "*fp32"}
        limits += f", {cache_dtype} cache"
    if "spans" in limits:
        types["sees"] = "*i64"
    options |= dict.fromkeys({"scales", "sees"} - types.keys())
    combined = AttentionTiles(0, 0, _COMBINE_WARPS, 2)
    for kernel, (constants, tiles) in (
        (chunks_kernel, layer.chunks()),
        (singles_kernel, layer.singles()),
        (combine_kernel, (layer.combine(), combined)),
    ):
        kind = kernel.__name__.removesuffix("_kernel")
        if kernel is not chunks_kernel and "spans" in limits:
            continue  # a single query sees no later one
        if kernel is combine_kernel and cache_dtype:
            continue  # it reads no cache
        name = f"{kind}, {dtype}, heads {heads}/{kv_heads} of {head_size}{limits}"
        names = kernel.arg_names
        settings = {key: value for key, value in {**constants, **options}.items() if key in names}
        arguments = {key: value for key, value in types.items() if key in names}
        yield Variant(name, kernel, arguments, settings, tiles.num_warps, tiles.num_stages)


VARIANTS = (
    *_variants("bf16", 32, 8, 64),
    *_variants("bf16", 32, 8, 128),  # Llama-8B
    *_variants("bf16", 16, 8, 128),  # Qwen3-0.6B
    *_variants("bf16", 32, 8, 128, ", window"),
    *_variants("bf16", 16, 8, 256, ", window, soft cap"),
    *_variants("bf16", 64, 8, 64, ", window, sinks"),  # gpt-oss
    *_variants("bf16", 16, 8, 256),
    *_variants("bf16", 64, 1, 256),  # of one key head, which has more query heads than a tile rows
    *_variants("fp16", 16, 8, 256),
    *_variants("fp32", 32, 8, 128),
    *_variants("fp32", 64, 1, 256),
    *_variants("bf16", 8, 4, 256, ", spans"),  # Gemma 3 with images
    *_variants("bf16", 8, 4, 256, ", window, spans"),
    *_variants("bf16", 8, 1, 512),  # Gemma 4
    *_variants("fp16", 8, 1, 512),
    *_variants("bf16", 32, 8, 64, "", "fp8"),
    *_variants("bf16", 32, 8, 128, "", "fp8"),
    *_variants("bf16", 16, 8, 256, ", window, soft cap", "fp8"),
    *_variants("bf16", 8, 4, 256, ", window, spans", "fp8"),
    *_variants("bf16", 64, 1, 256, "", "fp8"),
    *_variants("bf16", 8, 1, 512, "", "fp8"),
    *_variants("fp16", 16, 8, 256, "", "fp8"),
    *_variants("fp32", 32, 8, 128, "", "fp8"),
    *_variants("fp32", 64, 1, 256, "", "fp8"),
    *_variants("bf16", 64, 8, 64, ", window, sinks", "int8"),
    *_variants("bf16", 32, 8, 128, "", "int8"),
    *_variants("bf16", 64, 1, 256, "", "int8"),
    *_variants("bf16", 8, 1, 512, "", "int8"),
    *_variants("fp16", 16, 8, 256, "", "int8"),
    *_variants("fp32", 64, 1, 256, "", "int8"),
)
