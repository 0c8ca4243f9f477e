"""Adds low-rank adapters to the rows of a product (LoRA, arXiv:2106.09685): `Ops.add_lora`.

In torch, for each row that has one:

    i = adapters[row]
    y[row] += scales[i] * (x[row].float() @ a[i].float().T) @ b[i].float().T

Rows are listed by adapter, in tiles of which each belongs to one. The first product is computed in
parts of its sums, which the second adds up in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arithmetic import multiply_add, rounded
from .experts import list_tiles
from .launch import Variant, power_of_2

__all__ = ["VARIANTS", "add_lora"]

# By the average number of rows per adapter up to which they are taken:
# (average, rows of a tile, parts of the first product's sums).
_TILES = ((16, 16, 8), (None, 64, 2))

_DEPTH = 256  # bytes of a row of x at a time
_SHRINK_RANKS, _EXPAND_RANKS = 64, 32  # at most at a time
_COLUMNS = 64  # of y
_SHRINK = {"num_warps": 4, "num_stages": 3}
_EXPAND = {"num_warps": 4, "num_stages": 2}


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x, a, order, tiles, parts, rows, rank, depth_size, x_stride, a_stride, a_row_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute part of the sums of x a^T, for the rows of a tile, in their order.

    Args:
        a: [adapters, rank, depth_size].
        order, tiles: see `experts.list_tiles`.
        parts: float32 [PARTS, rows, rank].
    """
    tile, part = tl.program_id(0), tl.program_id(2)
    if tile >= tl.load(tiles):
        return
    tiles += 3 * (1 + tile)
    at = tl.load(tiles + 1) + tl.arange(0, ROWS)
    is_row = at < tl.load(tiles + 2)
    row = tl.load(order + at, is_row, 0)
    column = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    is_column = column < rank
    depth = tl.arange(0, DEPTH)
    x += row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    a += tl.load(tiles).to(tl.int64) * a_stride
    a += column.to(tl.int64)[None, :] * a_row_stride + depth[:, None]
    step = tl.cdiv(tl.cdiv(depth_size, DEPTH), PARTS) * DEPTH
    inner = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(part * step, tl.minimum(part * step + step, depth_size), DEPTH):
        is_depth = depth < depth_size - start
        numbers = tl.load(x + start, is_row[:, None] & is_depth[None, :], 0)
        factors = tl.load(a + start, is_depth[:, None] & is_column[None, :], 0)
        inner = multiply_add(numbers, factors, inner)
    parts += (part * rows + at).to(tl.int64)[:, None] * rank + column[None, :]
    tl.store(parts, inner, is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    parts, b, scales, order, tiles, y, rows, rank, columns, b_stride, b_row_stride, y_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add some columns of scale * inner b^T to the rows of a tile, in place.

    Args:
        parts: what `_shrink_kernel` wrote; their sum is inner.
        b: [adapters, columns, rank].
        y: [rows, columns].
    """
    tile = tl.program_id(0)
    if tile >= tl.load(tiles):
        return
    tiles += 3 * (1 + tile)
    adapter = tl.load(tiles).to(tl.int64)
    at = tl.load(tiles + 1) + tl.arange(0, ROWS)
    is_row = at < tl.load(tiles + 2)
    row = tl.load(order + at, is_row, 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    mask = is_row[:, None] & is_column[None, :]
    b += adapter * b_stride + column.to(tl.int64)[None, :] * b_row_stride
    delta = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        place = start + tl.arange(0, RANKS)
        is_place = place < rank
        inner = tl.zeros((ROWS, RANKS), tl.float32)
        for part in tl.static_range(PARTS):
            numbers = parts + (part * rows + at).to(tl.int64)[:, None] * rank + place[None, :]
            inner += tl.load(numbers, is_row[:, None] & is_place[None, :], 0)
        factors = tl.load(b + place[:, None], is_place[:, None] & is_column[None, :], 0)
        delta = multiply_add(inner, factors.to(tl.float32), delta)
    y += row.to(tl.int64)[:, None] * y_stride + column[None, :]
    total = tl.load(y, mask, 0).to(tl.float32) + delta * tl.load(scales + adapter)
    tl.store(y, rounded(total, y.dtype.element_ty), mask)


def _tile(rows: int, adapters: int) -> dict[str, int]:
    average = rows // adapters
    _, count, parts = next(entry for entry in _TILES if entry[0] is None or average <= entry[0])
    return {"ROWS": count, "PARTS": parts}


def _shrink_tile(rows: int, adapters: int, rank: int, itemsize: int) -> dict[str, int]:
    ranks = min(max(power_of_2(rank), 16), _SHRINK_RANKS)
    return _tile(rows, adapters) | {"RANKS": ranks, "DEPTH": _DEPTH // itemsize}


def _expand_tile(rows: int, adapters: int, rank: int) -> dict[str, int]:
    ranks = min(max(power_of_2(rank), 16), _EXPAND_RANKS)
    return _tile(rows, adapters) | {"RANKS": ranks, "COLUMNS": _COLUMNS}


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapters: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Add the products of low-rank adapters to y, in place; see `Ops.add_lora`."""
    (rows, columns), (count, rank, depth) = y.shape, a.shape
    if not (y.numel() and a.numel()):
        return
    shrink = _shrink_tile(rows, count, rank, x.element_size())
    expand = _expand_tile(rows, count, rank)
    tiles = list_tiles(adapters.contiguous(), count, shrink["ROWS"])
    number = shrink["PARTS"]
    parts = torch.empty((number, rows, rank), dtype=torch.float32, device=x.device)
    _shrink_kernel[(tiles.bound, triton.cdiv(rank, shrink["RANKS"]), number)](
        x, a, tiles.order, tiles.table, parts, rows, rank, depth, x.stride(0), a.stride(0),
        a.stride(1), **shrink, **_SHRINK,
    )  # fmt: skip
    _expand_kernel[(tiles.bound, triton.cdiv(columns, expand["COLUMNS"]))](
        parts, b, scales, tiles.order, tiles.table, y, rows, rank, columns, b.stride(0),
        b.stride(1), y.stride(0), **expand, **_EXPAND,
    )  # fmt: skip


def _variants(rows: int, adapters: int, rank: int, dtype: str = "bf16") -> tuple[Variant, ...]:
    """Return variants of both products."""
    shrink = {
        "x": f"*{dtype}", "a": f"*{dtype}", "order": "*i32", "tiles": "*i32", "parts": "*fp32",
        "rows": "i32", "rank": "i32:16", "depth_size": "i32:16", "x_stride": "i32:16",
        "a_stride": "i32:16", "a_row_stride": "i32:16",
    }  # fmt: skip
    expand = {
        "parts": "*fp32", "b": f"*{dtype}", "scales": "*fp32", "order": "*i32", "tiles": "*i32",
        "y": f"*{dtype}", "rows": "i32", "rank": "i32:16", "columns": "i32:16",
        "b_stride": "i32:16", "b_row_stride": "i32:16", "y_stride": "i32:16",
    }  # fmt: skip
    name = f"of LoRA, {dtype}, {rows} rows, {adapters} adapters of rank {rank}"
    itemsize = 4 if dtype == "fp32" else 2
    return (
        Variant(
            f"a {name}", _shrink_kernel, shrink, _shrink_tile(rows, adapters, rank, itemsize),
            **_SHRINK,
        ),
        Variant(f"b {name}", _expand_kernel, expand, _expand_tile(rows, adapters, rank), **_EXPAND),
    )  # fmt: skip


VARIANTS: tuple[Variant, ...] = (
    *_variants(1, 8, 16),
    *_variants(64, 8, 64),
    *_variants(4096, 8, 16),
    *_variants(4096, 8, 64),
    *_variants(4096, 8, 64, "fp32"),
)
