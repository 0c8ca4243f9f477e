"""The rules of quantization schemes, and checks of single matrices."""

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
    "error: dequantized, a matrix is close to the weight that it was made of",
    "quantize to the nearest value; set max_error to the precision of the scheme",
)
CODES = Rule(
    "codes: each code has no more than the stated bits",
    "clamp codes to the range of `bits`: kernels pack them side by side",
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
    "parts: rows and columns equal the whole's, and cuts elsewhere are a ValueError",
    "cut codes and scales alike, at multiples of `alignment` columns",
)
ALIGNMENT = Rule(
    "alignment: the scheme states a matrix's alignment before it is made or read",
    "return the `alignment` of the matrix, or None: other cuts of ranks are rejected early",
)
PART_OF_WEIGHT = Rule(
    "parts of weights: the quantized part of a weight equals the part of the quantized weight",
    "let a scale depend on the weights of its group alone: ranks quantize only their own part",
)
LINEAR = Rule(
    "linear: the matrix's own product equals the dequantized matrix's product",
    "sum in float32 at least, add the bias, round once to out_dtype, and return contiguous rows",
)
ROWS = Rule(
    "rows: a row's result does not depend on the other rows",
    "compute each row with the same sums in the same order, or leave batch_invariant False",
)
READ = Rule(
    "read: a stored matrix has the numbers that were stored",
    "follow the format's definition; QuantizedSample.weight is the dequantized matrix",
)
DAMAGE = Rule(
    "damage: incomplete or infinite data is a ValueError that names the tensor",
    "get tensors by `stored.tensor(name, dtype, shape)`, which checks them",
)
WORDS = Rule(
    "errors: a ValueError has a reason",
    "state the expected and the actual value",
)
UNCHANGED = Rule(
    "unchanged: weights and stored tensors stay as they are",
    "write to new memory: stored tensors may be in a mapped file, which cannot be written to",
)
BYTES = Rule(
    "bytes: stored_bytes is the memory of a matrix",
    "return the bytes of codes and scales, packed; memory estimates use them",
)
LAYERS = Rule(
    "layers: a quantized model computes the same as the dequantized one, in one rank and in two",
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


def check_message(cause: ValueError, call: str) -> None:
    """Check that an error has a message."""
    if len(str(cause).split()) < 3:
        raise WORDS.violation(f"{call} raised {type(cause).__name__}({str(cause)!r})")


def check_part(part: QuantizedMatrix, expected: torch.Tensor, call: str) -> None:
    """Check a part of a matrix."""
    if not isinstance(part, QuantizedMatrix) or tuple(part.shape) != tuple(expected.shape):
        shape = getattr(part, "shape", part)
        raise PARTS.violation(
            f"{call} are {short_repr(shape)}, expected a matrix {tuple(expected.shape)}"
        )
    numbers = part.dequantize()
    if numbers.shape != expected.shape or not torch.equal(numbers, expected):
        raise PARTS.violation(f"{call} have other numbers than the same part of the whole")


def check_refused(matrix: QuantizedMatrix, start: int, stop: int) -> None:
    """Check that columns that cannot be cut are refused."""
    call = f"columns({start}, {stop}) of {matrix.shape[1]} with alignment {matrix.alignment}"
    try:
        matrix.columns(start, stop)
    except ValueError as cause:
        check_message(cause, call)
        return
    except Exception as cause:
        raise PARTS.violation(f"{call} raised {type(cause).__name__}: {cause}") from cause
    raise PARTS.violation(f"{call} raised nothing")


def check_alignment(alignment: Any, matrix: QuantizedMatrix) -> None:
    """Check a scheme's alignment of a matrix: the columns at which it can be cut."""
    if alignment is None:
        return
    if type(alignment) is not int or alignment < 1:
        raise ALIGNMENT.violation(
            f"alignment gave {short_repr(alignment)}, expected a whole number >= 1, or None"
        )
    unit, columns = matrix.alignment, matrix.shape[1]
    call = f"alignment of {tuple(matrix.shape)} is {alignment}, the matrix has {unit}"
    if alignment > unit < columns:
        raise ALIGNMENT.violation(call)
    if alignment < columns:
        try:
            matrix.columns(alignment, columns)
        except ValueError as cause:
            raise ALIGNMENT.violation(f"{call}, which cannot be cut there: {cause}") from cause


def check_joined(matrix: QuantizedMatrix, numbers: torch.Tensor) -> None:
    """Check rows that are joined, which a matrix may refuse."""
    rows = matrix.shape[0]
    ends = [(0, rows // 3), (rows // 2, rows)]
    try:
        joined = matrix.joined([matrix.rows(*bounds) for bounds in ends], 0)
    except ValueError as cause:
        check_message(cause, "joined")
        return
    check_part(joined, torch.cat([numbers[slice(*bounds)] for bounds in ends]), "joined rows")


def check_result(result: Any, x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check the type, shape and dtype of a matrix's own product for x."""
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
    """Return corrupted variants of a stored matrix and the name for the error, by description."""
    variants_by_name, stored = {}, sample.stored
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
        for variant, other in variants.items():
            tensors = {n: t for n, t in stored.tensors.items() if n != name}
            if other is not None:
                tensors[name] = other
            variants_by_name[variant] = replace(stored, tensors=tensors), name
    return variants_by_name


def num_bytes(matrix: QuantizedMatrix) -> int:
    """Return the bytes of a matrix's tensors; codes have `bits` each."""
    tensors = _tensors(matrix)
    if not isinstance(matrix, AffineCodes):
        return sum(tensor.nbytes for tensor in tensors.values())
    codes = tensors.pop("codes")
    tensors.pop("values", None)
    return codes.numel() * matrix.bits // 8 + sum(tensor.nbytes for tensor in tensors.values())


def _tensors(matrix: QuantizedMatrix) -> dict[str, torch.Tensor]:
    attributes: Mapping[str, Any] = vars(matrix) if hasattr(matrix, "__dict__") else {}
    if dataclasses.is_dataclass(matrix):
        attributes = {
            field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)
        }
    return {name: tensor for name, tensor in attributes.items() if isinstance(tensor, torch.Tensor)}


def described(value: object) -> str:
    """Return the text of a method's result."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return short_repr(value)
