"""Products and rounding as GPUs do them, also where Triton's interpreter does otherwise.

multiply_add    total + a.float() @ b.float()
rounded         value.to(dtype)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

__all__ = ["multiply_add", "rounded"]

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def multiply_add(a, b, total):
    """Return total + a b, float32 [rows, columns]; products are exact."""
    if _INTERPRETED:  # which has no products of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Return float32 rounded to the nearest number of a dtype, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:  # to which it truncates
        bits = value.to(tl.int32, bitcast=True)
        nearest = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (nearest >> 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        return value.to(dtype)
