"""Calls of quantization schemes and of their matrices, with checked results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from hardpoint.errors import PluginFaultError
from hardpoint.host.registry.blame import raise_unless_fault
from hardpoint.host.system.memory import is_out_of_memory
from hardpoint.plugins import HardpointError, ModelError
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.behaviour import Returned
from hardpoint.plugins.model.quantization import COLUMNS, MATRIX
from hardpoint.plugins.quantization import AffineCodes, Quantization, QuantizedMatrix

from .checked_model import wrong_result
from .guard import PASSING, Boundary

T = TypeVar("T")


@dataclass(frozen=True)
class SchemeCalls:
    """Calls a scheme and its matrices for one weight; errors name the scheme.

    Attributes:
        name: name of the weight.
        checkpoint: as configured, for messages.
        component: the scheme.
        source: source of the scheme.
    """

    name: str
    checkpoint: str
    component: Quantization
    source: Source

    @functools.cached_property
    def _boundary(self) -> Boundary:
        return Boundary.naming("quantizations", self.source)

    def call(
        self,
        method: str,
        function: Callable[[], T],
        *,
        returned: Returned | None = None,
        refuses: bool = True,
    ) -> T:
        """Return the checked result of a method of the scheme or of its matrices.

        Args:
            refuses: whether a ValueError means that the weight is wrong.

        Raises:
            ModelError: the weight is wrong.
            PluginFaultError: the method raised something else, or returned it.
        """
        try:
            value = function()
            if returned is not None:
                returned.check(value, (), ())
            return value
        except BaseException as cause:
            if is_out_of_memory(cause):
                raise
            if refuses and isinstance(cause, ValueError) and not isinstance(cause, HardpointError):
                raise_unless_fault(cause)
                raise self._wrong(str(cause)) from cause
            self._boundary.end(f"{method}()", cause, PASSING, f"for {self.name!r}")

    def matrix(
        self, method: str, function: Callable[[], QuantizedMatrix], shape: tuple[int, ...]
    ) -> QuantizedMatrix:
        """Return the matrix of a shape that a method gives."""
        matrix = self.call(method, function, returned=MATRIX)
        if self.call("shape", lambda: tuple(matrix.shape)) != shape:
            raise self.fault(method, matrix.shape, f"a matrix of shape {shape}")
        return matrix

    def check_numbers(self, method: str, matrix: QuantizedMatrix) -> None:
        """Check that the numbers of a matrix are finite, and that its codes fit their bits."""
        if isinstance(matrix, AffineCodes) and matrix.bits < 8 and matrix.codes.numel():
            largest, limit = int(matrix.codes.max()), (1 << matrix.bits) - 1
            if largest > limit:
                expected = f"codes of {matrix.bits} bits, at most {limit}"
                raise self.fault(method, largest, expected)
        if not self.call("is_finite", matrix.is_finite):
            raise self._wrong("a scale or offset is not finite")

    def unit(self, matrix: QuantizedMatrix) -> int:
        """Return the multiple of columns at which a matrix can be cut."""
        unit = self.call("alignment", lambda: matrix.alignment, returned=COLUMNS)
        if unit is None:
            raise self.fault("alignment", unit, COLUMNS.text)
        return unit

    def numbers(self, matrix: QuantizedMatrix) -> torch.Tensor:
        """Return the numbers of a matrix."""
        tensor = self.call("dequantize", matrix.dequantize)
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype != torch.float32
            or tensor.shape != matrix.shape
        ):
            raise self.fault("dequantize", tensor, f"torch.float32 {list(matrix.shape)}")
        return tensor

    def fault(self, method: str, got: object, expected: str) -> PluginFaultError:
        """Return the error of a method that gave something else than it should."""
        return wrong_result(self.source, method, got, f"{expected}, for {self.name!r}")

    def _wrong(self, problem: str) -> ModelError:
        return ModelError(
            f"model: weight {self.name!r} of {self.checkpoint!r}: {self.component.name}: {problem}"
        )


class CheckedMatrix(QuantizedMatrix):
    """A matrix of a scheme's own class, with checked numbers and products."""

    def __init__(self, matrix: QuantizedMatrix, calls: SchemeCalls) -> None:
        self._matrix, self._calls = matrix, calls

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._matrix.shape

    @property
    def alignment(self) -> int:
        """Columns per unit; the matrix can be cut between units."""
        return self._matrix.alignment

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Return some rows."""
        shape = (stop - start, self.shape[1])
        part = self._calls.matrix("rows", lambda: self._matrix.rows(start, stop), shape)
        return CheckedMatrix(part, self._calls)

    def columns(self, start: int, stop: int) -> QuantizedMatrix:
        """Return some columns."""
        shape = (self.shape[0], stop - start)
        part = self._calls.matrix("columns", lambda: self._matrix.columns(start, stop), shape)
        return CheckedMatrix(part, self._calls)

    def dequantize(self) -> torch.Tensor:
        """Return W in float32."""
        return self._calls.numbers(self._matrix)

    def linear(
        self, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the scheme's function, checked; None if it has none."""
        calls, count = self._calls, self.shape[0]
        linear = functools.partial(self._matrix.linear, bias, out_dtype)
        product = calls.call("linear", linear, refuses=False)
        if product is None:
            return None
        if not callable(product):
            raise calls.fault("linear", product, "a function, or None")

        def multiply(x: torch.Tensor) -> torch.Tensor:
            y = calls.call("linear", functools.partial(product, x), refuses=False)
            if (
                not isinstance(y, torch.Tensor)
                or y.shape != (len(x), count)
                or y.dtype != out_dtype
                or y.device != x.device
                or y.layout is not torch.strided
            ):
                expected = f"{out_dtype} {[len(x), count]} on {x.device}"
                raise calls.fault("linear", y, expected)
            return y.contiguous()

        return multiply
