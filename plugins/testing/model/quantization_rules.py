"""The rules of quantisation schemes, and what checks single matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hardpoint.plugins.quantization import AffineCodes, QuantizedMatrix, QuantizedWeight
from hardpoint.testing.suite import Rule, short_repr

RESULT = Rule(
    "result: quantize and read return a QuantizedMatrix of the weight's shape",
    "return AffineCodes, or a class of your own that derives from QuantizedMatrix",
)
DETERMINISTIC = Rule(
    "deterministic: the same weight gives the same matrix, in a new instance too",
    "compute codes and scales from the weight alone",
)
ERROR = Rule(
    "error: dequantised, a matrix is close to the weight that it was made of",
    "quantise to the nearest value; set max_error to what the scheme can hold",
)
CODES = Rule(
    "codes: each code has no more than the stated bits",
    "clamp codes to what `bits` can hold: kernels pack them side by side",
)
FINITE = Rule(
    "finite: a finite weight gives finite numbers, or a ValueError",
    "keep scales in a dtype that holds the largest weight, and divide by no scale that is 0",
)
DEQUANTIZE = Rule(
    "dequantize: float32 numbers [rows, columns] on the CPU, in memory of their own",
    "return a new float32 tensor in each call",
)
PARTS = Rule(
    "parts: rows and columns are those of the whole, and cuts elsewhere are a ValueError",
    "cut codes and scales alike; `alignment` says at which columns",
)
ALIGNMENT = Rule(
    "alignment: the scheme says of a matrix, before it is made or read, where it can be cut",
    "return what `alignment` of the matrix is, or None: ranks that cut elsewhere are refused early",
)
PART_OF_WEIGHT = Rule(
    "parts of weights: what is made of some rows and columns is that part of the whole's matrix",
    "let a scale depend on the weights of its group alone: ranks quantise only what they have",
)
LINEAR = Rule(
    "linear: the matrix's own product is that of the dequantised matrix",
    "sum in float32 at least, add the bias, round once to out_dtype, and return contiguous rows",
)
ROWS = Rule(
    "rows: a row's result does not depend on the other rows",
    "compute each row with the same sums in the same order, or leave batch_invariant False",
)
READ = Rule(
    "read: a stored matrix has the numbers that were stored",
    "follow the format's definition; QuantizedSample.weight is what it stands for",
)
DAMAGE = Rule(
    "damage: what is not whole or not finite is a ValueError that names the tensor",
    "get tensors by `stored.tensor(name, dtype, shape)`, which checks them",
)
WORDS = Rule(
    "errors: a ValueError says what is wrong",
    "say what was expected, and what there is",
)
UNCHANGED = Rule(
    "unchanged: weights and stored tensors stay as they are",
    "write to new memory: stored tensors may be in a mapped file, which cannot be written to",
)
BYTES = Rule(
    "bytes: stored_bytes says what a matrix takes",
    "return the bytes of codes and scales, packed; it is what memory estimates are made of",
)
LAYERS = Rule(
    "layers: a model of few bits computes what the dequantised one does, in one rank and in two",
    "let rows, columns, dequantize and linear agree with each other",
)


@dataclass(frozen=True, eq=False)
class QuantizedSample:
    """A matrix as checkpoints store it.

    Attributes:
        stored: what a loader yields.
        weight: float32, the numbers that it stands for.
        damaged: variants that have to be refused, by what is wrong with them. The suite itself
            tries those without one of the tensors, and with one of another shape or dtype.
        optional: names of tensors that may be missing.
    """

    stored: QuantizedWeight
    weight: torch.Tensor
    damaged: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    optional: tuple[str, ...] = ()


def checked(matrix: Any, method: str, shape: Sequence[int]) -> QuantizedMatrix:
    """Return the result of quantize or read, which has to be a matrix of a shape."""
    if not isinstance(matrix, QuantizedMatrix):
        raise RESULT.violation(f"{method} returned {described(matrix)}")
    if tuple(matrix.shape) != tuple(shape):
        raise RESULT.violation(
            f"{method} returned a matrix {short_repr(matrix.shape)}, expected {tuple(shape)}"
        )
    return matrix


def check_message(cause: ValueError, what: str) -> None:
    """Check that an error has a message."""
    if len(str(cause).split()) < 3:
        raise WORDS.violation(f"{what} raised {type(cause).__name__}({str(cause)!r})")


def check_part(part: QuantizedMatrix, expected: torch.Tensor, what: str) -> None:
    """Check a part of a matrix."""
    if not isinstance(part, QuantizedMatrix) or tuple(part.shape) != tuple(expected.shape):
        found = getattr(part, "shape", part)
        raise PARTS.violation(
            f"{what} are {short_repr(found)}, expected a matrix {tuple(expected.shape)}"
        )
    numbers = part.dequantize()
    if numbers.shape != expected.shape or not torch.equal(numbers, expected):
        raise PARTS.violation(f"{what} have other numbers than the same part of the whole")


def check_refused(matrix: QuantizedMatrix, start: int, stop: int) -> None:
    """Check that columns that cannot be cut are refused."""
    what = f"columns({start}, {stop}) of {matrix.shape[1]} with alignment {matrix.alignment}"
    try:
        matrix.columns(start, stop)
    except ValueError as cause:
        check_message(cause, what)
        return
    except Exception as cause:
        raise PARTS.violation(f"{what} raised {type(cause).__name__}: {cause}") from cause
    raise PARTS.violation(f"{what} raised nothing")


def check_alignment(alignment: Any, matrix: QuantizedMatrix) -> None:
    """Check a scheme's alignment of a matrix: the columns at which it can be cut."""
    if alignment is None:
        return
    if type(alignment) is not int or alignment < 1:
        raise ALIGNMENT.violation(
            f"alignment gave {short_repr(alignment)}, expected a whole number >= 1, or None"
        )
    unit, columns = matrix.alignment, matrix.shape[1]
    what = f"alignment of {tuple(matrix.shape)} is {alignment}, that of the matrix {unit}"
    if alignment > unit < columns:
        raise ALIGNMENT.violation(what)
    if alignment < columns:
        try:
            matrix.columns(alignment, columns)
        except ValueError as cause:
            raise ALIGNMENT.violation(f"{what}, which cannot be cut there: {cause}") from cause


def check_joined(matrix: QuantizedMatrix, numbers: torch.Tensor) -> None:
    """Check rows that are joined, which a matrix may refuse."""
    rows = matrix.shape[0]
    ends = [(0, rows // 3), (rows // 2, rows)]
    try:
        found = matrix.joined([matrix.rows(*bounds) for bounds in ends], 0)
    except ValueError as cause:
        check_message(cause, "joined")
        return
    check_part(found, torch.cat([numbers[slice(*bounds)] for bounds in ends]), "joined rows")


def check_result(result: Any, x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check what a matrix's own product returned for x, but for its numbers."""
    if (
        not isinstance(result, torch.Tensor)
        or result.dtype != dtype
        or tuple(result.shape) != tuple(shape)
        or result.device != x.device
    ):
        raise LINEAR.violation(
            f"linear returned {described(result)} for x {list(x.shape)}, expected {dtype} "
            f"{list(shape)}"
        )
    if result.stride(1) != 1 and shape[1] > 1:
        raise LINEAR.violation(
            f"linear returned strides {result.stride()} for x {list(x.shape)}, expected numbers of "
            f"a row one after the other"
        )


def damages(sample: QuantizedSample) -> dict[str, tuple[QuantizedWeight, str]]:
    """Return variants of a stored matrix, and what an error has to name, by description."""
    found, stored = {}, sample.stored
    for name, tensor in stored.tensors.items():
        variants: dict[str, torch.Tensor | None] = {}
        if name not in sample.optional:
            variants[f"{name} missing"] = None
        if tensor.dim():
            variants[f"a row of {name} missing"] = tensor[:-1].clone()
        if tensor.dim() > 1:
            variants[f"a column of {name} missing"] = tensor[:, :-1].clone()
        wrong = torch.float64 if tensor.dtype != torch.float64 else torch.int64
        variants[f"{name} in {wrong}"] = tensor.to(wrong)
        for what, other in variants.items():
            tensors = {n: t for n, t in stored.tensors.items() if n != name}
            if other is not None:
                tensors[name] = other
            found[what] = replace(stored, tensors=tensors), name
    return found


def num_bytes(matrix: QuantizedMatrix) -> int:
    """Return the bytes of a matrix's tensors; codes have `bits` each."""
    tensors = _tensors(matrix)
    if not isinstance(matrix, AffineCodes):
        return sum(tensor.nbytes for tensor in tensors.values())
    codes = tensors.pop("codes")
    tensors.pop("values", None)
    return codes.numel() * matrix.bits // 8 + sum(tensor.nbytes for tensor in tensors.values())


def _tensors(matrix: QuantizedMatrix) -> dict[str, torch.Tensor]:
    given: Mapping[str, Any] = vars(matrix) if hasattr(matrix, "__dict__") else {}
    if dataclasses.is_dataclass(matrix):
        given = {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}
    return {name: tensor for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}


def described(value: object) -> str:
    """Return text for what a method returned."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return short_repr(value)
