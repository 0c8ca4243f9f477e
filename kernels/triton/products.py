"""Products of 1 to 16 rows with matrices of numbers.

    y = F.linear(x, W, bias)

They take as long as reading W. A step multiplies some columns of one tile of rows of W. Steps are
listed tile by tile, and each of a fixed number of programs gets as many consecutive ones (stream-K,
arXiv:2301.03598), so that all multiprocessors read until the end, and the next tile's numbers are
loaded while the last one's are multiplied.

A program that has all steps of a tile writes its results. Otherwise each program of the tile writes
its sums to memory, and the last one to arrive adds them up in the order of columns: results do not
depend on which one that is. Sums are float32, and results are rounded once.

A single row is multiplied without tensor cores, so that its sums have another order than those of
the same row among others. Among 2 to 16 rows, a row's result depends on no other row, nor on their
number. The order of sums depends on the shape of W, the dtype, and the number of multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .arithmetic import multiply_add, rounded
from .launch import Variant, is_interpreted

__all__ = ["MAX_ROWS", "VARIANTS", "FewRowProduct"]

MAX_ROWS = 16


class FewRowTile(NamedTuple):
    """Launch parameters.

    Attributes:
        x_rows: number of rows of x, 1 or 16.
        rows, columns: those of W, for a step.
        warps: number of warps of a program.
        stages: steps whose numbers are loaded or multiplied at a time.
        programs: number of programs for each multiprocessor.
    """

    x_rows: int
    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


# By bytes of a number: for one row of x, and for more. Each multiprocessor has 64 to 128 KiB of W
# under way; about 20 KiB are what a memory of 3.35 TB/s needs for its latency.
TILES = {
    2: (FewRowTile(1, 8, 512, 4, 4, 4), FewRowTile(16, 64, 128, 4, 4, 2)),
    4: (FewRowTile(1, 8, 256, 4, 4, 4), FewRowTile(16, 32, 64, 4, 4, 2)),
}
# The interpreter takes as long for a large step as for a small one.
INTERPRETED = (FewRowTile(1, 64, 256, 4, 1, 1), FewRowTile(16, 64, 256, 4, 1, 1))
INTERPRETED_PROCESSORS = 3


@triton.jit
def _store_result(
    total, bias, y, tile, m, x_rows, rows, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the results of a tile, [BLOCK_M, BLOCK_N], with the bias."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < rows, other=0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * rows + n[None, :]
    inside = (m < x_rows)[:, None] & (n < rows)[None, :]
    tl.store(y + at, rounded(total, y.dtype.element_ty), mask=inside)


@triton.jit
def _add_up(
    sums, arrived, bias, y, tile, x_rows, rows, steps, program_steps,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the sums of a tile if this program is the last of its programs to arrive."""
    first = tile * steps // program_steps
    last = ((tile + 1) * steps - 1) // program_steps
    if first != last:
        # All threads have written their sums before one of them counts the program.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == last - first:
            m = tl.arange(0, BLOCK_M)
            at = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for program in range(first, last + 1):
                # Programs have a place for the sums of their first tile, and one for their last's.
                place = 2 * program + (program * program_steps // steps != tile).to(tl.int32)
                total += tl.load(
                    sums + place * (BLOCK_M * BLOCK_N) + at, mask=(m < x_rows)[:, None], other=0,
                    cache_modifier=".cg",
                )  # fmt: skip
            _store_result(total, bias, y, tile, m, x_rows, rows, HAS_BIAS, BLOCK_N)
            tl.store(arrived + tile, 0)  # for the next launch


@triton.jit(do_not_specialize=["x_rows", "steps", "program_steps"])
def _few_rows(
    x, matrix, bias, y, sums, arrived, x_stride, matrix_stride, x_rows, rows, columns, steps,
    program_steps,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute some consecutive steps.

    Args:
        y: [x_rows, rows].
        sums: float32 [programs, 2, BLOCK_M, BLOCK_N]; see `_add_up`.
        arrived: zeros, as they are again afterwards, int32 [tiles].
        steps: number of steps of a tile.
        program_steps: number of steps of a program.
    """
    first = tl.program_id(0) * program_steps
    end = tl.minimum(first + program_steps, tl.cdiv(rows, BLOCK_N) * steps)
    first_tile = first // steps
    m = tl.arange(0, BLOCK_M)
    m_inside = m < x_rows
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_N, BLOCK_K) if BLOCK_M == 1 else (BLOCK_M, BLOCK_N), tl.float32)
    for index in tl.range(first, end, num_stages=STAGES):
        tile = index // steps
        step = index - tile * steps
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        k_inside = k < columns
        weight = tl.load(
            matrix + n.to(tl.int64)[:, None] * matrix_stride + k[None, :],
            mask=(n < rows)[:, None] & k_inside[None, :], other=0,
        )  # fmt: skip
        if BLOCK_M == 1:
            part = tl.load(x + k, mask=k_inside, other=0)
            total += weight.to(tl.float32) * part.to(tl.float32)[None, :]
        else:
            part = tl.load(x_at + k[None, :], mask=m_inside[:, None] & k_inside[None, :], other=0)
            total = multiply_add(part, tl.trans(weight), total)
        is_end = step == steps - 1
        if is_end | (index == end - 1):
            result = tl.sum(total, 1)[None, :] if BLOCK_M == 1 else total
            if is_end & (tile * steps >= first):
                _store_result(result, bias, y, tile, m, x_rows, rows, HAS_BIAS, BLOCK_N)
            else:
                place = 2 * tl.program_id(0) + (tile != first_tile).to(tl.int32)
                at = m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                tl.store(sums + place * (BLOCK_M * BLOCK_N) + at, result, mask=m_inside[:, None])
            total = tl.zeros_like(total)
    last_tile = (end - 1) // steps
    _add_up(
        sums, arrived, bias, y, first_tile, x_rows, rows, steps, program_steps,
        HAS_BIAS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if last_tile != first_tile:
        _add_up(
            sums, arrived, bias, y, last_tile, x_rows, rows, steps, program_steps,
            HAS_BIAS, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@dataclass(frozen=True)
class StepDivision:
    """How steps are divided among programs.

    Attributes:
        tiles: number of tiles of rows of W.
        steps: number of steps of a tile.
        program_steps: number of steps of a program; the last one may have fewer.
        programs: number of programs, each with a step.
    """

    tiles: int
    steps: int
    program_steps: int
    programs: int

    @classmethod
    def of_shape(cls, tile: FewRowTile, shape: tuple[int, int], processors: int) -> StepDivision:
        """Return the division for rows and columns of W, by the number of multiprocessors."""
        tiles, steps = triton.cdiv(shape[0], tile.rows), triton.cdiv(shape[1], tile.columns)
        program_steps = triton.cdiv(tiles * steps, processors * tile.programs)
        return cls(tiles, steps, program_steps, triton.cdiv(tiles * steps, program_steps))


class FewRowProduct:
    """The function x [1 to 16 rows, columns of W] -> x W^T + b, [rows, rows of W].

    It runs on one stream at a time: what its programs count is in a tensor of its own, from one
    launch to the next.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> None:
        """Keep W and b.

        Args:
            weight: W, [rows, columns], neither of them 0; elements of a row are contiguous.
            bias: b, [rows of W].
            out_dtype: dtype of the results.
        """
        self._weight, self._bias, self._out_dtype = weight, bias, out_dtype
        self._tiles = INTERPRETED if is_interpreted() else TILES[weight.element_size()]
        shape, processors = (weight.shape[0], weight.shape[1]), count_processors(weight.device)
        self._divisions = [StepDivision.of_shape(tile, shape, processors) for tile in self._tiles]
        most = max(division.tiles for division in self._divisions)
        self._arrived = torch.zeros(most, dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        weight, is_many = self._weight, len(x) > 1
        tile, division = self._tiles[is_many], self._divisions[is_many]
        rows, columns = weight.shape
        y = torch.empty((len(x), rows), dtype=self._out_dtype, device=x.device)
        size = (division.programs, 2, tile.x_rows, tile.rows)
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
        _few_rows[(division.programs,)](
            x, weight, weight if self._bias is None else self._bias, y, sums, self._arrived,
            x.stride(0) if is_many else columns, weight.stride(0), len(x), rows, columns,
            division.steps, division.program_steps,
            **_constants(tile, has_bias=self._bias is not None),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return y


def _constants(tile: FewRowTile, *, has_bias: bool) -> dict[str, Any]:
    return {
        "HAS_BIAS": has_bias,
        "BLOCK_M": tile.x_rows,
        "BLOCK_N": tile.rows,
        "BLOCK_K": tile.columns,
        "STAGES": tile.stages,
    }


def count_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _variant(x_rows: int, dtype: str, has_bias: bool = False, y: str = "") -> Variant:
    tile = TILES[4 if dtype == "fp32" else 2][x_rows > 1]
    types = dict.fromkeys(("x", "matrix", "bias"), f"*{dtype}") | {"y": f"*{y or dtype}"}
    types |= {"sums": "*fp32", "arrived": "*i32"}
    types |= dict.fromkeys(("x_stride", "matrix_stride", "rows", "columns"), "i32:16")
    types |= dict.fromkeys(("x_rows", "steps", "program_steps"), "i32")
    name = f"{'one row' if x_rows == 1 else 'up to 16 rows'}, {dtype}{', bias' * has_bias}"
    name += f", results {y}" if y else ""
    return Variant(
        name, _few_rows, types, _constants(tile, has_bias=has_bias), tile.warps, tile.stages
    )


VARIANTS = tuple(
    _variant(x_rows, *form)
    for x_rows in (1, MAX_ROWS)
    for form in (("bf16",), ("bf16", True), ("bf16", False, "fp32"), ("fp16",), ("fp32",))
)
