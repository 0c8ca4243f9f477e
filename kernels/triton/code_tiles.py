"""The tiles of products with matrices of few bits, and how they are read.

line, piece = k // 64, k % 64 // 16  # of 8 bits: k // 32, k % 32 // 16; see packed_codes.py
code = words[n, line, k % 16] >> 4 * piece & 15
W[n, k] = scale[n, k // group] * value[code] + offset[n, k // group]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .arithmetic import multiply_add, rounded
from .launch import is_interpreted
from .packed_codes import Form, Part

__all__ = [
    "GATHERED", "INTERPRETED", "LINE", "Tile", "code_constants", "code_tensors", "factors_of",
    "first_columns", "load_words", "multiply_tile", "product_tile", "splits_of", "values_of",
]  # fmt: skip


class Tile(NamedTuple):
    """Launch parameters.

    Attributes:
        x_rows: number of rows of x, for a program.
        rows: number of rows of W, for a program.
        lines: number of words of a row of W, for a step of its loop.
        warps, stages: as for the launch.
        programs: number of programs of one tile of x that keep a GPU busy: if there are fewer tiles
            of W, columns are divided. 1 never divides them.
    """

    x_rows: int
    rows: int
    lines: int
    warps: int
    stages: int
    programs: int = 1


# For one row of x, by the least number of rows of W: few rows leave few programs to read it, which
# have more warps. 16 rows, and 8 words for each thread: loads of x and of scales are so few next to
# those of codes that Triton lets each thread load what it multiplies, without shared memory.
_ONE_ROW = (
    (8192, Tile(1, 16, 4, 4, 2)),
    (2048, Tile(1, 16, 8, 8, 2)),
    (0, Tile(1, 16, 16, 16, 2)),
)
# By the largest number of rows of x, in 2 bytes and in 4. The sums of a program whose columns are
# divided are written and read once more: of more rows, these are more bytes next to those of codes.
_ROWS = {
    2: (
        (16, Tile(16, 32, 2, 4, 3, 512)),
        (64, Tile(64, 64, 2, 4, 3, 256)),
        (128, Tile(128, 64, 1, 8, 3, 256)),
        (0, Tile(128, 64, 1, 8, 3)),
    ),
    4: (
        (16, Tile(16, 32, 2, 4, 2, 512)),
        (128, Tile(64, 64, 1, 8, 2, 256)),
        (0, Tile(64, 64, 1, 8, 2)),
    ),
}
# The interpreter takes as long for a large step as for a small one.
INTERPRETED = (Tile(1, 64, 8, 4, 1), Tile(16, 64, 8, 4, 1, 512))
GATHERED = Tile(1, 1, 16, 4, 1)
_LEAST_STEPS = 4  # of a program's loop, if columns are divided
LINE = 16  # words


@triton.jit
def first_columns(lines, PIECE: tl.constexpr, BITS: tl.constexpr):
    """Return the first columns of a piece, 16 columns, of lines of words."""
    return lines * (32 if BITS == 8 else 64) + PIECE * 16


@triton.jit
def load_words(codes, highs, n, lines, n_inside, num_lines, BITS: tl.constexpr):
    """Return words [n, lines, 16], and the fifth and sixth bits at their bottom."""
    inside = n_inside[:, None, None] & (lines < num_lines)[None, :, None]
    rows, line = n.to(tl.int64)[:, None, None], lines[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    low = tl.load(codes + rows * (num_lines * 16) + (line * 16 + j), mask=inside, other=0)
    high = low
    if BITS == 6:
        at = rows * (num_lines * 8) + (line * 8 + j % 8)
        high = tl.load(highs + at, mask=inside, other=0).to(tl.int32) >> (j // 8 * 8)
    if BITS == 5:
        at = rows * ((num_lines + 1) // 2 * 8) + (line // 2 * 8 + j % 8)
        shift = j // 8 * 4 + line % 2 * 8
        high = tl.load(highs + at, mask=inside, other=0).to(tl.int32) >> shift
    return low, high


@triton.jit
def values_of(low, high, values, PIECE: tl.constexpr, BITS: tl.constexpr, HAS_VALUES: tl.constexpr):
    """Return the numbers that the codes of a piece stand for, float32."""
    if BITS == 8:
        if PIECE == 0:
            codes = low.to(tl.int8)
        else:
            codes = low >> 8
    else:
        codes = (low >> (4 * PIECE)) & 15
        if BITS > 4:
            MORE: tl.constexpr = BITS - 4
            codes = codes.to(tl.int32) | (((high >> (MORE * PIECE)) & ((1 << MORE) - 1)) << 4)
    if HAS_VALUES:
        return tl.load(values + codes.to(tl.int32))
    return codes.to(tl.float32)


@triton.jit
def _load_factors(factors, outer, n, n_inside, columns_at, columns, group, NESTED: tl.constexpr):
    """Return scales or offsets [n, lines, 1], float32; 0 beyond the columns."""
    inside = n_inside[:, None] & (columns_at < columns)[None, :]
    rows = n.to(tl.int64)[:, None]
    at = rows * ((columns + group - 1) // group) + (columns_at // group)[None, :]
    result = tl.load(factors + at, mask=inside, other=0).to(tl.float32)
    if NESTED:
        outer_at = rows * ((columns + 255) // 256) + (columns_at // 256)[None, :]
        result *= tl.load(outer + outer_at, mask=inside, other=0).to(tl.float32)
    return result[:, :, None]


@triton.jit
def factors_of(
    scales, outer_scales, offsets, outer_offsets, n, n_inside, columns_at, columns, group,
    NESTED: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Return scales and offsets; scales again if there are no offsets."""
    scale = _load_factors(scales, outer_scales, n, n_inside, columns_at, columns, group, NESTED)
    offset = scale
    if OFFSETS > 0:
        offset = _load_factors(
            offsets, outer_offsets, n, n_inside, columns_at, columns, group, OFFSETS == 2
        )
    return scale, offset


@triton.jit
def multiply_tile(
    x_at, m_inside, codes, highs, scales, outer_scales, offsets, outer_offsets, values,
    n, n_inside, start_line, last_line, columns, group, num_lines,
    BITS: tl.constexpr, PAIRED: tl.constexpr, NESTED: tl.constexpr, OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return x W^T of some lines of words, float32 [BLOCK_M, BLOCK_N].

    W is rounded to the dtype of x, of whose rows `x_at` has the addresses, [BLOCK_M, 1].
    """
    PIECES: tl.constexpr = 2 if BITS == 8 else 4
    k = tl.arange(0, LINES * 16)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(start_line, last_line, LINES):
        lines = start + tl.arange(0, LINES)
        low, high = load_words(codes, highs, n, lines, n_inside, num_lines, BITS)
        for piece in tl.static_range(PIECES):
            first = first_columns(lines, piece, BITS)
            if piece % 2 == 0 or not PAIRED:
                scale, offset = factors_of(
                    scales, outer_scales, offsets, outer_offsets, n, n_inside, first, columns,
                    group, NESTED, OFFSETS,
                )  # fmt: skip
            weight = values_of(low, high, values, piece, BITS, HAS_VALUES) * scale
            if OFFSETS > 0:
                weight += offset
            at = first_columns(start + k // 16, piece, BITS) + k % 16
            inside = m_inside[:, None] & (at < columns)[None, :]
            part = tl.load(x_at + at[None, :], mask=inside, other=0)
            matrix = tl.reshape(rounded(weight, part.dtype), (BLOCK_N, LINES * 16))
            total = multiply_add(part, tl.trans(matrix), total)
    return total


def product_tile(x_rows: int, rows: int, dtype: torch.dtype) -> Tile:
    if is_interpreted():
        return INTERPRETED[x_rows > 1]
    if x_rows == 1:
        return next(tile for least, tile in _ONE_ROW if rows >= least)
    return next(tile for most, tile in _ROWS[dtype.itemsize] if x_rows <= most or not most)


def splits_of(tile: Tile, rows: int, steps: int) -> int:
    """Return among how many programs the columns are divided, by the tile and W's shape alone.

    A power of 2, so that few kernels are compiled. Their sums, float32 [splits, rows of x, rows],
    take 8 MiB at most: a tile that divides columns is for no more rows of x than 128.
    """
    wanted = min(tile.programs // -(-rows // tile.rows), steps // _LEAST_STEPS, 16)
    return 1 << (max(wanted, 1).bit_length() - 1)


def code_constants(form: Form, tile: Tile) -> dict[str, Any]:
    """Return the constants of a form, by which kernels differ."""
    return {
        "BITS": form.bits,
        "LINES": tile.lines,
        "PAIRED": form.group > 16,  # pieces have the scales of their neighbours
        "NESTED": form.scales > 2,
        "OFFSETS": (form.offsets > 0) + (form.offsets > 2),
        "HAS_VALUES": form.has_values,
    }


def code_tensors(part: Part) -> tuple[torch.Tensor, ...]:
    """Return the tensors that kernels take; absent ones are replaced by `codes`, and not read."""
    scales = (part.scales, part.outer_scales, part.offsets, part.outer_offsets)
    optional = (part.highs, *scales, part.values)
    return (part.codes, *(part.codes if tensor is None else tensor for tensor in optional))
