"""Quantization schemes, and the weights that checkpoints store for them."""

from .model.matrices import (
    AffineCodes,
    DenseMatrix,
    QuantizedMatrix,
)
from .model.quantization import (
    Quantization,
    QuantizationContext,
    QuantizedWeight,
)

__all__ = [
    "AffineCodes",
    "DenseMatrix",
    "Quantization",
    "QuantizationContext",
    "QuantizedMatrix",
    "QuantizedWeight",
]
