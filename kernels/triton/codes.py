"""Products with matrices of few bits, and their rows.

    codes = unpack(packed)  # [rows, columns]; see packed_codes.py
    W = scale[:, k // group] * value[codes] + offset[:, k // group]  # scale: times an outer one
    y = x @ W.T + bias
    table[ids] = W[ids]

W is rounded to the dtype of x, as tensor cores take it; sums are float32. A single row of x is
multiplied without them, with the same W, so that only the order of its sums is another than among
other rows. If there are few tiles, their columns are divided among programs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .arithmetic import rounded
from .code_tiles import (
    GATHERED,
    LINE,
    Tile,
    code_constants,
    code_tensors,
    factors_of,
    first_columns,
    load_words,
    multiply_tile,
    product_tile,
    splits_of,
    values_of,
)
from .launch import Variant
from .packed_codes import Form, Part, pack, read

__all__ = ["VARIANTS", "gather_codes", "linear_codes", "pack"]


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
        low, high = load_words(codes, highs, n, lines, n_inside, num_lines, BITS)
        for piece in tl.static_range(PIECES):
            first = first_columns(lines, piece, BITS)
            if piece % 2 == 0 or not PAIRED:
                scale, offset = factors_of(
                    scales, outer_scales, offsets, outer_offsets, n, n_inside, first, columns,
                    group, NESTED, OFFSETS,
                )  # fmt: skip
            at = first[None, :, None] + tl.arange(0, 16)[None, None, :]
            part = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
            weight = values_of(low, high, values, piece, BITS, HAS_VALUES) * scale
            if OFFSETS > 0:
                weight += offset
            total += rounded(weight, x.dtype.element_ty).to(tl.float32) * part
    result = tl.sum(tl.sum(total, 2), 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n_inside, other=0).to(tl.float32)
    tl.store(y + n, rounded(result, y.dtype.element_ty), mask=n_inside)


@triton.jit(do_not_specialize=["x_rows", "split_stride"])
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
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    m_inside, n_inside = m < x_rows, n < rows
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    last = tl.minimum((split + 1) * split_lines, num_lines)
    total = multiply_tile(
        x_at, m_inside, codes, highs, scales, outer_scales, offsets, outer_offsets, values,
        n, n_inside, split * split_lines, last, columns, group, num_lines,
        BITS, PAIRED, NESTED, OFFSETS, HAS_VALUES, BLOCK_M, BLOCK_N, LINES,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_inside, other=0).to(tl.float32)[None, :]
    inside = m_inside[:, None] & n_inside[None, :]
    y_at = y + split.to(tl.int64) * split_stride + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(y_at, rounded(total, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_rows"])
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
    tl.store(y + m * y_stride + n, rounded(total, y.dtype.element_ty), mask=inside)


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
    low, high = load_words(codes, highs, n, lines, n_inside, num_lines, BITS)
    for piece in tl.static_range(PIECES):
        first = first_columns(lines, piece, BITS)
        if piece % 2 == 0 or not PAIRED:
            scale, offset = factors_of(
                scales, outer_scales, offsets, outer_offsets, n, n_inside, first, columns, group,
                NESTED, OFFSETS,
            )  # fmt: skip
        weight = values_of(low, high, values, piece, BITS, HAS_VALUES) * scale
        if OFFSETS > 0:
            weight += offset
        at = first[None, :, None] + tl.arange(0, 16)[None, None, :]
        inside = n_inside[:, None, None] & (at < columns)
        tl.store(
            y + index.to(tl.int64) * y_stride + at, rounded(weight, y.dtype.element_ty), mask=inside
        )


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
        out_dtype: dtype of the results.

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
        dtype: dtype of the results.

    Raises:
        ValueError: it is packed from a matrix of another shape, or damaged.
    """
    parts, (_, columns) = read(packed, shape), shape

    def gather(ids: torch.Tensor) -> torch.Tensor:
        y = torch.empty((len(ids), columns), dtype=dtype, device=ids.device)
        ids, first = ids.contiguous(), 0
        for part in parts:
            form, num_lines = part.form, part.codes.shape[1] // LINE
            constants = code_constants(form, GATHERED)
            grid = (len(ids), triton.cdiv(num_lines, GATHERED.lines))
            if len(ids):
                _gather[grid](
                    ids, *code_tensors(part), y, first, columns, columns, form.rows, form.group,
                    num_lines, **constants, num_warps=GATHERED.warps,
                )  # fmt: skip
            first += form.rows
        return y

    return gather


class _Product:
    """Writes x W^T + b, for W of one part."""

    def __init__(self, part: Part, columns: int, bias: torch.Tensor | None) -> None:
        self._form, self._columns = part.form, columns
        self._num_lines = part.codes.shape[1] // LINE
        self._tensors = (*code_tensors(part), part.scales if bias is None else bias)
        self._has_bias = bias is not None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        form = self._form
        tile = product_tile(len(x), form.rows, x.dtype)
        if tile.x_rows == 1:
            _one_row[(triton.cdiv(form.rows, tile.rows),)](
                x, *self._tensors, y, self._columns, form.rows, form.group, self._num_lines,
                HAS_BIAS=self._has_bias, BLOCK_N=tile.rows, **code_constants(form, tile),
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            return
        self._multiply_many(x, y, tile)

    def _multiply_many(self, x: torch.Tensor, y: torch.Tensor, tile: Tile) -> None:
        form, *tensors = self._form, *self._tensors
        constants = code_constants(form, tile)
        steps = triton.cdiv(self._num_lines, tile.lines)
        splits = splits_of(tile, form.rows, steps)
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
            BLOCK_M=tile.x_rows, BLOCK_N=tile.rows, **constants,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if is_split:
            _sum_splits[(triton.cdiv(form.rows, 256), len(x))](
                target, tensors[-1], y, y.stride(0), len(x), form.rows, SPLITS=splits,
                HAS_BIAS=self._has_bias, BLOCK=256,
            )  # fmt: skip


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
    """Return the types of the arguments that all kernels of codes have."""
    names = ("codes", "highs", "outer_scales", "outer_offsets", "values")
    types = dict.fromkeys(names, "*i16") | dict.fromkeys(_NUMBERS, "i32:16")
    types |= {"scales": f"*{_STORED[form.scales]}", "offsets": f"*{_STORED[form.offsets]}"}
    for name, stored in (("outer_scales", form.scales), ("outer_offsets", form.offsets)):
        if stored > 2:
            types[name] = "*fp16"
    return types | {"y": f"*{_TYPES[dtype]}"}


def _product(blocks: str, shape: tuple[int, int], x_rows: int, dtype: torch.dtype) -> Variant:
    form = _form(blocks, shape[0])
    tile = product_tile(x_rows, shape[0], dtype)
    types = _types(form, dtype) | {"x": f"*{_TYPES[dtype]}", "bias": f"*{_STORED[form.scales]}"}
    constants = code_constants(form, tile) | {"HAS_BIAS": False, "BLOCK_N": tile.rows}
    kernel, name = _one_row, "one_row"
    if x_rows > 1:
        kernel, name = _many_rows, "many_rows"
        lines = shape[1] // (32 if form.bits == 8 else 64)
        if splits_of(tile, shape[0], lines // tile.lines) > 1:
            types["y"] = "*fp32"
        types |= dict.fromkeys(("x_stride", "y_stride", "split_lines"), "i32:16")
        types |= dict.fromkeys(("split_stride", "x_rows"), "i32")
        constants |= {"BLOCK_M": tile.x_rows}
    name = f"{name}, {blocks}, {_TYPES[dtype]}, {x_rows} x {shape[0]}x{shape[1]}"
    return Variant(name, kernel, types, constants, tile.warps, tile.stages)


def _gathered(blocks: str) -> Variant:
    form = _form(blocks, 128256)
    types = _types(form, torch.bfloat16) | {"ids": "*i64", "first_row": "i32", "y_stride": "i32:16"}
    name, constants = f"gather, {blocks}, bf16", code_constants(form, GATHERED)
    return Variant(name, _gather, types, constants, GATHERED.warps, GATHERED.stages)


_SUMMED = Variant(
    "sum_splits, bf16, of 4",
    _sum_splits,
    {"sums": "*fp32", "bias": "*bf16", "y": "*bf16"}
    | dict.fromkeys(("y_stride", "rows"), "i32:16")
    | {"x_rows": "i32"},
    {"SPLITS": 4, "HAS_BIAS": False, "BLOCK": 256},
)
VARIANTS = (
    *(
        _product(blocks, (4096, 4096), n, torch.bfloat16)
        for blocks in _BLOCKS
        for n in (1, 16, 64, 128, 512)
    ),
    *(_product(blocks, (14336, 4096), 1, torch.bfloat16) for blocks in _BLOCKS),
    _product("Q4_K", (14336, 4096), 16, torch.bfloat16),
    *(_product("int4", (4096, 4096), n, torch.float32) for n in (1, 16, 64, 512)),
    *(_gathered(blocks) for blocks in ("Q4_K", "Q6_K")),
    _SUMMED,
)
