"""Weights of eight or four bits, scaled by groups of columns, made from any checkpoint."""

from __future__ import annotations

import itertools
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from hardpoint import plugins
from hardpoint.plugins import Quantization, QuantizationContext
from hardpoint.plugins.quantization import AffineCodes, QuantizedWeight

GroupSize = Annotated[int, Meta(ge=32, multiple_of=32, le=1 << 20)]

_CHUNK = 1 << 18
"""Weights that are quantized at a time, so that they stay in the processor's cache."""
_SMALLEST, _LARGEST = 2.0**-18, 65504.0
"""Scales that float16 holds with six bits or more."""
_TOO_LARGE = 1e38
"""Twice this is still a number."""
_TINY = 2.0**-120
"""Groups with all weights below this are zeros: dividing by them would overflow."""
_STEPS = (14.3, 15.0, 15.7, 16.6, 18.0)
"""Steps between the smallest and the largest weight of a group that are tried; 15 are the codes."""
_CUT = (0.0, 0.5, 1.0)
"""Which part of the steps above 15 is cut off at the lower end, the rest at the upper one."""

Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes [groups, columns], scales and offsets [groups, 1]."""


class _Groups(Quantization):
    """Base class: rows are divided into groups of columns; the last group may be shorter."""

    contract = 1
    bits: ClassVar[int]

    class Options(plugins.Options):
        """The groups.

        Attributes:
            group_size: columns that share a scale and an offset.
        """

        group_size: GroupSize = 32

    options: Options

    def __init__(self, context: QuantizationContext) -> None:
        super().__init__(context)
        self.group_size = self.options.group_size

    def quantize(self, weight: torch.Tensor) -> AffineCodes:
        """Return codes with a scale and an offset per group.

        Groups are quantized alone, so that parts of a weight give parts of the result.

        Raises:
            ValueError: the weight has no columns, or numbers that are too large.
        """
        rows, columns = weight.shape
        if not columns:
            raise ValueError(f"expected a weight with at least 1 column, got {[rows, columns]}")
        if rows and max(map(abs, map(float, weight.aminmax()))) > _TOO_LARGE:
            raise ValueError(f"it has numbers above {_TOO_LARGE}, which are too large")
        step = max(1, _CHUNK // columns)
        starts = range(0, max(rows, 1), step)
        parts = [self._rows(weight[start : start + step]) for start in starts]
        codes, scales, offsets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        # A group's numbers do not depend on the dtype, which other groups decide.
        dtype = torch.float16 if _fits(scales) and _fits(offsets) else torch.float32
        return AffineCodes(
            codes,
            self.bits,
            self.group_size,
            scales.to(dtype),
            offsets.to(dtype),
        )

    def alignment(self, shape: tuple[int, int], stored: QuantizedWeight | None = None) -> int:  # noqa: ARG002
        """Return the size of the groups."""
        return self.group_size

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of codes, and of scales and offsets in float16."""
        rows, columns = shape
        return rows * (-(-columns * self.bits // 8) + 4 * -(-columns // self.group_size))

    def _rows(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes [rows, columns], scales and offsets [rows, groups] of some rows."""
        rows, columns = weight.shape
        whole = columns // self.group_size * self.group_size
        parts = []
        short = columns - whole
        for part, width in ((weight[:, :whole], self.group_size), (weight[:, whole:], short)):
            if count := part.shape[1] // max(width, 1):
                quantized = self.quantize_groups(part.reshape(rows * count, width))
                parts.append(
                    [tensor.reshape(rows, count * tensor.shape[1]) for tensor in quantized]
                )
        codes, scales, offsets = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        return codes, scales, offsets

    def quantize_groups(self, weight: torch.Tensor) -> Groups:
        """Return codes, scales and offsets of groups [groups, columns]."""
        raise NotImplementedError


class Int8(_Groups):
    """8-bit codes with a scale and an offset per group: 255 steps from minimum to maximum."""

    contract = 1
    bits = 8

    def quantize_groups(self, weight: torch.Tensor) -> Groups:
        """Return codes from -128, the smallest weight of a group, to 127, the largest one."""
        low, high = weight.aminmax(dim=1, keepdim=True)
        scale = high / 255 - low / 255
        scale, offset = _stored(scale, low / 2 + high / 2 + scale / 2)
        return _codes(weight, scale, offset, -128, 127).to(torch.int8), scale, offset


class Int4(_Groups):
    """4-bit codes with a scale and an offset per group.

    For each group, several ranges of codes are tried, with the scale and the offset of least
    squares. The range with the smallest squared error is used, as in llama.cpp.
    """

    contract = 1
    bits = 4

    def quantize_groups(self, weight: torch.Tensor) -> Groups:
        """Return codes from 0 to 15."""
        low, high = weight.aminmax(dim=1, keepdim=True)
        size = torch.maximum(high.abs(), low.abs())
        divisor = size.masked_fill(size < _TINY, torch.inf)
        low, high = low / divisor, high / divisor  # so that no difference overflows
        width = high - low
        unit = weight.div(divisor).sub_(low).div_(width.masked_fill(width == 0, torch.inf))
        scale, offset = _least_squares(unit)  # of numbers from 0 to 1
        scale, offset = scale * width * size, (offset * width + low) * size
        scale, offset = _stored(scale, offset)
        return _codes(weight, scale, offset, 0, 15).to(torch.uint8), scale, offset


def _least_squares(unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets [groups, 1] of numbers from 0 to 1, [groups, columns]."""
    count = unit.shape[1]
    mean = unit.mean(1, keepdim=True)
    centred = unit - mean
    total = _dot(centred, centred)
    scale, offset = torch.zeros_like(mean), mean.clone()
    best = total.clone()  # of the mean alone
    codes = torch.empty_like(unit)
    for steps, part in itertools.product(_STEPS, _CUT):
        torch.mul(unit, steps, out=codes)
        codes.sub_((steps - 15) * part).round_().clamp_(0, 15)
        middle = codes.mean(1, keepdim=True)
        spread = _dot(codes, codes) - count * middle * middle
        slope = _dot(codes, centred) / spread.clamp_min(1e-6)
        error = total - slope * slope * spread
        is_better = error < best
        best = torch.where(is_better, error, best)
        scale = torch.where(is_better, slope, scale)
        offset = torch.where(is_better, mean - slope * middle, offset)
    return scale, offset


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sums of products over each row, [rows, 1]."""
    return (a * b).sum(1, keepdim=True)


def _half(numbers: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers that float16 holds, as float32."""
    return numbers.half().float()


def _codes(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, lowest: int, highest: int
) -> torch.Tensor:
    codes = torch.sub(weight, offset).div_(scale.masked_fill(scale == 0, torch.inf))
    return codes.round_().clamp_(lowest, highest)


def _stored(scale: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets rounded to float16, unless a group does not fit float16."""
    scale = scale.masked_fill(scale < _TINY, 0)
    fits = (scale >= _SMALLEST) & (scale <= _LARGEST) & (offset.abs() <= _LARGEST)
    is_constant = (scale == 0) & (offset.abs() >= _SMALLEST) & (offset.abs() <= _LARGEST)
    fits |= is_constant
    return torch.where(fits, _half(scale), scale), torch.where(fits, _half(offset), offset)


def _fits(numbers: torch.Tensor) -> bool:
    """Return whether float16 holds all numbers."""
    return bool((_half(numbers) == numbers).all())
