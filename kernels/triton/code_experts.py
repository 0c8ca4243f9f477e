"""The weighted sum of a few experts per row, as in experts.py, for matrices of few bits.

    gate, up = (x[row] @ dequantize(gate_up[e]).T).chunk(2)
    total += weight * ((F.silu(gate) * up) @ dequantize(down[e]).T).float()
    y[row] = total

A program multiplies a tile of the pairs of one expert with a tile of its matrix, of which it finds
the parts by their addresses. The experts' matrices have the same forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .addresses import Addresses
from .arithmetic import rounded
from .code_tiles import Tile, code_constants, code_tensors, multiply_tile, product_tile
from .experts import Tiles, list_tiles, sum_pairs
from .launch import Variant
from .packed_codes import Form, Part, read

__all__ = ["VARIANTS", "code_experts"]

_DTYPES = {1: tl.float16, 2: tl.float32, 3: tl.int8, 4: tl.uint8}  # by the numbers of `Form`
_BUFFER = 1 << 28  # bytes of results of pairs, beyond which columns are computed in parts
_SUMMED = 1024  # columns are computed in multiples of it, so that rows of results are aligned


@triton.jit
def _pointer(addresses, index: tl.constexpr, dtype: tl.constexpr):
    """Return one of an expert's addresses as a pointer to elements of a dtype."""
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["first_row", "count"])
def _multiply_kernel(
    x, addresses, biases, order, tiles, weights, y,
    x_stride, y_stride, bias_stride, per_row, first_row, count, columns, group, num_lines,
    SCALE: tl.constexpr, OFFSET: tl.constexpr, IS_LAST: tl.constexpr,
    BITS: tl.constexpr, PAIRED: tl.constexpr, NESTED: tl.constexpr, OFFSETS: tl.constexpr,
    HAS_VALUES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Multiply the pairs of a tile, in their order, with some rows of their expert's part.

    Args:
        x: by rows; where it is the last product, by pairs in their order.
        addresses: addresses of the tensors of each expert's part, int64 [experts, 7].
        biases: [experts, bias_stride], of which the first are those of the columns of y.
        order, tiles: see experts.py.
        weights: weights of the pairs, which multiply the last product, float32.
        y: by pairs in their order; of the last product as they are numbered, float32.
        first_row: row of the part that gives the first column of y.
        count: columns of y.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(tiles):
        return
    tiles += 3 * (1 + tile)
    at = tl.load(tiles + 1) + tl.arange(0, BLOCK_M)
    is_pair = at < tl.load(tiles + 2)
    pair = tl.load(order + at, is_pair, 0)
    expert = tl.load(tiles)
    addresses += expert * 7
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < count
    row = at if IS_LAST else pair // per_row
    total = multiply_tile(
        x + row.to(tl.int64)[:, None] * x_stride, is_pair,
        _pointer(addresses, 0, tl.int16), _pointer(addresses, 1, tl.int16),
        _pointer(addresses, 2, SCALE), _pointer(addresses, 3, tl.float16),
        _pointer(addresses, 4, OFFSET), _pointer(addresses, 5, tl.float16),
        _pointer(addresses, 6, tl.float32),
        first_row + n, n_inside, 0, num_lines, columns, group, num_lines,
        BITS, PAIRED, NESTED, OFFSETS, HAS_VALUES, BLOCK_M, BLOCK_N, LINES,
    )  # fmt: skip
    if BIASED:
        biases += expert.to(tl.int64) * bias_stride + n
        total += tl.load(biases, n_inside, 0).to(tl.float32)[None, :]
    out_row = at
    if IS_LAST:
        out_row = pair
        total *= tl.load(weights + pair, is_pair, 0)[:, None]
    y += out_row.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(y, rounded(total, y.dtype.element_ty), is_pair[:, None] & n_inside[None, :])


def code_experts(
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    shape: tuple[int, int],
    activate: Callable[[torch.Tensor], torch.Tensor],
    biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the function (x, chosen, weights) -> the weighted sum of experts.

    None if the experts' matrices have different forms.

    Args:
        gate_up, down: matrices of each expert, as `pack` of packed_codes.py returned them,
            [2 * width, hidden] and [hidden, width].
        shape: (hidden, width).
        activate: [pairs, 2 * width] -> [pairs, width]; silu(gate) * up, or another.
        biases: those of the results of both; None is without.

    Raises:
        ValueError: one is packed from a matrix of another shape, or damaged.
    """
    hidden, width = shape
    enter = [read(packed, (2 * width, hidden)) for packed in gate_up]
    leave = [read(packed, shape) for packed in down]
    if not (_are_alike(enter) and _are_alike(leave)):
        return None
    into, out_of = biases or (None, None)
    entering, leaving = _Parts(enter, hidden, into), _Parts(leave, width, out_of)

    def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.empty((len(x), hidden), dtype=x.dtype, device=x.device)
        if not len(x):
            return y
        chosen, weights = chosen.contiguous(), weights.contiguous()
        experts, pairs = len(enter), chosen.numel()
        # At least two, as for products of tiles.
        tile = product_tile(max(pairs // experts, 2), 2 * width, x.dtype)
        tiles = list_tiles(chosen, experts, tile.x_rows)
        inner = torch.empty((pairs, 2 * width), dtype=x.dtype, device=x.device)
        entering.multiply(x, inner, tiles, tile, chosen.shape[1], 0)
        inner = activate(inner)
        step = max(_BUFFER // (4 * pairs) // _SUMMED, 1) * _SUMMED
        for start in range(0, hidden, step):
            part = y[:, start : start + step]
            size = (pairs, part.shape[1])
            results = torch.empty(size, dtype=torch.float32, device=x.device)
            leaving.multiply(inner, results, tiles, tile, 1, start, weights)
            sum_pairs(results, chosen, experts, part)
        return y

    return run


def _are_alike(experts: Sequence[Sequence[Part]]) -> bool:
    forms = [[part.form for part in parts] for parts in experts]
    return all(form == forms[0] for form in forms)


class _Parts:
    """The parts of all experts' matrices of one kind."""

    def __init__(
        self,
        experts: Sequence[Sequence[Part]],
        columns: int,
        biases: Sequence[torch.Tensor] | None,
    ) -> None:
        self._columns = columns
        self._biases = None if biases is None else torch.stack(list(biases))
        self._parts = [
            (parts[0], Addresses([code_tensors(part) for part in parts]))
            for parts in zip(*experts, strict=True)
        ]

    def multiply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        tiles: Tiles,
        tile: Tile,
        per_row: int,
        start: int,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Write some columns of x W^T to y, from column `start` on; see `_multiply_kernel`."""
        first, stop = 0, start + y.shape[1]
        for part, addresses in self._parts:
            form, begin = part.form, max(first, start)
            end = min(first + form.rows, stop)
            if begin < end:
                out = y[:, begin - start : end - start]
                factors = tiles.order if weights is None else weights  # the first are not read
                biases = x if self._biases is None else self._biases[:, begin:]  # x is not read
                _multiply_kernel[(tiles.bound, triton.cdiv(end - begin, tile.rows))](
                    x, addresses.table(), biases, tiles.order, tiles.table, factors, out,
                    x.stride(0), out.stride(0), biases.stride(0), per_row, begin - first,
                    end - begin, self._columns, form.group, part.codes.shape[1] // 16,
                    **_constants(form, tile, is_last=weights is not None),
                    BIASED=self._biases is not None,
                    num_warps=tile.warps, num_stages=tile.stages,
                )  # fmt: skip
            first += form.rows


def _constants(form: Form, tile: Tile, *, is_last: bool) -> dict[str, Any]:
    scale = _DTYPES[form.scales]
    return code_constants(form, tile) | {
        "SCALE": scale, "OFFSET": _DTYPES.get(form.offsets, tl.int16), "IS_LAST": is_last,
        "BLOCK_M": tile.x_rows, "BLOCK_N": tile.rows,
    }  # fmt: skip


def _variant(*, is_last: bool) -> Variant:
    """Return how products of Q4_K are compiled, for few pairs of each expert."""
    form = Form(1536, 4, 32, 4, 4, has_values=False)
    tile = product_tile(2, form.rows, torch.bfloat16)
    types = {
        "x": "*bf16", "addresses": "*i64", "biases": "*bf16", "order": "*i32", "tiles": "*i32",
        "weights": "*fp32" if is_last else "*i32", "y": "*fp32" if is_last else "*bf16",
        "first_row": "i32", "count": "i32", "per_row": "i32",
    }  # fmt: skip
    numbers = ("x_stride", "y_stride", "bias_stride", "columns", "group", "num_lines")
    types |= dict.fromkeys(numbers, "i32:16")
    name = f"code_experts, Q4_K, bf16, {'down' if is_last else 'gate_up'} of 128 x 768"
    constants = _constants(form, tile, is_last=is_last) | {"BIASED": False}
    return Variant(name, _multiply_kernel, types, constants, tile.warps, tile.stages)


VARIANTS = (_variant(is_last=False), _variant(is_last=True))
