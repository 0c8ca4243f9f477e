"""The conformance suite for quantization schemes; the built-in ones pass it too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.plugins import HardpointError, Quantization, QuantizationContext
from hardpoint.plugins.component import Component
from hardpoint.plugins.parallel import Communicator
from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix, QuantizedWeight
from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.engine_access import load_ops
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Rule, Violation, checks, short_repr

from .quantization_rules import (
    ALIGNMENT,
    BYTES,
    CODES,
    DAMAGE,
    DEQUANTIZE,
    DETERMINISTIC,
    ERROR,
    FINITE,
    LAYERS,
    LINEAR,
    PART_OF_WEIGHT,
    PARTS,
    READ,
    RESULT,
    ROWS,
    UNCHANGED,
    QuantizedSample,
    check_alignment,
    check_joined,
    check_message,
    check_part,
    check_refused,
    check_result,
    checked,
    damages,
    described,
    num_bytes,
)
from .quantized_layers import PRODUCT, Way, Weight, build_layers, load_layers
from .rank_threads import run_ranks

_ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.004}
_ESTIMATE = 0.1  # of the bytes of a matrix, by which stored_bytes may be wrong


class QuantizationSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `quantization`, and `max_error` or `samples`.

    Attributes:
        quantization: the class under test.
        max_error: error of `quantize` for normal numbers: the norm of the difference, relative to
            the weight's. None for a scheme that only reads.
        config: the `quantization_config` of a checkpoint.
        shapes: shapes of weights. Two ranks have to be able to cut the columns of one of them.
        dtypes: dtypes of hidden states.
        batch_invariant: whether rows of the matrices' own products are compared bit for bit alone
            and among others; otherwise within the tolerance.
        tolerance: maximum difference of products and of what was read, relative to the largest
            value; None depends on the dtype.
    """

    kind = "quantizations"
    num_uses = 200
    quantization: ClassVar[type[Quantization]]
    max_error: ClassVar[float | None] = None
    config: ClassVar[Mapping[str, Any]] = {}
    shapes: ClassVar[Sequence[tuple[int, int]]] = ((1, 256), (19, 512), (8, 1024))
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    batch_invariant: ClassVar[bool] = False
    tolerance: ClassVar[float | None] = None

    def samples(self) -> Sequence[QuantizedSample]:
        """Return matrices that checkpoints store, for a scheme that reads them."""
        return ()

    def _component(self) -> type[Component]:
        return self.quantization

    def _check_construction(self) -> None:
        super()._check_construction()
        if self.max_error is None and not self.samples():
            raise Violation(
                f"{type(self).__name__} has neither max_error nor samples",
                "set max_error if the scheme quantizes; return samples if it reads",
            )

    def test_quantize(self) -> None:
        """A matrix of the weight's shape, within `max_error`, and the same each time; the weight
        stays as it is.
        """
        self._check_made(RESULT, self._check_quantize)

    def test_extremes(self) -> None:
        """Zeros, huge, tiny and single large numbers give finite ones, or a `ValueError` that
        reports why.
        """
        self._check_made(FINITE, self._check_extremes)

    def test_read(self) -> None:
        """Samples have the numbers that they stand for, and stay as they are."""
        self._check_samples(READ, self._check_read)

    def test_damage(self) -> None:
        """Samples that lack a tensor, a row or a column of it, or have it in another dtype, are a
        `ValueError` that names the tensor; so are the variants of the sample.
        """
        self._check_samples(DAMAGE, self._check_damage)

    def test_parts(self) -> None:
        """`rows`, `columns` and `joined` equal the same operations on the whole; cuts off
        `alignment` raise a `ValueError`.
        """
        self._check_matrices(PARTS, self._check_parts)

    def test_alignment(self) -> None:
        """A matrix can be cut as the scheme's `alignment` promises before it is made or read."""

        def check_made(weight: torch.Tensor) -> None:
            scheme, (rows, columns) = self._make(), weight.shape
            check_alignment(scheme.alignment((rows, columns)), self._quantized(weight, scheme))

        def check_read(stored: QuantizedWeight) -> None:
            tensors = {name: tensor.to("meta") for name, tensor in stored.tensors.items()}
            scheme = self._make()
            alignment = scheme.alignment(stored.shape, replace(stored, tensors=tensors))
            check_alignment(alignment, self._read(stored, scheme))

        made = [] if self.max_error is None else self._weights()
        checks = [functools.partial(check_made, weight) for weight in made]
        checks += [functools.partial(check_read, sample.stored) for sample in self.samples()]
        self._run_checks(ALIGNMENT.text, *checks)

    def test_parts_of_weights(self) -> None:
        """The matrix of a part of a weight is that part of the whole weight's matrix."""
        self._check_made(PART_OF_WEIGHT, self._check_parts_of_weight)

    def test_dequantize(self) -> None:
        """float32, in memory of its own; `is_finite` is right, and codes have no more bits than
        stated.
        """
        self._check_matrices(DEQUANTIZE, self._check_dequantize)

    def test_linear(self) -> None:
        """The matrix's own product, if it has one, equals the product of the dequantized matrix,
        with bias, other dtypes of results, and rows of wider tensors; its rows are contiguous.
        """
        self._check_matrices(LINEAR, self._check_linear)

    def test_stored_bytes(self) -> None:
        """The bytes of matrices, if the scheme reports them."""
        self._check_matrices(BYTES, self._check_bytes)

    @checks(LAYERS)
    def test_layers(self) -> None:
        """Embeddings, fused products, products cut by columns and tied heads, with each dtype, in
        one rank and in two, and from packed weights.
        """
        divided = 0
        if self.max_error is not None:
            for weight in self._weights():
                if len(weight) < 2:  # one for each rank
                    continue
                numbers = self._quantized(weight).dequantize()
                divided += self._compare_layers(weight, numbers)
        for sample in self.samples():
            stored = replace(sample.stored, scheme=self._name())
            numbers = self._read(stored).dequantize()
            divided += self._compare_layers(stored, numbers)
        if not divided:
            raise Violation(
                "two ranks can divide the columns of no matrix of the suite",
                "add a shape or a sample with twice the columns of `alignment`",
            )

    def _check_made(self, rule: Rule, check: Callable[[Quantization, torch.Tensor], None]) -> None:
        if self.max_error is None:
            pytest.skip("max_error is None: the scheme only reads")

        def run(weight: torch.Tensor) -> None:
            check(self._make(), weight)

        checks = [functools.partial(run, weight) for weight in self._weights()]
        self._run_checks(rule.text, *checks)

    def _check_samples(
        self, rule: Rule, check: Callable[[Quantization, QuantizedSample], None]
    ) -> None:
        samples = self.samples()
        if not samples:
            pytest.skip("there are no samples: the scheme only quantizes")

        def run(sample: QuantizedSample) -> None:
            check(self._make(), sample)

        checks = [functools.partial(run, sample) for sample in samples]
        self._run_checks(rule.text, *checks)

    def _check_matrices(self, rule: Rule, check: Callable[[QuantizedMatrix], None]) -> None:
        def run(make: Callable[[], QuantizedMatrix]) -> None:
            check(make())

        made: list[Callable[[], QuantizedMatrix]] = []
        if self.max_error is not None:
            made += [functools.partial(self._quantized, weight) for weight in self._weights()]
        made += [functools.partial(self._read, sample.stored) for sample in self.samples()]
        self._run_checks(rule.text, *(functools.partial(run, make) for make in made))

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        scheme, weight, samples = self._make(), self._weights()[0], self.samples()

        def use(number: int) -> None:
            if self.max_error is not None:
                self._quantized(weight, scheme).dequantize()
            if samples:
                self._read(samples[number % len(samples)].stored, scheme).dequantize()

        yield InUse(scheme, use)

    def _make(self, dtype: torch.dtype | None = None) -> Quantization:
        scheme: Quantization = self._build(
            QuantizationContext,
            device=torch.device("cpu"),
            dtype=dtype or self.dtypes[0],
            config=self.config,
        )
        return scheme

    def _weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator) / 8 for shape in self.shapes]

    def _quantized(
        self, weight: torch.Tensor, scheme: Quantization | None = None
    ) -> QuantizedMatrix:
        matrix = (scheme or self._make()).quantize(weight)
        return checked(matrix, "quantize", weight.shape)

    def _read(self, stored: QuantizedWeight, scheme: Quantization | None = None) -> QuantizedMatrix:
        return checked((scheme or self._make()).read(stored), "read", stored.shape)

    def _check_quantize(self, scheme: Quantization, weight: torch.Tensor) -> None:
        original = weight.clone()
        matrix = self._quantized(weight, scheme)
        if not torch.equal(weight, original):
            raise UNCHANGED.violation("quantize changed the weight")
        numbers = matrix.dequantize()
        for label, other in (("a second call", scheme), ("a new instance", self._make())):
            if not torch.equal(self._quantized(weight, other).dequantize(), numbers):
                raise DETERMINISTIC.violation(f"{label} of quantize gave other numbers")
        assert self.max_error is not None
        error = float((numbers - weight).norm() / weight.norm())
        if not error <= self.max_error:
            raise ERROR.violation(
                f"the weight {list(weight.shape)} is missed by {error:.3g} of its norm, max_error "
                f"is {self.max_error}"
            )

    def _check_extremes(self, scheme: Quantization, weight: torch.Tensor) -> None:
        spread = weight.clone()
        spread[:, ::3] *= 1e6
        single = torch.zeros_like(weight)
        single[0, -1] = -3.0
        kinds = {
            "zeros": torch.zeros_like(weight),
            "numbers up to 1e38": weight / weight.abs().max() * 1e38,
            "numbers below 1e-38": weight / weight.abs().max() * 1e-39,
            "numbers, some of them a million times larger": spread,
            "zeros but for one": single,
            "ones": torch.ones_like(weight),
        }
        for kind, values in kinds.items():
            try:
                numbers = self._quantized(values, scheme).dequantize()
            except ValueError as cause:
                check_message(cause, f"quantize, given {kind},")
                continue
            if not numbers.isfinite().all():
                raise FINITE.violation(
                    f"{kind} gave {int((~numbers.isfinite()).sum())} numbers that are not finite"
                )
            if kind == "zeros" and numbers.any():
                raise ERROR.violation(f"zeros gave {float(numbers.abs().max()):.3g}")

    def _check_read(self, scheme: Quantization, sample: QuantizedSample) -> None:
        stored = sample.stored
        before = snapshot(dict(stored.tensors))
        numbers = self._read(stored, scheme).dequantize()
        if snapshot(dict(stored.tensors)) != before:
            raise UNCHANGED.violation("read changed the stored tensors")
        if not torch.equal(self._read(stored).dequantize(), numbers):
            raise DETERMINISTIC.violation("a new instance read other numbers")
        self._check_close(numbers, sample.weight, READ, "what was read", torch.float32)

    def _check_damage(self, scheme: Quantization, sample: QuantizedSample) -> None:
        cases = {damage: (stored, "") for damage, stored in sample.damaged.items()}
        for damage, (stored, name) in (damages(sample) | cases).items():
            try:
                matrix = scheme.read(stored)
            except ValueError as cause:
                check_message(cause, f"read, with {damage},")
                if name not in str(cause):
                    raise DAMAGE.violation(
                        f"with {damage}, read raised {str(cause)!r}, which does not name it"
                    ) from cause
                continue
            except Exception as cause:
                raise DAMAGE.violation(
                    f"with {damage}, read raised {type(cause).__name__}: {cause}"
                ) from cause
            if not isinstance(matrix, QuantizedMatrix) or matrix.is_finite():
                raise DAMAGE.violation(f"with {damage}, read raised nothing")

    def _check_parts(self, matrix: QuantizedMatrix) -> None:
        numbers, (rows, columns) = matrix.dequantize(), matrix.shape
        unit = matrix.alignment
        if type(unit) is not int or unit < 1:
            raise PARTS.violation(f"alignment is {short_repr(unit)}, expected a whole number >= 1")
        for start, stop in {(0, rows), (0, (rows + 1) // 2), (rows // 2, rows), (rows, rows)}:
            part = matrix.rows(start, stop)
            check_part(part, numbers[start:stop], f"rows {start} to {stop}")
        ends = sorted({*range(0, columns, unit), columns})
        for start, stop in {(0, columns), (0, ends[1]), (ends[-2], columns), (ends[1], ends[-1])}:
            part = matrix.columns(start, stop)
            check_part(part, numbers[:, start:stop], f"columns {start} to {stop}")
            again = part.rows(rows // 2, rows)
            check_part(again, numbers[rows // 2 :, start:stop], "rows of columns")
        check_joined(matrix, numbers)
        for start, stop in ((1, columns), (0, columns - 1), (unit // 2, columns)):
            if start % unit or stop not in ends:
                check_refused(matrix, start, stop)

    def _check_parts_of_weight(self, scheme: Quantization, weight: torch.Tensor) -> None:
        matrix = self._quantized(weight, scheme)
        numbers, (rows, columns) = matrix.dequantize(), matrix.shape
        middle = columns // matrix.alignment // 2 * matrix.alignment
        cuts = {
            "its first rows": (slice(0, (rows + 1) // 2), slice(None)),
            "its first columns": (slice(None), slice(0, middle)),
            "its last columns": (slice(None), slice(middle, columns)),
        }
        for part_name, cut in cuts.items():
            if not weight[cut].numel():
                continue
            part = self._quantized(weight[cut].clone(), scheme).dequantize()
            if not torch.equal(part, numbers[cut]):
                raise PART_OF_WEIGHT.violation(
                    f"of a weight {list(weight.shape)}, {part_name}, quantized alone, differ by "
                    f"{float((part - numbers[cut]).abs().max()):.3g} from the same part of the "
                    "whole"
                )

    def _check_dequantize(self, matrix: QuantizedMatrix) -> None:
        numbers = matrix.dequantize()
        if (
            not isinstance(numbers, torch.Tensor)
            or numbers.dtype != torch.float32
            or tuple(numbers.shape) != tuple(matrix.shape)
            or numbers.device.type != "cpu"
        ):
            raise DEQUANTIZE.violation(
                f"dequantize returned {described(numbers)}, expected torch.float32 "
                f"{list(matrix.shape)}"
            )
        before = numbers.clone()
        numbers += 1
        if not torch.equal(matrix.dequantize(), before):
            raise DEQUANTIZE.violation("writing to the numbers changed the matrix")
        if matrix.is_finite() != bool(before.isfinite().all()):
            raise FINITE.violation(f"is_finite returned {matrix.is_finite()} for its numbers")
        if isinstance(matrix, AffineCodes) and matrix.bits < 8:
            largest = int(matrix.codes.amax())
            if largest >> matrix.bits:
                raise CODES.violation(f"bits is {matrix.bits}, and there is a code {largest}")

    def _check_linear(self, matrix: QuantizedMatrix) -> None:
        rows, columns = matrix.shape
        generator = torch.Generator().manual_seed(3)
        for dtype in self.dtypes:
            bias = torch.randn(rows, generator=generator).to(dtype)
            wide = torch.randn(5, columns + 3, generator=generator).to(dtype)
            x = wide[:, :columns]  # rows of a wider tensor
            expected = x.double() @ matrix.dequantize().double().T
            for row_bias, out_dtype in ((None, dtype), (bias, dtype), (None, torch.float32)):
                multiply = matrix.linear(row_bias, out_dtype)
                if multiply is None:
                    return
                wanted = expected if row_bias is None else expected + row_bias.double()
                self._check_product(multiply, x, wanted, out_dtype)

    def _check_product(
        self,
        multiply: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        expected: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        before = x.clone()
        result = multiply(x)
        check_result(result, x, expected.shape, dtype)
        if not torch.equal(x, before):
            raise UNCHANGED.violation("linear changed x")
        result = result.clone()
        self._check_close(result, expected, LINEAR, "linear", x.dtype)
        for row in range(len(x)):
            row_input = x[row : row + 1]
            alone = multiply(row_input)
            check_result(alone, row_input, expected[row : row + 1].shape, dtype)
            alone = alone[0]
            if self.batch_invariant and not torch.equal(alone, result[row]):
                raise ROWS.violation(
                    f"row {row} of {len(x)} differs from the same row alone by "
                    f"{float((alone - result[row]).abs().max()):.3g}"
                )
            label = f"linear of row {row} alone"
            self._check_close(alone, expected[row], ROWS, label, x.dtype)

    def _check_bytes(self, matrix: QuantizedMatrix) -> None:
        stored = self._make().stored_bytes(matrix.shape)
        if stored is None:
            return
        actual_bytes = num_bytes(matrix)
        if type(stored) is not int or abs(stored - actual_bytes) > _ESTIMATE * actual_bytes:
            raise BYTES.violation(
                f"stored_bytes of {matrix.shape} is {stored}, codes and scales have "
                f"{actual_bytes} bytes"
            )

    def _compare_layers(self, weight: Weight, numbers: torch.Tensor) -> int:
        shape = (numbers.shape[0], numbers.shape[1])
        scheme = self._make()
        reads = isinstance(weight, QuantizedWeight)
        use = "auto" if reads else scheme.name
        divides = not numbers.shape[1] % (2 * self._matrix(weight).alignment)
        for dtype in self.dtypes:
            ops, torch_ops = load_ops(dtype, use="auto"), load_ops(dtype)
            way = Way(use, ops)
            plain = Way("none", torch_ops)
            expected = load_layers(shape, numbers, scheme, plain)[1]
            model, results = load_layers(shape, weight, scheme, way)
            self._check_results(results, expected, dtype, "one rank")
            if (packed := model.packed_weights()) is not None:
                again = build_layers(shape, ops, way.tensor)
                again.load_packed(packed)
                with torch.inference_mode():
                    self._check_results(again.results(), results, dtype, "a model that was kept")
            self._check_ranks(shape, weight, scheme, way, expected if divides else None)
        return divides

    def _check_ranks(
        self,
        shape: tuple[int, int],
        weight: Weight,
        scheme: Quantization,
        way: Way,
        expected: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Check that two ranks give the expected results; None: that they are rejected."""

        def run(tensor: Communicator) -> dict[str, torch.Tensor]:
            return load_layers(shape, weight, scheme, replace(way, tensor=tensor))[1]

        try:
            ranks = run_ranks(2, run)
        except HardpointError as cause:
            if expected is None and "column" in str(cause):
                return
            raise LAYERS.violation(f"two ranks cannot load {list(shape)}: {cause}") from cause
        if expected is None:
            raise PARTS.violation(
                f"two ranks cut a matrix {list(shape)} at column {shape[1] // 2}, which alignment "
                f"does not allow"
            )
        for rank, results in enumerate(ranks):
            parts = [other[PRODUCT] for other in ranks]
            whole = {**results, PRODUCT: torch.cat(parts, 2)}
            self._check_results(whole, expected, way.ops.context.dtype, f"rank {rank} of 2")

    def _check_results(
        self,
        results: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        where: str,
    ) -> None:
        for layer, result in results.items():
            self._check_close(
                result, expected[layer], LAYERS, f"{layer} in {where}, {dtype},", dtype
            )

    def _matrix(self, weight: Weight) -> QuantizedMatrix:
        if isinstance(weight, QuantizedWeight):
            return self._read(weight)
        return self._quantized(weight)

    def _check_close(
        self,
        got: torch.Tensor,
        expected: torch.Tensor,
        rule: Rule,
        label: str,
        dtype: torch.dtype,
    ) -> None:
        if got.shape != expected.shape:
            raise rule.violation(f"{label} has {list(got.shape)}, expected {list(expected.shape)}")
        limit = self.tolerance or _ROUNDED[dtype]
        scale = max(float(expected.abs().max()), 1e-6)
        difference = (got.double() - expected.double()).abs().nan_to_num(math.inf)
        if float(difference.max()) > limit * scale:
            raise rule.violation(
                f"{label} differs by {float(difference.max()):.3g}, the largest number is "
                f"{scale:.3g}"
            )
