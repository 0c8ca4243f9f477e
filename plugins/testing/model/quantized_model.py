"""Quantized matrices for models, and the rule for loading them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hardpoint.plugins import Model
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix
from hardpoint.testing.suite import Rule, short_repr

QUANTIZED = Rule(
    "quantized: with quantized matrices, a model computes the same as with their dequantized ones",
    "let quantizable name matrices of weight_shapes, and load_quantized load each instead of "
    "its tensor; layers of hardpoint.toolkit.layers do both",
)

_GROUP = 32


def codes_of(weight: torch.Tensor) -> AffineCodes:
    """Return codes of eight bits that are close to a weight."""
    rows, columns = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -columns % _GROUP)).view(rows, -1, _GROUP)
    scales = groups.abs().amax(2) / 127
    codes = (groups / scales.clamp(min=1e-30).unsqueeze(2)).round().flatten(1)[:, :columns]
    return AffineCodes(codes.to(torch.int8).contiguous(), 8, _GROUP, scales)


@dataclass(frozen=True, eq=False)
class OwnMatrix(QuantizedMatrix):
    """A matrix that multiplies itself."""

    codes: AffineCodes

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape

    @property
    def alignment(self) -> int:
        """Divisor of the columns at which the codes can be cut."""
        return self.codes.alignment

    def rows(self, start: int, stop: int) -> OwnMatrix:
        """Return some rows."""
        return OwnMatrix(self.codes.rows(start, stop))

    def columns(self, start: int, stop: int) -> OwnMatrix:
        """Return some columns."""
        return OwnMatrix(self.codes.columns(start, stop))

    def dequantize(self) -> torch.Tensor:
        """Return the numbers."""
        return self.codes.dequantize()

    def linear(
        self, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the product."""
        weight, added = self.dequantize(), 0 if bias is None else bias.float()
        return lambda x: (x.float() @ weight.T + added).to(out_dtype)


def quantizable_names(model: Model) -> list[str]:
    """Return the names of quantizable matrices.

    Raises:
        Violation: one is not a matrix of the model.
    """
    names = list(model.quantizable())
    shapes = model.weight_shapes()
    for name in names:
        if name not in shapes or len(shapes[name]) != 2:
            described_shape = short_repr(shapes[name]) if name in shapes else "is not there"
            raise QUANTIZED.violation(
                f"quantizable has {short_repr(name)}, which {described_shape} in weight_shapes"
            )
    return names


def quantized_forms(codes: Mapping[str, AffineCodes]) -> dict[str, dict[str, QuantizedMatrix]]:
    """Return matrices by name and by description: codes, others, and some of both."""
    wrapped = {name: OwnMatrix(matrix) for name, matrix in codes.items()}
    mixed = {name: codes[name] if i % 3 else wrapped[name] for i, name in enumerate(codes)}
    return {
        "codes": dict(codes),
        "matrices that multiply themselves": dict(wrapped),
        "some matrices of each kind": {n: m for i, (n, m) in enumerate(mixed.items()) if i % 4},
    }
