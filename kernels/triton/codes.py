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
        num_bytes: of a row's codes, for a step of its loop.
        warps, stages: as for the launch.
    """

    x_rows: int
    rows: int
    num_bytes: int
    warps: int
    stages: int


# For one row of x, by the least number of rows of W: few rows leave few programs to read it.
_ONE_ROW = (
    (8192, Tile(1, 8, 512, 4, 2)),
    (2048, Tile(1, 4, 1024, 4, 2)),
    (0, Tile(1, 2, 1024, 4, 2)),
)
# By the largest number of rows of x, in 2 bytes and in 4.
_ROWS = {
    2: ((16, Tile(16, 32, 64, 4, 3)), (64, Tile(64, 64, 64, 4, 3)), (0, Tile(128, 64, 32, 8, 3))),
    4: ((16, Tile(16, 32, 64, 4, 2)), (0, Tile(64, 64, 32, 4, 2))),
}
# The interpreter takes as long for a large step as for a small one.
_INTERPRETED = (Tile(1, 64, 256, 4, 1), Tile(16, 64, 256, 4, 1))
_GATHERED = Tile(1, 1, 512, 4, 1)
_PROGRAMS = 512  # that keep a GPU's memory busy
_LEAST_STEPS = 4  # of a program's loop, if columns are divided
_CHUNK = 64


@triton.jit
def _first_columns(units, HALF: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the first columns of units of bytes, whose lower (0) or upper (1) bits are used."""
    at = units * UNIT
    if BITS == 8:
        return at
    return at // 32 * 64 + at % 32 + 32 * HALF


@triton.jit
def _load_bytes(
    codes, highs, n, units, n_inside, row_bytes, BITS: tl.constexpr, UNIT: tl.constexpr
):
    """Return bytes [n, units, UNIT], and what has their fifth and sixth bits at the bottom."""
    inside = n_inside[:, None, None] & (units * UNIT < row_bytes)[None, :, None]
    at = (units * UNIT)[None, :, None] + tl.arange(0, UNIT)[None, None, :]
    rows = n.to(tl.int64)[:, None, None]
    low = tl.load(codes + rows * row_bytes + at, mask=inside, other=0)
    if BITS == 5 or BITS == 6:
        WIDTH: tl.constexpr = 8 * (BITS - 4)  # bytes of 64 columns
        place = at % 32
        high_at = at // 32 * WIDTH + place % WIDTH
        high = tl.load(highs + rows * (row_bytes // 32 * WIDTH) + high_at, mask=inside, other=0)
        high = high.to(tl.int32) >> (place // WIDTH * (2 * (BITS - 4)))
    else:
        high = low
    return low, high


@triton.jit
def _values_of(low, high, values, HALF: tl.constexpr, BITS: tl.constexpr, HAS_VALUES: tl.constexpr):
    """Return what the codes in the lower (0) or upper (1) bits of bytes stand for, float32."""
    if BITS == 8:
        codes = low
    else:
        codes = (low >> (4 * HALF)) & 15
        if BITS > 4:
            MORE: tl.constexpr = BITS - 4
            codes = codes.to(tl.int32) | (((high >> (MORE * HALF)) & ((1 << MORE) - 1)) << 4)
    if HAS_VALUES:
        return tl.load(values + codes.to(tl.int32))
    return codes.to(tl.float32)


@triton.jit
def _factors_of(factors, outer, n, n_inside, columns_at, columns, group, NESTED: tl.constexpr):
    """Return scales or offsets [n, units], float32; 0 beyond the columns."""
    inside = n_inside[:, None] & (columns_at < columns)[None, :]
    rows = n.to(tl.int64)[:, None]
    per_row = (columns + group - 1) // group
    at = rows * per_row + (columns_at // group)[None, :]
    result = tl.load(factors + at, mask=inside, other=0).to(tl.float32)
    if NESTED:
        outer_at = rows * ((columns + 255) // 256) + (columns_at // 256)[None, :]
        result *= tl.load(outer + outer_at, mask=inside, other=0).to(tl.float32)
    return result


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
    row_bytes,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    NESTED: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < rows
    total = tl.zeros((BLOCK_N, UNITS), tl.float32)
    for start in range(0, row_bytes // UNIT, UNITS):
        units = start + tl.arange(0, UNITS)
        low, high = _load_bytes(codes, highs, n, units, n_inside, row_bytes, BITS, UNIT)
        for half in tl.static_range(HALVES):
            first = _first_columns(units, half, BITS, UNIT)
            at = first[None, :, None] + tl.arange(0, UNIT)[None, None, :]
            part = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
            scale = _factors_of(scales, outer_scales, n, n_inside, first, columns, group, NESTED)
            code = _values_of(low, high, values, half, BITS, HAS_VALUES)
            total += tl.sum(code * part, 2) * scale
            if OFFSETS > 0:
                offset = _factors_of(
                    offsets, outer_offsets, n, n_inside, first, columns, group, OFFSETS == 2
                )
                total += tl.sum(part, 2) * offset
    result = tl.sum(total, 1)
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
    row_bytes,
    split_units,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    NESTED: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    m_inside, n_inside = m < x_rows, n < rows
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    last = tl.minimum((split + 1) * split_units, row_bytes // UNIT)
    for start in range(split * split_units, last, UNITS):
        units = start + tl.arange(0, UNITS)
        low, high = _load_bytes(codes, highs, n, units, n_inside, row_bytes, BITS, UNIT)
        for half in tl.static_range(HALVES):
            first = _first_columns(units, half, BITS, UNIT)
            scale = _factors_of(scales, outer_scales, n, n_inside, first, columns, group, NESTED)
            weight = _values_of(low, high, values, half, BITS, HAS_VALUES) * scale[:, :, None]
            if OFFSETS > 0:
                offset = _factors_of(
                    offsets, outer_offsets, n, n_inside, first, columns, group, OFFSETS == 2
                )
                weight += offset[:, :, None]
            place = tl.arange(0, UNITS * UNIT)
            at = _first_columns(start + place // UNIT, half, BITS, UNIT) + place % UNIT
            inside = m_inside[:, None] & (at < columns)[None, :]
            part = tl.load(x_at + at[None, :], mask=inside, other=0)
            if WIDEN:  # the interpreter cannot multiply bfloat16, and cuts it in place of rounding
                part = part.to(tl.float32)
            matrix = tl.reshape(weight.to(part.dtype), (BLOCK_N, UNITS * UNIT))
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
    row_bytes,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    NESTED: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    UNITS: tl.constexpr,
):
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    index = tl.program_id(0)
    n = tl.load(ids + index) - first_row + tl.zeros((1,), tl.int64)
    n_inside = (n >= 0) & (n < rows)  # others are rows of other parts
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    low, high = _load_bytes(codes, highs, n, units, n_inside, row_bytes, BITS, UNIT)
    for half in tl.static_range(HALVES):
        first = _first_columns(units, half, BITS, UNIT)
        scale = _factors_of(scales, outer_scales, n, n_inside, first, columns, group, NESTED)
        weight = _values_of(low, high, values, half, BITS, HAS_VALUES) * scale[:, :, None]
        if OFFSETS > 0:
            offset = _factors_of(
                offsets, outer_offsets, n, n_inside, first, columns, group, OFFSETS == 2
            )
            weight += offset[:, :, None]
        at = first[None, :, None] + tl.arange(0, UNIT)[None, None, :]
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
            form, row_bytes = part.form, part.codes.shape[1]
            constants = _constants(form, _GATHERED)
            grid = (len(ids), triton.cdiv(row_bytes, _GATHERED.num_bytes))
            if len(ids):
                _gather[grid](
                    ids, *_tensors(part), y, first, columns, columns, form.rows, form.group,
                    row_bytes, **constants, num_warps=_GATHERED.warps,
                )  # fmt: skip
            first += form.rows
        return y

    return gather


class _Product:
    """Writes x W^T + b, for W of one part."""

    def __init__(self, part: Part, columns: int, bias: torch.Tensor | None) -> None:
        self._form, self._columns = part.form, columns
        self._row_bytes = part.codes.shape[1]
        self._tensors = (*_tensors(part), part.scales if bias is None else bias)
        self._has_bias = bias is not None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        form = self._form
        tile = _tile(len(x), form.rows, x.dtype)
        if tile.x_rows == 1:
            _one_row[(triton.cdiv(form.rows, tile.rows),)](
                x, *self._tensors, y, self._columns, form.rows, form.group, self._row_bytes,
                HAS_BIAS=self._has_bias, BLOCK_N=tile.rows, **_constants(form, tile),
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            return
        self._multiply_many(x, y, tile)

    def _multiply_many(self, x: torch.Tensor, y: torch.Tensor, tile: Tile) -> None:
        form, *tensors = self._form, *self._tensors
        constants = _constants(form, tile)
        steps = triton.cdiv(self._row_bytes, tile.num_bytes)
        splits = _splits(tile, form.rows, steps)
        grid = (triton.cdiv(len(x), tile.x_rows), triton.cdiv(form.rows, tile.rows), splits)
        is_split = splits > 1
        target = y
        if is_split:
            size = (splits, len(x), form.rows)
            target = torch.empty(size, dtype=torch.float32, device=x.device)
        _many_rows[grid](
            x, *tensors, target, x.stride(0), target.stride(-2), target.stride(0), len(x),
            self._columns, form.rows, form.group, self._row_bytes,
            triton.cdiv(steps, splits) * constants["UNITS"],
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
    unit = 16 if form.group == 16 else 32
    return {
        "BITS": form.bits,
        "UNIT": unit,
        "UNITS": tile.num_bytes // unit,
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
_SCALES = {1: "fp16", 2: "fp32", 3: "i8", 4: "u8"}
_BLOCKS = {
    "int4, groups of 32": (4, 32, 1, 1),
    "int4, groups of 128": (4, 128, 1, 1),
    "int8": (8, 32, 1, 1),
    "Q4_K": (4, 32, 4, 4),
    "Q6_K": (6, 16, 3, 0),
}


def _variant(blocks: str, shape: tuple[int, int], x_rows: int, dtype: torch.dtype) -> Variant:
    """Return how a product is compiled."""
    bits, group, scales, offsets = _BLOCKS[blocks]
    form = Form(shape[0], bits, group, scales, offsets, has_values=False)
    tile = _tile(x_rows, shape[0], dtype)
    name = f"{'one_row' if x_rows == 1 else 'many_rows'}, {blocks}, {_TYPES[dtype]}, {x_rows} x "
    types = _code_types(form) | {
        "x": f"*{_TYPES[dtype]}", "bias": f"*{_SCALES[scales]}", "y": f"*{_TYPES[dtype]}",
        "columns": "i32:16", "rows": "i32:16", "group": "i32:16", "row_bytes": "i32:16",
    }  # fmt: skip
    constants = _constants(form, tile) | {"HAS_BIAS": False, "BLOCK_N": tile.rows}
    kernel = _one_row
    if x_rows > 1:
        kernel = _many_rows
        steps = triton.cdiv(shape[1] * min(bits, 8) // 8, tile.num_bytes)
        if _splits(tile, shape[0], steps) > 1:
            types["y"] = "*fp32"
        numbers = ("x_stride", "y_stride", "split_stride", "x_rows", "split_units")
        types |= dict.fromkeys(numbers, "i32:16")
        constants |= {"BLOCK_M": tile.x_rows, "WIDEN": False}
    return Variant(
        name + f"{shape[0]}x{shape[1]}", kernel, types, constants, tile.warps, tile.stages
    )


def _code_types(form: Form) -> dict[str, str]:
    """Return the types of what `_tensors` returns."""
    codes = "*i8" if form.bits == 8 else "*u8"
    scales, offsets = f"*{_SCALES[form.scales]}", f"*{_SCALES.get(form.offsets, codes[1:])}"
    return {
        "codes": codes,
        "highs": codes,
        "scales": scales,
        "outer_scales": "*fp16" if form.scales > 2 else codes,
        "offsets": offsets,
        "outer_offsets": "*fp16" if form.offsets > 2 else codes,
        "values": codes,
    }


_SHAPES = ((4096, 4096), (14336, 4096))
VARIANTS = tuple(
    _variant(blocks, shape, x_rows, torch.bfloat16)
    for blocks in _BLOCKS
    for shape in _SHAPES
    for x_rows in (1, 16, 512)
) + tuple(_variant("int4, groups of 32", _SHAPES[0], rows, torch.float32) for rows in (1, 16, 512))
