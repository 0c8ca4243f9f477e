"""Quantization schemes, and the weights that checkpoints store for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import fitting, returns

from .matrices import QuantizedMatrix, QuantizedWeight

if TYPE_CHECKING:
    import torch

__all__ = ["Quantization", "QuantizationContext", "QuantizedWeight"]


@dataclass(frozen=True, kw_only=True)
class QuantizationContext(Context["Quantization"]):
    """Context of a quantization scheme.

    Attributes:
        device: device of the model.
        dtype: dtype of hidden states.
        config: the checkpoint's own description of how it is quantized, `quantization_config` of a
            Hugging Face config; empty if it has none, or if it names another scheme.
    """

    device: torch.device
    dtype: torch.dtype
    config: Mapping[str, Any] = field(default_factory=dict)


MATRIX = fitting("a QuantizedMatrix", lambda value: isinstance(value, QuantizedMatrix))
COLUMNS = fitting(
    "a whole number >= 1",
    lambda value: value is None or (type(value) is int and value >= 1),
)
STORED = fitting(
    "a number of bytes, or None",
    lambda value: value is None or (type(value) is int and value >= 0),
)


class Quantization(Component):
    """A quantization scheme: quantizes matrices, or reads the quantized matrices of checkpoints.

    A class overrides `quantize`, `read` or both. A constructor raises ModelError if the
    checkpoint's `config` has something that the scheme does not know. It is closed once the
    weights are loaded, and its matrices are used after that.
    """

    own_linear: ClassVar[bool] = False
    """Whether its matrices are no `AffineCodes` and multiply themselves (`QuantizedMatrix.linear`).

    Estimates of memory then count embeddings and experts in the model's dtype, as they are
    dequantized, and the others by `stored_bytes` with all operations.
    """

    context: QuantizationContext

    @property
    def quantizes(self) -> bool:
        """Whether it makes matrices from numbers: by default whether it overrides `quantize`."""
        return type(self).quantize is not Quantization.quantize

    @returns(MATRIX, raises=(NotImplementedError, ValueError))
    def quantize(self, weight: torch.Tensor) -> QuantizedMatrix:
        """Return a quantized matrix that is close to a weight.

        A part of a weight that is cut where `columns` of the result can be cut gives that part of
        the result.

        Args:
            weight: float32 [rows, columns], finite, on the CPU.

        Raises:
            NotImplementedError: the scheme reads checkpoints only, which is the default.
            ValueError: the weight cannot be quantized.
        """
        raise NotImplementedError(f"{self.name!r} does not quantize weights, it reads them")

    def check(self, stored: QuantizedWeight) -> None:
        """Check the names, dtypes and shapes of a stored matrix.

        Called before any weight is read, if the loader reports the formats in the files
        (`WeightLoader.formats`). The default checks nothing.

        Args:
            stored: its tensors are on torch's device "meta", where they have no content.

        Raises:
            ValueError: a tensor is missing, or its dtype or shape is wrong.
        """

    @returns(MATRIX, raises=(NotImplementedError, ValueError))
    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return the matrix that a checkpoint stores, of the shape `stored.shape`.

        Args:
            stored: on the CPU; its tensors may be in memory that cannot be written to.

        Raises:
            NotImplementedError: no checkpoint stores the scheme, which is the default.
            ValueError: a tensor is missing, or its shape or content is wrong.
        """
        raise NotImplementedError(f"{self.name!r} reads no checkpoints, it quantizes weights")

    @returns(COLUMNS)
    def alignment(
        self,
        shape: tuple[int, int],  # noqa: ARG002
        stored: QuantizedWeight | None = None,  # noqa: ARG002
    ) -> int | None:
        """Return at which multiples of columns a matrix can be cut, before it is made or read.

        With it, ranks with columns that are not whole groups are rejected before weights are read.
        None, the default: only the matrix itself shows it.

        Args:
            shape: shape of the whole matrix.
            stored: tensors in a checkpoint, on torch's device "meta", if its loader reports them;
                None for a matrix that `quantize` makes.
        """
        return None

    @returns(STORED)
    def stored_bytes(self, shape: tuple[int, int]) -> int | None:  # noqa: ARG002
        """Return how many bytes a matrix of a shape takes in memory, for estimates.

        None, the default: as many as in the model's dtype. A number is of `AffineCodes`, or of
        matrices of a scheme with `own_linear`.
        """
        return None
