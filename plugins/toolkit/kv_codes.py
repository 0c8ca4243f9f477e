"""Keys and values in codes of 8 bits, with a scale for each token and head.

`AttentionBackend.cache_dtypes` specifies the format of backends; this computes it in plain torch.
"""

from __future__ import annotations

import torch

__all__ = ["CODE_DTYPES", "dequantize_heads", "quantize_heads", "rotate_heads"]

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The dtype of codes, by `kv_cache.dtype`."""

_LIMITS = {"int8": 127.0, "fp8": 448.0}
_SMALLEST_HEAD = 2.0**-100  # largest magnitude: products of scales and codes stay normal numbers
_SMALLEST_FP8 = 2.0**-6


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Return heads, rotated: float32, as x [..., heads, head_size].

    Each run of n elements of a head, n the largest power of 2 that divides its size, is multiplied
    by the orthogonal, symmetric matrix of Hadamard (as in Ashkboos et al., arXiv:2404.00456): large
    numbers of few elements are spread over all, and two rotations cancel. Keys are rotated
    before they are coded, and the queries that meet them.
    """
    rotated, size, half = x.float(), x.shape[-1], 1
    n = size & -size
    while half < n:
        a, b = rotated.reshape(*x.shape[:-1], size // (2 * half), 2, half).unbind(-2)
        rotated = torch.stack((a + b, a - b), -2).reshape(x.shape)
        half *= 2
    return rotated * float(n**-0.5)


def quantize_heads(x: torch.Tensor, cache_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of heads.

    Args:
        x: keys or values, [..., heads, head_size], floating.
        cache_dtype: one of `CODE_DTYPES`.

    Returns:
        Codes, as x, of the dtype in `CODE_DTYPES`; scales, float32 [..., heads].
    """
    wide, limit = x.float(), _LIMITS[cache_dtype]
    largest = wide.abs().amax(-1)
    scales = torch.where(largest < _SMALLEST_HEAD, 0.0, largest / limit)
    scales = scales.masked_fill(~largest.isfinite(), torch.nan)
    coded = (scales > 0)[..., None]
    codes = torch.where(coded, wide / scales[..., None], 0.0).clamp(-limit, limit)
    if cache_dtype == "int8":
        codes = codes.round()
    else:
        codes = torch.where(codes.abs() < _SMALLEST_FP8, 0.0, codes)
    return codes.to(CODE_DTYPES[cache_dtype]), scales


def dequantize_heads(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values of a dtype, as codes [..., heads, head_size].

    Args:
        codes: result of `quantize_heads`.
        scales: likewise, float32 [..., heads].
        dtype: dtype of the result.
    """
    return (codes.float() * scales[..., None]).to(dtype)
