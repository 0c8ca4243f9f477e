"""The weighted sum of a few experts per row, which the host never learns: `Ops.experts`.

In torch, for the experts of a row from the lowest to the highest (arXiv:1701.06538):

    gate, up = (x[row] @ gate_up[e].T).chunk(2)
    total += weight * ((F.silu(gate) * up) @ down[e].T).float()
    y[row] = total

Both products may have biases, and the activation may be clamped: gate * sigmoid(alpha * gate) *
(up + 1).

Pairs of a row and an expert are listed by expert, in tiles of which each belongs to one. The grids
are as large as any choice may need, and programs without a tile end at once. Results of pairs are
kept apart and added up in order, so that sums depend on no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .addresses import Addresses
from .arithmetic import multiply_add, rounded
from .launch import Variant, power_of_2
from .layers import sigmoid, silu_times

__all__ = ["VARIANTS", "ExpertSum", "Tiles", "list_tiles", "product_tile", "sum_pairs"]

# Of products, by the bytes of a number, then by the average number of pairs per expert up to which
# they are taken: (average, rows, columns, numbers of a row at a time, warps, stages).
_PRODUCTS = {
    2: ((16, 16, 32, 128, 4, 3), (64, 64, 64, 64, 4, 3), (None, 128, 64, 64, 8, 3)),
    4: ((16, 16, 32, 64, 4, 3), (None, 64, 32, 32, 4, 3)),
}

_GROUP = 8  # tiles that are computed with the same columns before others, which share a cache
_LISTED = (128, 2048)  # pairs that a program lists at a time, if there are so few, and else
_SUMMED = 1024  # columns of a program that adds up pairs
_BUFFER = 1 << 28  # bytes of results of pairs, beyond which columns are computed in parts


@triton.jit(do_not_specialize=["pairs"])
def _list_kernel(
    chosen, order, tiles, pairs, experts, TILE: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List the pairs of one expert, after the pairs of lower experts, and its tiles.

    Args:
        chosen: experts of pairs, int64 [pairs]; numbers but 0 to experts - 1 stand for no expert.
        order: gets the pairs by expert, int32 [pairs].
        tiles: gets expert, first and end in `order` of each tile, int32 [1 + tiles, 3]; their
            number comes first.
    """
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, BLOCK):
        key = tl.load(chosen + start + place, start + place < pairs, -1)
        key = tl.where((key >= 0) & (key < experts), key, experts).to(tl.int32)
        counts += tl.histogram(key, BINS)
    counts = tl.where(bins < experts, counts, 0)
    needed = (counts + (TILE - 1)) // TILE
    first = tl.sum(tl.where(bins < expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, needed, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    if expert == experts - 1:
        tl.store(tiles, tl.sum(needed))
    if count == 0:
        return
    for tile in range(0, (count + (TILE - 1)) // TILE):
        at = tiles + 3 * (1 + first_tile + tile)
        tl.store(at, expert)
        tl.store(at + 1, first + tile * TILE)
        tl.store(at + 2, first + tl.minimum(tile * TILE + TILE, count))
    for start in range(0, pairs, BLOCK):
        key = tl.load(chosen + start + place, start + place < pairs, -1)
        is_mine = (key == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(is_mine, 0) - 1, start + place, is_mine != 0)
        first += tl.sum(is_mine)


@triton.jit
def _place(bound, column_tiles, GROUP: tl.constexpr):
    """Return the tile and the columns of this program: all columns of a few tiles together."""
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    rows = tl.minimum(bound - group * GROUP, GROUP)
    rest = program % (GROUP * column_tiles)
    return group * GROUP + rest % rows, rest // rows


@triton.jit
def clamped_times(gate, up, alpha, limit):
    """Return gate * sigmoid(alpha * gate) * (up + 1) of float32, clamped; a NaN stays one."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * sigmoid(alpha * gate) * (up + 1.0)


@triton.jit(do_not_specialize=["bound", "column_tiles"])
def _enter_kernel(
    x, matrices, biases, order, tiles, out, bound, column_tiles, per_row, hidden, width, x_stride,
    alpha, limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    BIASED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """Compute some columns of silu(gate) * up of a tile's pairs, in their order.

    Args:
        matrices: addresses of [2 * width, hidden] of each expert, int64.
        biases: [experts, 2 * width].
        out: [pairs, width].
    """
    tile, column_tile = _place(bound, column_tiles, GROUP)
    if tile >= tl.load(tiles):
        return
    tiles += 3 * (1 + tile)
    at = tl.load(tiles + 1) + tl.arange(0, ROWS)
    is_row = at < tl.load(tiles + 2)
    row = tl.load(order + at, is_row, 0) // per_row
    expert = tl.load(tiles)
    matrix = tl.load(matrices + expert).to(tl.pointer_type(x.dtype.element_ty))
    matrix = tl.multiple_of(matrix, 16)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    depth = tl.arange(0, DEPTH)
    x += row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    gate_matrix = matrix + column.to(tl.int64)[None, :] * hidden + depth[:, None]
    up_matrix = matrix + (column.to(tl.int64) + width)[None, :] * hidden + depth[:, None]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, DEPTH):
        is_depth = depth < hidden - start
        numbers = tl.load(x + start, is_row[:, None] & is_depth[None, :], 0)
        mask = is_depth[:, None] & is_column[None, :]
        gate = multiply_add(numbers, tl.load(gate_matrix + start, mask, 0), gate)
        up = multiply_add(numbers, tl.load(up_matrix + start, mask, 0), up)
    if BIASED:
        biases += expert.to(tl.int64) * 2 * width + column
        gate += tl.load(biases, is_column, 0).to(tl.float32)[None, :]
        up += tl.load(biases + width, is_column, 0).to(tl.float32)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    gate = rounded(gate, dtype).to(tl.float32)
    up = rounded(up, dtype).to(tl.float32)
    y = clamped_times(gate, up, alpha, limit) if CLAMPED else silu_times(gate, up)
    out += at.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out, rounded(y, dtype), is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["bound", "column_tiles", "first_column"])
def _leave_kernel(
    x, matrices, biases, order, tiles, weights, out, bound, column_tiles, first_column, columns,
    depth_size, bias_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Compute some columns of down x, times the weight, of a tile's pairs.

    Args:
        x: rows of the pairs in their order, [pairs, depth_size].
        matrices: addresses of [columns and others, depth_size] of each expert, int64.
        biases: [experts, bias_size]; those of `columns` and others.
        weights: weights of the pairs, float32.
        out: results of the pairs as they are numbered, float32 [pairs, columns].
        first_column: row of a matrix that the first column of `out` is of.
    """
    tile, column_tile = _place(bound, column_tiles, GROUP)
    if tile >= tl.load(tiles):
        return
    tiles += 3 * (1 + tile)
    at = tl.load(tiles + 1) + tl.arange(0, ROWS)
    is_row = at < tl.load(tiles + 2)
    pair = tl.load(order + at, is_row, 0)
    expert = tl.load(tiles)
    matrix = tl.load(matrices + expert).to(tl.pointer_type(x.dtype.element_ty))
    matrix = tl.multiple_of(matrix, 16)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    depth = tl.arange(0, DEPTH)
    x += at.to(tl.int64)[:, None] * depth_size + depth[None, :]
    matrix += (column.to(tl.int64) + first_column)[None, :] * depth_size + depth[:, None]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth_size, DEPTH):
        is_depth = depth < depth_size - start
        numbers = tl.load(x + start, is_row[:, None] & is_depth[None, :], 0)
        y = multiply_add(
            numbers, tl.load(matrix + start, is_depth[:, None] & is_column[None, :], 0), y
        )
    if BIASED:
        biases += expert.to(tl.int64) * bias_size + first_column + column
        y += tl.load(biases, is_column, 0).to(tl.float32)[None, :]
    y *= tl.load(weights + pair, is_row, 0)[:, None]
    out += pair.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, y, is_row[:, None] & is_column[None, :])


@triton.jit
def _sum_kernel(
    pairs, chosen, y, per_row, experts, columns, y_stride, PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up some columns of the pairs of one row, from the lowest expert to the highest.

    Args:
        pairs: float32 [rows, per_row, columns].
        chosen: int64 [rows, per_row].
        y: rounded to its dtype.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < columns
    place = tl.arange(0, PER_ROW)
    key = tl.load(chosen + row * per_row + place, place < per_row, -1)
    is_here = (key >= 0) & (key < experts)
    key = tl.where(is_here, key, place + experts)  # all different
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    count = tl.sum(is_here.to(tl.int32))
    pairs += row * per_row * columns + column
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(0, count):
        pair = tl.sum(tl.where(rank == number, place, 0)).to(tl.int64)
        total += tl.load(pairs + pair * columns, is_column, 0)
    tl.store(y + row * y_stride + column, rounded(total, y.dtype.element_ty), is_column)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Pairs of a row and an expert, listed by expert, on the device.

    Attributes:
        order: numbers of the pairs (row * experts per row + place), int32 [pairs].
        table: see `_list_kernel`.
        bound: the largest number of tiles that there may be.
    """

    order: torch.Tensor
    table: torch.Tensor
    bound: int


def list_tiles(chosen: torch.Tensor, experts: int, rows: int) -> Tiles:
    """List the pairs of `chosen`, int64 [rows, experts per row], by expert.

    Args:
        chosen: contiguous; numbers but 0 to experts - 1 stand for no expert.
        experts: how many there are.
        rows: number of rows of a tile.
    """
    pairs = chosen.numel()
    bound = min(pairs, pairs // rows + experts)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    table = torch.empty((1 + bound, 3), dtype=torch.int32, device=chosen.device)
    _list_kernel[(experts,)](
        chosen, order, table, pairs, experts, **_list_tile(pairs, experts, rows)
    )
    return Tiles(order, table, bound)


def _list_tile(pairs: int, experts: int, rows: int) -> dict[str, int]:
    few, many = _LISTED
    # One more bin, for pairs without an expert.
    return {"TILE": rows, "BINS": power_of_2(experts + 1), "BLOCK": few if pairs <= few else many}


def product_tile(pairs: int, experts: int, itemsize: int) -> dict[str, int]:
    """Return the launch parameters of products of so many pairs with numbers of `itemsize`."""
    average = pairs // experts
    _, rows, columns, depth, warps, stages = next(
        entry for entry in _PRODUCTS[itemsize] if entry[0] is None or average <= entry[0]
    )
    return {
        "ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "GROUP": _GROUP,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def sum_pairs(pairs: torch.Tensor, chosen: torch.Tensor, experts: int, y: torch.Tensor) -> None:
    """Write the sums of each row's pairs to y, [rows, columns], from the lowest expert on.

    Args:
        pairs: float32 [rows * experts per row, columns]; rows without an expert may hold anything.
        chosen: int64 [rows, experts per row], contiguous.
        experts: how many there are.
        y: rows may be parts of wider ones.
    """
    tile = _sum_tile(chosen.shape[1], y.shape[1])
    _sum_kernel[(len(y), triton.cdiv(y.shape[1], tile["BLOCK"]))](
        pairs, chosen, y, chosen.shape[1], experts, y.shape[1], y.stride(0), **tile
    )


def _sum_tile(per_row: int, columns: int) -> dict[str, int]:
    return {"PER_ROW": power_of_2(per_row), "BLOCK": min(power_of_2(columns), _SUMMED)}


class ExpertSum:
    """The function (x, chosen, weights) -> the weighted sum of experts; see `Ops.experts`."""

    def __init__(
        self,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        shape: tuple[int, int],
        biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
        clamped: tuple[float, float] | None = None,
    ) -> None:
        """Keep the matrices, of one dtype, [2 * width, hidden] and [hidden, width] of each expert.

        Args:
            gate_up, down: as above.
            shape: (hidden, width).
            biases: those of the results of both; None is without.
            clamped: alpha and limit of the activation; None is silu.
        """
        self._shape = shape
        self._biases = None if biases is None else [torch.stack(list(side)) for side in biases]
        self._clamped = clamped
        # The kernels read whole vectors of 16 bytes at the addresses.
        self._gate_up, self._down = (
            Addresses([[_aligned(matrix)] for matrix in side]) for side in (gate_up, down)
        )
        self._count = len(gate_up)

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums, as x."""
        rows, (hidden, width), experts = len(x), self._shape, self._count
        y = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if not rows:
            return y
        chosen, weights = chosen.contiguous(), weights.contiguous()
        pairs = chosen.numel()
        tile = product_tile(pairs, experts, x.element_size())
        tiles = list_tiles(chosen, experts, tile["ROWS"])
        inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
        count = triton.cdiv(width, tile["COLUMNS"])
        into, out_of = self._biases or (x, x)  # which is not read then
        is_biased = self._biases is not None
        _enter_kernel[(tiles.bound * count,)](
            x, self._gate_up.table(), into, tiles.order, tiles.table, inner, tiles.bound, count,
            chosen.shape[1], hidden, width, x.stride(0), *(self._clamped or (0.0, 0.0)), **tile,
            BIASED=is_biased, CLAMPED=self._clamped is not None,
        )  # fmt: skip
        down = self._down.table()
        step = max(_BUFFER // (4 * pairs) // _SUMMED, 1) * _SUMMED
        for start in range(0, hidden, step):
            part = y[:, start : start + step]
            columns = part.shape[1]
            results = torch.empty((pairs, columns), dtype=torch.float32, device=x.device)
            count = triton.cdiv(columns, tile["COLUMNS"])
            _leave_kernel[(tiles.bound * count,)](
                inner, down, out_of, tiles.order, tiles.table, weights, results, tiles.bound,
                count, start, columns, width, hidden, **tile, BIASED=is_biased,
            )  # fmt: skip
            sum_pairs(results, chosen, experts, part)
        return y


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.is_contiguous() and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _product_variants(
    name: str, pairs: int, experts: int, dtype: str = "bf16", *, is_gpt_oss: bool = False
) -> tuple[Variant, ...]:
    """Return variants of both products; gpt-oss has biases and clamping."""
    tile = product_tile(pairs, experts, 4 if dtype == "fp32" else 2)
    constants = {key: value for key, value in tile.items() if not key.startswith("num_")}
    both = {
        "x": f"*{dtype}", "matrices": "*i64", "biases": f"*{dtype}", "order": "*i32",
        "tiles": "*i32", "bound": "i32", "column_tiles": "i32",
    }  # fmt: skip
    enter = {
        "out": f"*{dtype}", "per_row": "i32", "hidden": "i32:16", "width": "i32:16",
        "x_stride": "i32:16", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    leave = {
        "weights": "*fp32", "out": "*fp32", "first_column": "i32", "columns": "i32:16",
        "depth_size": "i32:16", "bias_size": "i32:16",
    }  # fmt: skip
    biased = {"BIASED": is_gpt_oss}
    sides = (
        ("gate_up", _enter_kernel, enter, {**biased, "CLAMPED": is_gpt_oss}),
        ("down", _leave_kernel, leave, biased),
    )
    return tuple(
        Variant(
            f"{side} of experts, {dtype}, {name}", kernel, both | types, constants | further,
            num_warps=tile["num_warps"], num_stages=tile["num_stages"],
        )
        for side, kernel, types, further in sides
    )  # fmt: skip


VARIANTS: tuple[Variant, ...] = (
    *_product_variants("1 row of Qwen3-30B-A3B", 8, 128),
    *_product_variants("1 row", 8, 128, "fp32"),
    *_product_variants("64 rows of Mixtral", 128, 8),
    *_product_variants("512 rows of Qwen3-30B-A3B", 4096, 128),
    *_product_variants("4096 rows of Mixtral", 8192, 8),
    *_product_variants("4096 rows", 8192, 8, "fp32"),
    *_product_variants("64 rows of gpt-oss-20b", 256, 32, is_gpt_oss=True),
    *(
        Variant(
            f"list of {pairs} pairs, {experts} experts",
            _list_kernel,
            {"chosen": "*i64", "order": "*i32", "tiles": "*i32", "pairs": "i32", "experts": "i32"},
            _list_tile(pairs, experts, product_tile(pairs, experts, 2)["ROWS"]),
        )
        for pairs, experts in ((8, 128), (8192, 128), (8192, 8))
    ),
    Variant(
        "sum of 8 experts, bf16, 2048 columns",
        _sum_kernel,
        {
            "pairs": "*fp32", "chosen": "*i64", "y": "*bf16", "per_row": "i32", "experts": "i32:16",
            "columns": "i32:16", "y_stride": "i32:16",
        },
        _sum_tile(8, 2048),
    ),
)  # fmt: skip
