"""Products with matrices of few bits, and their rows.

    codes = unpack(packed)  # [rows, columns]; see packed_codes.py
    W = scale[:, k // group] * value[codes] + offset[:, k // group]  # scale: times an outer one
    y = x @ W.T + bias
    table[ids] = W[ids]

A single row of x is multiplied in float32, without rounding W: the products of codes are summed by
group, before scales multiply the sums. For more rows a tile of W is rounded to the dtype of x, for
tensor cores, which sum in float32. If there are few tiles, the columns are divided among programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hardpoint.kernels.triton.launch import Variant, is_interpreted
from hardpoint.kernels.triton.packed_codes import LAYOUT, Codes, Form, Part, pack, read

__all__ = ["LAYOUT", "VARIANTS", "Codes", "gather_codes", "linear_codes", "pack"]


class Tile(NamedTuple):
    """Launch parameters.

    Attributes:
        x_rows: of x, for a program.
        rows: of W, for a program.
        lines: of words of a row of W, for a step of its loop.
        warps, stages: as for the launch.
    """

    x_rows: int
    rows: int
    lines: int
    warps: int
    stages: int


# For one row of x, by the least number of rows of W: few rows leave few programs to read it, which
# have more warps. 16 rows, and 8 words for each thread: loads of x and of scales are so few next to
# those of codes that Triton lets each thread load what it multiplies, without shared memory.
_ONE_ROW = (
    (8192, Tile(1, 16, 4, 4, 2)),
    (2048, Tile(1, 16, 8, 8, 2)),
    (0, Tile(1, 16, 16, 16, 2)),
)
# By the largest number of rows of x, in 2 bytes and in 4.
_ROWS = {
    2: ((16, Tile(16, 32, 2, 4, 3)), (64, Tile(64, 64, 2, 4, 3)), (0, Tile(128, 64, 1, 8, 3))),
    4: ((16, Tile(16, 32, 2, 4, 2)), (0, Tile(64, 64, 1, 8, 2))),
}
# The interpreter takes as long for a large step as for a small one.
_INTERPRETED = (Tile(1, 64, 8, 4, 1), Tile(16, 64, 8, 4, 1))
_GATHERED = Tile(1, 1, 16, 4, 1)
_PROGRAMS = 512  # that keep a GPU's memory busy
_LEAST_STEPS = 4  # of a program's loop, if columns are divided
_LINE = 16  # words


@triton.jit
def _first_columns(lines, PIECE: tl.constexpr, BITS: tl.constexpr):
    """Return the first columns of a piece, 16 columns, of lines of words."""
    return lines * (32 if BITS == 8 else 64) + PIECE * 16


@triton.jit
def _load_words(codes, highs, n, lines, n_inside, num_lines, BITS: tl.constexpr):
    """Return words [n, lines, 16], and what has their fifth and sixth bits at the bottom."""
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
def _values_of(
    low, high, values, PIECE: tl.constexpr, BITS: tl.constexpr, HAS_VALUES: tl.constexpr
):
    """Return what the codes of a piece stand for, float32."""
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
def _factors_of(
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
def _one_row(
    x,
    codes,
    highs,
    scales,
    outer_scales,
    offsets,
    outer_offsets,
    values,
    bias,
    y,
    columns,
    rows,
    group,
    num_lines,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    NESTED: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
):
    PIECES: tl.constexpr = 2 if BITS == 8 else 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < rows
    total = tl.zeros((BLOCK_N, LINES, 16), tl.float32)
    for start in tl.range(0, num_lines, LINES, loop_unroll_factor=2):
        lines = start + tl.arange(0, LINES)
        low, high = _load_words(codes, highs, n, lines, n_inside, num_lines, BITS)
        for piece in tl.static_range(PIECES):
            first = _first_columns(lines, piece, BITS)
            if piece % 2 == 0 or not PAIRED:
                scale, offset = _factors_of(
                    scales, outer_scales, offsets, outer_offsets, n, n_inside, first, columns,
                    group, NESTED, OFFSETS,
                )  # fmt: skip
            at = first[None, :, None] + tl.arange(0, 16)[None, None, :]
            part = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
            weight = _values_of(low, high, values, piece, BITS, HAS_VALUES) * scale
            if OFFSETS > 0:
                weight += offset
            total += weight * part
    result = tl.sum(tl.sum(total, 2), 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n_inside, other=0).to(tl.float32)
    tl.store(y + n, result, mask=n_inside)


@triton.jit
def _many_rows(
    x,
    codes,
    highs,
    scales,
    outer_scales,
    offsets,
    outer_offsets,
    values,
    bias,
    y,
    x_stride,
    y_stride,
    split_stride,
    x_rows,
    columns,
    rows,
    group,
    num_lines,
    split_lines,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    NESTED: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    PIECES: tl.constexpr = 2 if BITS == 8 else 4
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    m_inside, n_inside = m < x_rows, n < rows
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    k = tl.arange(0, LINES * 16)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    last = tl.minimum((split + 1) * split_lines, num_lines)
    for start in range(split * split_lines, last, LINES):
        lines = start + tl.arange(0, LINES)
        low, high = _load_words(codes, highs, n, lines, n_inside, num_lines, BITS)
        for piece in tl.static_range(PIECES):
            first = _first_columns(lines, piece, BITS)
            if piece % 2 == 0 or not PAIRED:
                scale, offset = _factors_of(
                    scales, outer_scales, offsets, outer_offsets, n, n_inside, first, columns,
                    group, NESTED, OFFSETS,
                )  # fmt: skip
            weight = _values_of(low, high, values, piece, BITS, HAS_VALUES) * scale
            if OFFSETS > 0:
                weight += offset
            at = _first_columns(start + k // 16, piece, BITS) + k % 16
            inside = m_inside[:, None] & (at < columns)[None, :]
            part = tl.load(x_at + at[None, :], mask=inside, other=0)
            if WIDEN:  # the interpreter cannot multiply bfloat16, and cuts it in place of rounding
                part = part.to(tl.float32)
            matrix = tl.reshape(weight.to(part.dtype), (BLOCK_N, LINES * 16))
            total = tl.dot(part, tl.trans(matrix), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_inside, other=0).to(tl.float32)[None, :]
    inside = m_inside[:, None] & n_inside[None, :]
    y_at = y + split.to(tl.int64) * split_stride + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(y_at, total, mask=inside)


@triton.jit
def _sum_splits(
    sums,
    bias,
    y,
    y_stride,
    x_rows,
    rows,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * x_rows + m) * rows + n, mask=inside, other=0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0).to(tl.float32)
    tl.store(y + m * y_stride + n, total, mask=inside)


@triton.jit
def _gather(
    ids,
    codes,
    highs,
    scales,
    outer_scales,
    offsets,
    outer_offsets,
    values,
    y,
    first_row,
    y_stride,
    columns,
    rows,
    group,
    num_lines,
    BITS: tl.constexpr,
    PAIRED: tl.constexpr,
    NESTED: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    LINES: tl.constexpr,
):
    PIECES: tl.constexpr = 2 if BITS == 8 else 4
    index = tl.program_id(0)
    n = tl.load(ids + index) - first_row + tl.zeros((1,), tl.int64)
    n_inside = (n >= 0) & (n < rows)  # others are rows of other parts
    lines = tl.program_id(1) * LINES + tl.arange(0, LINES)
    low, high = _load_words(codes, highs, n, lines, n_inside, num_lines, BITS)
    for piece in tl.static_range(PIECES):
        first = _first_columns(lines, piece, BITS)
        if piece % 2 == 0 or not PAIRED:
            scale, offset = _factors_of(
                scales, outer_scales, offsets, outer_offsets, n, n_inside, first, columns, group,
                NESTED, OFFSETS,
            )  # fmt: skip
        weight = _values_of(low, high, values, piece, BITS, HAS_VALUES) * scale
        if OFFSETS > 0:
            weight += offset
        at = first[None, :, None] + tl.arange(0, 16)[None, None, :]
        inside = n_inside[:, None, None] & (at < columns)
        tl.store(y + index.to(tl.int64) * y_stride + at, weight, mask=inside)


def linear_codes(
    packed: torch.Tensor,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function x [rows, columns of W] -> x W^T + b, [rows, rows of W].

    Args:
        packed: what `pack` returned for W.
        shape: rows and columns of W.
        bias: b, [rows of W].
        out_dtype: of the results.

    Raises:
        ValueError: it is packed from a matrix of another shape, or damaged.
    """
    products, first = [], 0
    for part in read(packed, shape):
        rows = slice(first, first + part.form.rows)
        first = rows.stop
        products.append((rows, _Product(part, shape[1], None if bias is None else bias[rows])))

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty((len(x), shape[0]), dtype=out_dtype, device=x.device)
        if len(x):
            for rows, product in products:
                product(x, y[:, rows])
        return y

    return multiply


def gather_codes(
    packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function ids -> rows of W, [ids, columns of W].

    A row whose id is not one of W has no meaning; nothing else is read for it.

    Args:
        packed: what `pack` returned for W.
        shape: rows and columns of W.
        dtype: of the results.

    Raises:
        ValueError: it is packed from a matrix of another shape, or damaged.
    """
    parts, (_, columns) = read(packed, shape), shape

    def gather(ids: torch.Tensor) -> torch.Tensor:
        y = torch.empty((len(ids), columns), dtype=dtype, device=ids.device)
        ids, first = ids.contiguous(), 0
        for part in parts:
            form, num_lines = part.form, part.codes.shape[1] // _LINE
            constants = _constants(form, _GATHERED)
            grid = (len(ids), triton.cdiv(num_lines, _GATHERED.lines))
            if len(ids):
                _gather[grid](
                    ids, *_tensors(part), y, first, columns, columns, form.rows, form.group,
                    num_lines, **constants, num_warps=_GATHERED.warps,
                )  # fmt: skip
            first += form.rows
        return y

    return gather


class _Product:
    """Writes x W^T + b, for W of one part."""

    def __init__(self, part: Part, columns: int, bias: torch.Tensor | None) -> None:
        self._form, self._columns = part.form, columns
        self._num_lines = part.codes.shape[1] // _LINE
        self._tensors = (*_tensors(part), part.scales if bias is None else bias)
        self._has_bias = bias is not None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        form = self._form
        tile = _tile(len(x), form.rows, x.dtype)
        if tile.x_rows == 1:
            _one_row[(triton.cdiv(form.rows, tile.rows),)](
                x, *self._tensors, y, self._columns, form.rows, form.group, self._num_lines,
                HAS_BIAS=self._has_bias, BLOCK_N=tile.rows, **_constants(form, tile),
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            return
        self._multiply_many(x, y, tile)

    def _multiply_many(self, x: torch.Tensor, y: torch.Tensor, tile: Tile) -> None:
        form, *tensors = self._form, *self._tensors
        constants = _constants(form, tile)
        steps = triton.cdiv(self._num_lines, tile.lines)
        splits = _splits(tile, form.rows, steps)
        grid = (triton.cdiv(len(x), tile.x_rows), triton.cdiv(form.rows, tile.rows), splits)
        is_split = splits > 1
        target = y
        if is_split:
            size = (splits, len(x), form.rows)
            target = torch.empty(size, dtype=torch.float32, device=x.device)
        _many_rows[grid](
            x, *tensors, target, x.stride(0), target.stride(-2), target.stride(0), len(x),
            self._columns, form.rows, form.group, self._num_lines,
            triton.cdiv(steps, splits) * tile.lines,
            HAS_BIAS=self._has_bias and not is_split,
            BLOCK_M=tile.x_rows, BLOCK_N=tile.rows, **constants, WIDEN=is_interpreted(),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if is_split:
            _sum_splits[(triton.cdiv(form.rows, 256), len(x))](
                target, tensors[-1], y, y.stride(0), len(x), form.rows, SPLITS=splits,
                HAS_BIAS=self._has_bias, BLOCK=256,
            )  # fmt: skip


def _tile(x_rows: int, rows: int, dtype: torch.dtype) -> Tile:
    if is_interpreted():
        return _INTERPRETED[x_rows > 1]
    if x_rows == 1:
        return next(tile for least, tile in _ONE_ROW if rows >= least)
    return next(tile for most, tile in _ROWS[dtype.itemsize] if x_rows <= most or not most)


def _splits(tile: Tile, rows: int, steps: int) -> int:
    """Return among how many programs the columns are divided, by nothing but W's shape.

    A power of 2, so that few kernels are compiled.
    """
    if tile.x_rows > 16:
        return 1
    wanted = min(_PROGRAMS // -(-rows // tile.rows), steps // _LEAST_STEPS, 16)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _constants(form: Form, tile: Tile) -> dict[str, Any]:
    """Return those of a form, by which kernels differ."""
    return {
        "BITS": form.bits,
        "LINES": tile.lines,
        "PAIRED": form.group > 16,  # pieces have the scales of their neighbours
        "NESTED": form.scales > 2,
        "OFFSETS": (form.offsets > 0) + (form.offsets > 2),
        "HAS_VALUES": form.has_values,
    }


def _tensors(part: Part) -> tuple[torch.Tensor, ...]:
    """Return what kernels take; in the place of what there is not, what no kernel reads."""
    scales = (part.scales, part.outer_scales, part.offsets, part.outer_offsets)
    optional = (part.highs, *scales, part.values)
    return (part.codes, *(part.codes if tensor is None else tensor for tensor in optional))


_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_STORED = {0: "i16", 1: "fp16", 2: "fp32", 3: "i8", 4: "u8"}  # 0: the codes are passed instead
_BLOCKS = {  # bits, group, dtypes of scales and offsets
    "int4": (4, 32, 1, 1),
    "int8": (8, 32, 1, 1),
    "Q4_K": (4, 32, 4, 4),
    "Q6_K": (6, 16, 3, 0),
}
_NUMBERS = ("columns", "rows", "group", "num_lines")


def _form(blocks: str, rows: int) -> Form:
    bits, group, scales, offsets = _BLOCKS[blocks]
    return Form(rows, bits, group, scales, offsets, has_values=False)


def _types(form: Form, dtype: torch.dtype) -> dict[str, str]:
    """Return the types of what all kernels of codes take."""
    names = ("codes", "highs", "outer_scales", "outer_offsets", "values")
    types = dict.fromkeys(names, "*i16") | dict.fromkeys(_NUMBERS, "i32:16")
    types |= {"scales": f"*{_STORED[form.scales]}", "offsets": f"*{_STORED[form.offsets]}"}
    for name, stored in (("outer_scales", form.scales), ("outer_offsets", form.offsets)):
        if stored > 2:
            types[name] = "*fp16"
    return types | {"y": f"*{_TYPES[dtype]}"}


def _product(blocks: str, shape: tuple[int, int], x_rows: int, dtype: torch.dtype) -> Variant:
    form = _form(blocks, shape[0])
    tile = _tile(x_rows, shape[0], dtype)
    types = _types(form, dtype) | {"x": f"*{_TYPES[dtype]}", "bias": f"*{_STORED[form.scales]}"}
    constants = _constants(form, tile) | {"HAS_BIAS": False, "BLOCK_N": tile.rows}
    kernel, name = _one_row, "one_row"
    if x_rows > 1:
        kernel, name = _many_rows, "many_rows"
        lines = shape[1] // (32 if form.bits == 8 else 64)
        if _splits(tile, shape[0], lines // tile.lines) > 1:
            types["y"] = "*fp32"
        numbers = ("x_stride", "y_stride", "split_stride", "x_rows", "split_lines")
        types |= dict.fromkeys(numbers, "i32:16")
        constants |= {"BLOCK_M": tile.x_rows, "WIDEN": False}
    name = f"{name}, {blocks}, {_TYPES[dtype]}, {x_rows} x {shape[0]}x{shape[1]}"
    return Variant(name, kernel, types, constants, tile.warps, tile.stages)


def _gathered(blocks: str) -> Variant:
    form = _form(blocks, 128256)
    types = _types(form, torch.bfloat16) | {"ids": "*i64", "first_row": "i32", "y_stride": "i32:16"}
    name, constants = f"gather, {blocks}, bf16", _constants(form, _GATHERED)
    return Variant(name, _gather, types, constants, _GATHERED.warps, _GATHERED.stages)


_SUMMED = Variant(
    "sum_splits, bf16, of 4",
    _sum_splits,
    {"sums": "*fp32", "bias": "*bf16", "y": "*bf16"}
    | dict.fromkeys(("y_stride", "x_rows", "rows"), "i32:16"),
    {"SPLITS": 4, "HAS_BIAS": False, "BLOCK": 256},
)
VARIANTS = (
    *(
        _product(blocks, (4096, 4096), n, torch.bfloat16)
        for blocks in _BLOCKS
        for n in (1, 16, 512)
    ),
    *(_product(blocks, (14336, 4096), 1, torch.bfloat16) for blocks in _BLOCKS),
    _product("Q4_K", (14336, 4096), 16, torch.bfloat16),
    *(_product("int4", (4096, 4096), n, torch.float32) for n in (1, 16, 512)),
    *(_gathered(blocks) for blocks in ("Q4_K", "Q6_K")),
    _SUMMED,
)
