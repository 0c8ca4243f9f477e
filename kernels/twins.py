"""Twins of the kernels in plain torch: the reference that their tests compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = [
    "AffineMatrix",
    "PagedSequences",
    "dequantize",
    "gated",
    "linear_codes",
    "linear_rounded",
    "paged_attention",
    "rms_norm",
    "rotated",
]


@dataclass(frozen=True, eq=False)
class PagedSequences:
    """The sequences of a step.

    Attributes:
        counts: tokens of each in the step; their queries, keys and values follow one another.
        lengths: tokens of each altogether.
        blocks: block ids of each.
        sees: position of the last token that each one sees, of each; None: its own.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    blocks: Sequence[Sequence[int]]
    sees: Sequence[Sequence[int]] | None = None


def paged_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    sequences: PagedSequences,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write keys and values to a cache, then attend causally, in float32.

    Args:
        qkv: queries [tokens, heads, head_size], keys and values [tokens, kv_heads, head_size].
        cache: keys and values, each [blocks, block_size, kv_heads, head_size].
        sequences: the step.
        scale: multiplies the scores.
        window: sliding window in tokens, the token itself included; None is unlimited.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); None leaves it.
        sinks: float32 [heads], a score of each that has no value; None is without.

    Returns:
        float32 [tokens, heads, head_size].
    """
    q, *written = qkv
    parts = [torch.split(part, list(sequences.counts)) for part in (q, *written)]
    block_size, heads_per_kv_head = cache[0].shape[1], q.shape[1] // written[0].shape[1]
    spans = [
        torch.arange(length - count, length)
        for count, length in zip(sequences.counts, sequences.lengths, strict=True)
    ]
    for blocks, span, *new in zip(sequences.blocks, spans, *parts[1:], strict=True):
        table = torch.tensor(blocks)
        for side, values in zip(cache, new, strict=True):
            side[table[span // block_size], span % block_size] = values
    results, seen = [], sequences.sees or spans
    for queries, blocks, span, sees in zip(parts[0], sequences.blocks, spans, seen, strict=True):
        length = int(span[-1]) + 1
        keys, values = (
            side[torch.tensor(blocks)]
            .flatten(0, 1)[:length]
            .float()
            .repeat_interleave(heads_per_kv_head, 1)
            for side in cache
        )
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key = torch.arange(length)
        hidden = key > torch.as_tensor(sees)[:, None]
        hidden |= span[:, None] - key >= (window or length)
        # Not 0 * what is hidden, which may be NaN.
        oldest = 0 if window is None else max(int(span[0]) + 1 - window, 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(queries), 1)), -1)
        weights = scores.softmax(-1)[..., oldest:length]
        results.append(torch.einsum("hqk,khd->qhd", weights, values[oldest:]))
    return torch.cat(results)


@dataclass(frozen=True, eq=False)
class AffineMatrix:
    """A matrix W[r, k] = scale[r, k / group] * value[codes[r, k]] + offset[r, k / group].

    Attributes:
        codes: uint8 [rows, columns], of 8 bits int8.
        bits: number of bits of a code: 4, 5, 6 or 8.
        group: columns that share a scale: 16, or a multiple of 32.
        scales: [rows, groups], float16, float32, int8 or uint8.
        offsets: as scales, or None.
        outer_scales: float16 [rows, columns / 256, rounded up], which multiply scales of 8 bits;
            None for other scales.
        outer_offsets: likewise for offsets.
        values: float32 [2**bits], which bfloat16 holds exactly; None: the codes themselves.
    """

    codes: torch.Tensor
    bits: int
    group: int
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_offsets: torch.Tensor | None = None
    values: torch.Tensor | None = None


def dequantize(matrix: AffineMatrix) -> torch.Tensor:
    """Return W, float32: the exact products and sums, rounded once."""
    codes = matrix.codes
    values = codes.double() if matrix.values is None else matrix.values.double()[codes.long()]
    columns = codes.shape[1]
    result = _spread(matrix.scales, matrix.outer_scales, matrix.group, columns) * values
    if matrix.offsets is not None:
        result += _spread(matrix.offsets, matrix.outer_offsets, matrix.group, columns)
    return result.float()


def _spread(
    factors: torch.Tensor, outer: torch.Tensor | None, group: int, columns: int
) -> torch.Tensor:
    each = factors.double().repeat_interleave(group, 1)[:, :columns]
    if outer is not None:
        each = each * outer.double().repeat_interleave(256, 1)[:, :columns]
    return each


def linear_codes(
    x: torch.Tensor, parts: Sequence[AffineMatrix], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b in float32, for W of parts one below the other."""
    y = x.float() @ torch.cat([dequantize(part) for part in parts]).T
    return y if bias is None else y + bias.float()


def largest_integer(bits: int, activations: str) -> int:
    """Return the limit of the integers that x becomes, for codes of `bits`."""
    words = {4: 32767, 5: 16383, 6: 8191, 8: 2047}
    return words[bits] if bits == 8 or activations == "int16" else 127


def round_activations(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Return x [rows, columns] rounded to integers in blocks of 32 columns, float64."""
    rows, columns = x.shape
    blocks = F.pad(x.float(), (0, -columns % 32)).view(rows, -(-columns // 32), 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    is_zero = largest < 2.0**-100
    limits = torch.full_like(largest, limit)  # torch divides a number by multiplying it
    integers = blocks.double() * (limits / largest).double()
    integers = integers.round().clamp(-limit, limit)
    integers = integers.masked_fill(is_zero, 0)
    scales = (largest / limits).masked_fill(is_zero, 0)
    scales = scales.masked_fill(~blocks.isfinite().all(-1, keepdim=True), torch.nan)
    rounded: torch.Tensor = integers * scales.double()
    return rounded.flatten(1)[:, :columns]


def linear_rounded(
    x: torch.Tensor,
    parts: Sequence[AffineMatrix],
    bias: torch.Tensor | None = None,
    activations: str = "int8",
) -> torch.Tensor:
    """Return x W^T + b in float32, for x rounded to integers in parts with consecutive values."""
    products = [
        (
            round_activations(x, largest_integer(part.bits, activations))
            if _is_affine(part)
            else x.double()
        )
        @ dequantize(part).double().T
        for part in parts
    ]
    y = torch.cat(products, 1).float()
    return y if bias is None else y + bias.float()


def _is_affine(matrix: AffineMatrix) -> bool:
    return matrix.values is None or bool((matrix.values.diff() == 1).all())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x."""
    wide = x.double()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * weight.double()).to(x.dtype)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return rotated heads, as x [rows, heads, size]; angles are cosines, then sines."""
    cos, sin = angles.double().unsqueeze(1).chunk(2, -1)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up for x [rows, 2 * size], in the dtype of x.

    Args:
        x: the gate before up.
        activation: "silu", or "gelu" for its tanh form.
    """
    gate, up = x.double().chunk(2, -1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(x.dtype)
