"""Keys and values are written to a cache; on their way keys, and queries in place, are rotated.

What it computes, for a cache [blocks, 2 (keys, values), kv_heads, block_size, head_size]:

    for x in (q, k):  # by angles [tokens, size], of which none means that nothing is rotated
        a, b, cos, sin = x[..., : size / 2], x[..., size / 2 : size], *angles.chunk(2, -1)
        x[..., :size] = cat(a * cos - b * sin, b * cos + a * sin)  # in float32, rounded once
    written = slots >= 0  # the others are padding
    cache[slots // block_size, 0, :, slots % block_size][written] = k[written]  # and values, at 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Variant, power_of_2

__all__ = ["VARIANTS", "store"]

_ELEMENTS = 1024  # that a program rotates or writes, about
_NUM_WARPS = 4


@triton.jit
def _rotate(source, target, angles, is_row, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rotate rows of a source to a target, which may be the same; all given by pointers."""
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = is_row[:, None] & (column < HALF)
    cos = tl.load(angles[:, None] + column, mask=inside, other=0.0)
    sin = tl.load(angles[:, None] + HALF + column, mask=inside, other=0.0)
    # A thread reads what it writes alone, so that no other one is in its way.
    a = tl.load(source[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + HALF + column, mask=inside, other=0.0).to(tl.float32)
    element = target.dtype.element_ty
    tl.store(target[:, None] + column, (a * cos - b * sin).to(element), mask=inside)
    tl.store(target[:, None] + HALF + column, (b * cos + a * sin).to(element), mask=inside)


@triton.jit
def _copy(source, target, is_row, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows, from one element on."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = is_row[:, None] & (column < SIZE)
    x = tl.load(source[:, None] + column, mask=inside)
    tl.store(target[:, None] + column, x, mask=inside)


@triton.jit(
    do_not_specialize=["tokens", "query_programs"], do_not_specialize_on_alignment=["slots"]
)
def store_kernel(
    q, k, v, cache, slots, angles, q_stride, k_stride, v_stride, angle_stride, tokens,
    query_programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate some query heads of the step's tokens, or write some key heads and values."""
    program = tl.program_id(0)
    if program < query_programs:
        row = program * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        token = (row // HEADS).to(tl.int64)
        heads = q + token * q_stride + row % HEADS * HEAD_SIZE
        turns = angles + token * angle_stride
        _rotate(heads, heads, turns, token < tokens, HALF, BLOCK_HALF)
    else:
        row = (program - query_programs) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        token = (row // KV_HEADS).to(tl.int64)
        head = row % KV_HEADS
        slot = tl.load(slots + token, mask=token < tokens, other=-1)
        is_row = slot >= 0
        SIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_SIZE
        keys = cache + slot // BLOCK_SIZE * (2 * SIDE) + slot % BLOCK_SIZE * HEAD_SIZE
        keys += head * (BLOCK_SIZE * HEAD_SIZE)
        heads = k + token * k_stride + head * HEAD_SIZE
        if HALF > 0:
            turns = angles + token * angle_stride
            _rotate(heads, keys, turns, is_row, HALF, BLOCK_HALF)
        if 2 * HALF < HEAD_SIZE:
            _copy(heads, keys, is_row, 2 * HALF, HEAD_SIZE, BLOCK_REST)
        heads = v + token * v_stride + head * HEAD_SIZE
        _copy(heads, keys + SIDE, is_row, 0, HEAD_SIZE, BLOCK_D)


def _constants(
    heads: int, kv_heads: int, head_size: int, block_size: int, size: int
) -> dict[str, int]:
    """Return the constants of `store_kernel`; `size` is the size of angles, or 0."""
    block_d = power_of_2(head_size)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HALF": size // 2,
        "BLOCK_HALF": power_of_2(max(size // 2, 1)),
        "BLOCK_REST": power_of_2(max(head_size - size, 1)),
        "BLOCK_D": block_d,
        "BLOCK_HEADS": max(_ELEMENTS // block_d, 1),
    }


def store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    angles: torch.Tensor | None = None,
) -> None:
    """Write keys and values to the cache; with angles, queries (in place) and keys are rotated.

    Args:
        q: [tokens, heads, head_size]; tokens need not be contiguous, heads are, as in k and v.
        k: [tokens, kv_heads, head_size].
        v: like k.
        cache: [blocks, 2, kv_heads, block_size, head_size].
        slots: int64 [tokens]; block * block_size + offset, or -1: the token is not written.
        angles: float32 [tokens, size]; cosines, then sines, for the first elements of each head.
    """
    tokens, heads = q.shape[:2]
    _, _, kv_heads, block_size, head_size = cache.shape
    if not tokens:
        return
    size = 0 if angles is None else angles.shape[1]
    constants = _constants(heads, kv_heads, head_size, block_size, size)
    of_queries = -(-tokens * heads // constants["BLOCK_HEADS"]) if size else 0
    of_keys = -(-tokens * kv_heads // constants["BLOCK_HEADS"])
    turns, stride = (slots, 0) if angles is None else (angles, angles.stride(0))
    store_kernel[of_queries + of_keys,](
        q, k, v, cache, slots, turns, q.stride(0), k.stride(0), v.stride(0), stride, tokens,
        of_queries, **constants, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _variant(dtype: str, heads: int, kv_heads: int, head_size: int, size: int) -> Variant:
    types = dict.fromkeys(("q", "k", "v", "cache"), f"*{dtype}")
    types |= {"slots": "*i64", "angles": "*fp32" if size else "*i64"}
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "angle_stride"), "i32:16")
    types |= {"tokens": "i32", "query_programs": "i32"}
    name = f"store, {dtype}, heads {heads}/{kv_heads} of {head_size}, {size} rotated"
    constants = _constants(heads, kv_heads, head_size, 16, size)
    return Variant(name, store_kernel, types, constants, _NUM_WARPS)


VARIANTS = (
    _variant("bf16", 32, 8, 64, 64),
    _variant("bf16", 32, 8, 128, 128),  # Llama-8B
    _variant("bf16", 16, 8, 128, 128),  # Qwen3-0.6B
    _variant("bf16", 16, 8, 256, 256),
    _variant("bf16", 32, 8, 128, 0),
    _variant("bf16", 32, 8, 80, 32),
    _variant("fp32", 32, 8, 128, 128),
)
