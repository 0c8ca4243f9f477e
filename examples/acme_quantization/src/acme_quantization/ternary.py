"""Weights of -1, 0 and 1 times a scale, in two bits (BitNet b1.58, arXiv:2402.17764)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hardpoint.plugins import Quantization
from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight

GROUP = 64
"""Columns that share a scale."""
_ROWS = 256
"""Rows that are unpacked at a time."""
_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class TernaryMatrix(QuantizedMatrix):
    """Codes 0, 1 and 2, less 1, times the scale of their group.

    Attributes:
        packed: uint8 [rows, groups * 16], four codes in a byte, the first one in its lowest bits.
        scales: float32 [rows, groups].
        num_columns: number of columns of W; the last group may have fewer.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.packed), self.num_columns

    @property
    def alignment(self) -> int:
        """A group."""
        return GROUP

    def rows(self, start: int, stop: int) -> TernaryMatrix:
        """Return some rows."""
        return replace(self, packed=self.packed[start:stop], scales=self.scales[start:stop])

    def columns(self, start: int, stop: int) -> TernaryMatrix:
        """Return some groups."""
        if start % GROUP or (stop % GROUP and stop != self.num_columns):
            raise ValueError(
                f"columns {start} to {stop} of {self.num_columns} are no groups of {GROUP}"
            )
        first, end = start // GROUP, -(-stop // GROUP)
        per = GROUP // 4
        packed, scales = self.packed[:, first * per : end * per], self.scales[:, first:end]
        return TernaryMatrix(packed, scales, stop - start)

    def dequantize(self) -> torch.Tensor:
        """Return W in float32."""
        signs = ((self.packed.unsqueeze(2) >> _SHIFTS) & 3).flatten(1).float() - 1
        groups = signs.view(*self.scales.shape, GROUP)
        weight: torch.Tensor = groups * self.scales.unsqueeze(2)
        return weight.flatten(1)[:, : self.num_columns]

    def is_finite(self) -> bool:
        """Return whether all scales are finite."""
        return bool(self.scales.isfinite().all())

    def linear(
        self, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return x -> x W^T + b, which unpacks some rows of W at a time."""
        parts = [self.rows(at, at + _ROWS) for at in range(0, len(self.packed), _ROWS)]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            y = torch.cat([wide @ part.dequantize().T for part in parts], 1)
            return (y if bias is None else y + bias.float()).to(out_dtype)

        return multiply


class Ternary(Quantization):
    """Two bits per weight, and a scale for each group of columns."""

    contract = 1
    own_linear = True

    def quantize(self, weight: torch.Tensor) -> TernaryMatrix:
        """Return the signs of weights that are larger than half of the mean."""
        rows, columns = weight.shape
        groups = torch.nn.functional.pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
        counts = (torch.arange(groups.shape[1]) * GROUP).sub(columns).neg().clamp(max=GROUP)
        means = groups.abs().sum(2) / counts
        signs = torch.where(groups.abs() * 2 > means.unsqueeze(2), groups.sign(), 0)
        # The scale that gives the smallest error is the mean of what is not zero.
        scales = (groups * signs).sum(2) / signs.abs().sum(2).clamp(min=1)
        codes = (signs + 1).to(torch.uint8).view(rows, -1, 4)
        packed = (codes << _SHIFTS).sum(2, dtype=torch.uint8)
        return TernaryMatrix(packed, scales, columns)

    def alignment(self, shape: tuple[int, int], stored: QuantizedWeight | None = None) -> int:  # noqa: ARG002
        """Return the size of the groups."""
        return GROUP

    def check(self, stored: QuantizedWeight) -> None:
        """Check dtypes and shapes, before weights are read if the loader knows them."""
        self._tensors(stored)

    def read(self, stored: QuantizedWeight) -> TernaryMatrix:
        """Return the stored form of a checkpoint: the tensors "packed" and "scales"."""
        packed, scales = self._tensors(stored)
        if bool((packed & (packed >> 1) & 0b01010101).any()):
            raise ValueError("'packed': expected codes from 0 to 2, got 3")
        return TernaryMatrix(packed, scales, stored.shape[1])

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of signs and scales."""
        rows, columns = shape
        return rows * -(-columns // GROUP) * (GROUP // 4 + 4)

    def _tensors(self, stored: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = stored.shape
        groups = -(-columns // GROUP)
        packed = stored.tensor("packed", torch.uint8, (rows, groups * GROUP // 4))
        return packed, stored.tensor("scales", torch.float32, (rows, groups))
