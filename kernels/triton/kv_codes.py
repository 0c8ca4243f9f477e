"""Keys and values in codes of 8 bits, as `hardpoint.toolkit.kv_codes` has them in torch.

What it computes, for a cache of codes [blocks, 2 (keys, values), kv_heads, block_size, head_size],
and scales [blocks, 2, kv_heads, block_size]:

    q, k = rotate(q, angles), rotate(k, angles)  # as `store` of `kv_cache`, if there are angles
    rotated, k = rotate_heads(q).to(q.dtype), rotate_heads(k)
    codes, scales = quantize_heads(stack((k, v)), cache_dtype)  # and written, as `store` does

Codes of fp8 are bytes here: not all GPUs convert float8, and the format has neither subnormal
numbers nor NaN, so that a few operations on bits do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .launch import Variant, power_of_2

__all__ = ["CODE_DTYPES", "VARIANTS", "decode", "store_codes"]

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
"""The dtype of codes in a cache, by `kv_cache.dtype`."""

_ELEMENTS = 1024  # that a program rotates or writes, about
_NUM_WARPS = 4


@triton.jit
def decode(codes):
    """Return the numbers of codes, float32: of fp8 (uint8), or of int8."""
    if codes.dtype == tl.uint8:
        # Sign, exponent and mantissa are moved to their places in a float32.
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        numbers = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def _encode(x, IS_FP8: tl.constexpr):
    """Return the codes of numbers, float32 in the range of codes."""
    if IS_FP8:
        bits = x.to(tl.int32, bitcast=True)
        # Rounded to 3 bits of mantissa, ties to even; 120 is the difference of the biases.
        rounded = (bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)
        code = ((bits >> 24) & 0x80) | ((rounded >> 20) - 960)
        codes = tl.where(tl.abs(x) < 0.015625, 0, code).to(tl.uint8)
    else:
        codes = ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2**23: rounds, ties to even
    return codes


@triton.jit
def _load_heads(
    heads, angles, is_row, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load heads, float32 [rows, BLOCK_D], 0 for others; rotate them by angles, rounded once."""
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = is_row[:, None] & (column < HEAD_SIZE)
    x = tl.load(heads[:, None] + column, mask=inside, other=0.0)
    element: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    if HALF > 0:
        inside = inside & (column < 2 * HALF)
        is_first = column < HALF
        other = tl.where(is_first, column + HALF, column - HALF)
        partner = tl.load(heads[:, None] + other, mask=inside, other=0.0).to(tl.float32)
        turns = angles[:, None] + column % HALF
        cos = tl.load(turns, mask=inside, other=1.0)
        sin = tl.load(turns + HALF, mask=inside, other=0.0)
        turned = x * cos + partner * tl.where(is_first, -sin, sin)
        x = tl.where(inside, turned, x).to(element).to(tl.float32)
    return x


@triton.jit
def _apply_hadamard(x, RUN_BITS: tl.constexpr, FACTOR: tl.constexpr):
    """Return `rotate_heads` of heads [rows, BLOCK_D], in runs of 2**RUN_BITS elements."""
    column = tl.arange(0, x.shape[1])[None, :] + tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(RUN_BITS):
        other = tl.gather(x, column ^ (1 << bit), 1)
        x = tl.where((column >> bit) & 1 == 0, x + other, other - x)
    return x * FACTOR


@triton.jit
def _write_codes(
    x, codes, scales, is_row, IS_FP8: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the codes and scales of heads [rows, BLOCK_D] to pointers of rows."""
    LIMIT: tl.constexpr = 448.0 if IS_FP8 else 127.0
    is_odd = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1) > 0  # not finite
    largest = tl.where(is_odd, 0.0, tl.max(tl.abs(x), 1))
    is_coded = largest >= 7.888609052210118e-31  # 2**-100
    scale = tl.where(is_coded, tl.div_rn(largest, LIMIT + tl.zeros_like(largest)), 0.0)
    divisor = tl.where(is_coded, scale, 1.0)[:, None] + tl.zeros_like(x)
    number = tl.where(is_coded[:, None], tl.div_rn(x, divisor), 0.0)
    number = tl.minimum(tl.maximum(number, -LIMIT), LIMIT)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = is_row[:, None] & (column < HEAD_SIZE)
    tl.store(codes[:, None] + column, _encode(number, IS_FP8), mask=inside)
    tl.store(scales, tl.where(is_odd, float("nan"), scale), mask=is_row)


@triton.jit(
    do_not_specialize=["tokens", "query_programs"], do_not_specialize_on_alignment=["slots"]
)
def store_codes_kernel(
    q, k, v, rotated, cache, scales, slots, angles, q_stride, k_stride, v_stride, angle_stride,
    tokens, query_programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, RUN_BITS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Rotate some query heads of the step's tokens, or write some key heads and values."""
    program = tl.program_id(0)
    if program < query_programs:
        row = program * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        token = (row // HEADS).to(tl.int64)
        is_row = token < tokens
        heads = q + token * q_stride + row % HEADS * HEAD_SIZE
        x = _load_heads(heads, angles + token * angle_stride, is_row, HEAD_SIZE, HALF, BLOCK_D)
        x = _apply_hadamard(x, RUN_BITS, FACTOR)
        column = tl.arange(0, BLOCK_D)[None, :]
        target = rotated + row.to(tl.int64)[:, None] * HEAD_SIZE + column
        inside = is_row[:, None] & (column < HEAD_SIZE)
        tl.store(target, x.to(rotated.dtype.element_ty), mask=inside)
    else:
        row = (program - query_programs) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        token = (row // KV_HEADS).to(tl.int64)
        head = row % KV_HEADS
        slot = tl.load(slots + token, mask=token < tokens, other=-1)
        is_row = slot >= 0
        SIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE
        IS_FP8: tl.constexpr = cache.dtype.element_ty == tl.uint8
        place = slot // BLOCK_SIZE * (2 * SIDE) + head * BLOCK_SIZE + slot % BLOCK_SIZE
        heads = k + token * k_stride + head * HEAD_SIZE
        x = _load_heads(heads, angles + token * angle_stride, is_row, HEAD_SIZE, HALF, BLOCK_D)
        x = _apply_hadamard(x, RUN_BITS, FACTOR)
        codes = cache + place * HEAD_SIZE
        _write_codes(x, codes, scales + place, is_row, IS_FP8, HEAD_SIZE, BLOCK_D)
        heads = v + token * v_stride + head * HEAD_SIZE
        x = _load_heads(heads, angles, is_row, HEAD_SIZE, 0, BLOCK_D)
        codes += SIDE * HEAD_SIZE
        _write_codes(x, codes, scales + place + SIDE, is_row, IS_FP8, HEAD_SIZE, BLOCK_D)


def _constants(
    heads: int, kv_heads: int, head_size: int, block_size: int, size: int
) -> dict[str, int | float]:
    """Return the constants of `store_codes_kernel`; `size` is the size of angles, or 0."""
    block_d, run = power_of_2(head_size), head_size & -head_size
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "HALF": size // 2,
        "BLOCK_D": block_d,
        "BLOCK_HEADS": max(_ELEMENTS // block_d, 1),
        "RUN_BITS": run.bit_length() - 1,
        "FACTOR": run**-0.5,
    }


def store_codes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
    angles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write codes and scales of keys and values; return the queries, rotated as keys are.

    Args:
        q: [tokens, heads, head_size]; tokens need not be contiguous, heads are, as in k and v.
        k: [tokens, kv_heads, head_size].
        v: like k.
        cache: codes [blocks, 2, kv_heads, block_size, head_size], of a dtype in `CODE_DTYPES`, and
            scales, float32 [blocks, 2, kv_heads, block_size].
        slots: int64 [tokens]; block * block_size + offset, or -1: the token is not written.
        angles: as for `store` of `kv_cache`; q and k are left alone.
    """
    codes, scales = cache
    tokens, heads = q.shape[:2]
    _, _, kv_heads, block_size, head_size = codes.shape
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return rotated
    size = 0 if angles is None else angles.shape[1]
    constants = _constants(heads, kv_heads, head_size, block_size, size)
    of_queries = -(-tokens * heads // constants["BLOCK_HEADS"])
    of_keys = -(-tokens * kv_heads // constants["BLOCK_HEADS"])
    turns, stride = (slots, 0) if angles is None else (angles, angles.stride(0))
    store_codes_kernel[of_queries + of_keys,](
        q, k, v, rotated, codes, scales, slots, turns, q.stride(0), k.stride(0), v.stride(0),
        stride, tokens, of_queries, **constants, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return rotated


def _variants(
    dtype: str, heads: int, kv_heads: int, head_size: int, size: int
) -> Iterator[Variant]:
    types = dict.fromkeys(("q", "k", "v", "rotated"), f"*{dtype}")
    types |= {"scales": "*fp32", "slots": "*i64", "angles": "*fp32" if size else "*i64"}
    types |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "angle_stride"), "i32:16")
    types |= {"tokens": "i32", "query_programs": "i32"}
    constants = _constants(heads, kv_heads, head_size, 16, size)
    for cache_dtype, element in (("int8", "*i8"), ("fp8", "*u8")):
        name = f"store, {dtype} to {cache_dtype}, heads {heads}/{kv_heads} of {head_size}"
        yield Variant(
            f"{name}, {size} rotated",
            store_codes_kernel,
            types | {"cache": element},
            constants,
            _NUM_WARPS,
        )


VARIANTS = (
    *_variants("bf16", 32, 8, 64, 64),
    *_variants("bf16", 32, 8, 128, 128),  # Llama-8B
    *_variants("bf16", 16, 8, 256, 256),
    *_variants("bf16", 32, 8, 512, 512),
    *_variants("bf16", 32, 8, 80, 32),
    *_variants("fp16", 32, 8, 128, 0),
    *_variants("fp32", 32, 8, 128, 128),
)
