"""Quantized matrices, which models load instead of tensors: cut, joined and dequantized."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .cuts import join

if TYPE_CHECKING:
    import torch

__all__ = ["AffineCodes", "DenseMatrix", "QuantizedMatrix", "QuantizedWeight"]

_AT_ONCE = 1 << 16


class QuantizedMatrix(ABC):
    """A quantized matrix W [rows, columns], which models load instead of a tensor."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def alignment(self) -> int:
        """Divisor of the columns at which the matrix can be cut."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Return the rows from `start` up to `stop`."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> QuantizedMatrix:
        """Return the columns from `start` up to `stop`.

        Raises:
            ValueError: they are stored together with other ones.
        """

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """Return W in float32, in memory of its own."""

    def is_finite(self) -> bool:
        """Return whether all weights are finite; override it if scales show that sooner."""
        return bool(self.dequantize().isfinite().all())

    def joined(self, parts: Sequence[QuantizedMatrix], dim: int) -> QuantizedMatrix:
        """Return parts of this matrix, which it is one of, one after the other in a dimension.

        Called for matrices in which a checkpoint has several stacked, q, k and v for example, of
        which a rank needs a part each. By default the parts are dequantized.
        """
        return DenseMatrix(join([part.dequantize() for part in parts], dim))

    def linear(
        self,
        bias: torch.Tensor | None,  # noqa: ARG002
        out_dtype: torch.dtype,  # noqa: ARG002
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function as `Ops.linear` does, which multiplies W itself.

        Its results are new tensors [rows of x, rows], contiguous, on the device of x.

        None, the default, leaves it to the operations: they multiply `AffineCodes` where they have
        a kernel for them, and else the result of `dequantize`. A model with such functions is not
        kept in the weight cache. Embeddings and experts use the result of `dequantize`.

        Args:
            bias: [rows], in the dtype of x.
            out_dtype: dtype of the results.
        """
        return None


@dataclass(frozen=True, eq=False, repr=False)
class AffineCodes(QuantizedMatrix):
    """Small whole numbers, which a scale and an offset per group of columns turn into weights.

        W[r, k] = scale[r, k // group] * value(codes[r, k]) + offset[r, k // group]

    Most schemes have this form. The scale is `scales`, times `outer_scales[r, k // 256]` where
    there are such; the offset likewise. Matrices that are multiplied together may differ in all.
    Operations multiply the codes themselves: a derived class cannot have a `linear` of its own.

    Attributes:
        codes: [rows, columns], uint8, of 8 bits int8; one per byte.
        bits: number of bits of a code, 4, 5, 6 or 8.
        group: columns that share a scale: 16, or a multiple of 32; the last group may have fewer.
        scales: [rows, groups], float16 or float32; with outer ones, int8 or uint8.
        offsets: the same; None is 0.
        outer_scales: float16 [rows, columns / 256, rounded up], by which scales are multiplied.
        outer_offsets: the same for offsets.
        values: float32 [2 ** bits], the finite numbers of the codes, each
            representable in bfloat16; None are the codes themselves. Codes of 8 bits have none.
    """

    OUTER_COLUMNS: ClassVar[int] = 256
    """Columns that share an outer scale."""

    codes: torch.Tensor
    bits: int
    group: int
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_offsets: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def __init_subclass__(cls) -> None:
        """Reject a class with a `linear` of its own, which nothing would call.

        Raises:
            TypeError: it has one.
        """
        super().__init_subclass__()
        if cls.linear is not QuantizedMatrix.linear:
            raise TypeError(
                f"{cls.__name__}.linear: operations multiply AffineCodes themselves; expected a "
                f"class that derives from QuantizedMatrix for matrices that multiply themselves"
            )

    def __post_init__(self) -> None:
        """Check shapes and dtypes.

        Raises:
            ValueError: a field is not as the attributes describe.
        """
        _check_codes(self)

    def __repr__(self) -> str:
        """Return text without the numbers of the tensors."""
        return f"AffineCodes({self.bits} bits, groups of {self.group}, {_of(self.codes)})"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def alignment(self) -> int:
        """Divisor of the columns at which the matrix can be cut."""
        has_outer = self.outer_scales is not None or self.outer_offsets is not None
        return math.lcm(self.group, self.OUTER_COLUMNS) if has_outer else self.group

    def rows(self, start: int, stop: int) -> AffineCodes:
        """Return some rows."""
        return self._with(lambda tensor, _: tensor[start:stop])

    def columns(self, start: int, stop: int) -> AffineCodes:
        """Return some columns.

        Raises:
            ValueError: they do not begin and end with a group, and a row has several.
        """
        unit, (_, count) = self.alignment, self.shape
        if self.scales.shape[1] == 1 and self.group == unit:  # the group is a row
            return self._with(lambda tensor, per: tensor[:, start:stop] if per == 1 else tensor)
        if start % unit or (stop % unit and stop != count):
            raise ValueError(
                f"columns {start} to {stop} of {count} cannot be cut from blocks of {unit} columns"
            )

        def cut(tensor: torch.Tensor, per: int) -> torch.Tensor:
            return tensor[:, start // per : -(-stop // per)]

        return self._with(cut)

    def joined(self, parts: Sequence[QuantizedMatrix], dim: int) -> AffineCodes:
        """Return parts of one matrix, one after the other in a dimension."""
        names = ["codes", "scales", "offsets", "outer_scales", "outer_offsets"]
        if dim and sum(part.shape[1] for part in parts) <= self.group == self.alignment:
            del names[1:]  # the group is a row, and the parts have the same scales
        fields = {name: [getattr(part, name) for part in parts] for name in names}
        return replace(self, **{n: join(f, dim) for n, f in fields.items() if f[0] is not None})

    def contiguous(self) -> AffineCodes:
        """Return the matrix with contiguous tensors."""
        values = None if self.values is None else self.values.contiguous()
        return replace(self._with(lambda tensor, _: tensor.contiguous()), values=values)

    def padded(self, rows: int) -> AffineCodes:
        """Return the matrix with rows of zeros at its end, so that it has `rows`."""
        missing = rows - len(self.codes)
        if not missing:
            return self

        def pad(tensor: torch.Tensor, _: int) -> torch.Tensor:
            longer = tensor.new_zeros((rows, *tensor.shape[1:]))
            longer[: len(tensor)] = tensor
            return longer

        return self._with(pad)

    def dequantize(self) -> torch.Tensor:
        """Return W in float32."""
        import torch  # noqa: PLC0415 - the contract is imported without it

        rows, columns = self.shape
        weight = torch.empty((rows, columns))
        step = max(_AT_ONCE // max(columns, 1), 1)  # rows that a processor's cache holds
        for start in range(0, rows, step):
            self._dequantize(slice(start, start + step), weight[start : start + step])
        return weight

    def is_finite(self) -> bool:
        """Return whether all scales and offsets are finite."""
        tensors = (self.scales, self.offsets, self.outer_scales, self.outer_offsets)
        floats = [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point()]
        return all(bool(tensor.isfinite().all()) for tensor in floats)

    def _dequantize(self, rows: slice, out: torch.Tensor) -> None:
        """Write some rows of W into `out`, contiguous."""
        import torch  # noqa: PLC0415

        codes = self.codes[rows]
        if self.values is None:
            out.copy_(codes)
        else:
            torch.index_select(self.values, 0, codes.flatten().int(), out=out.view(-1))
        scales = self._factors(self.scales[rows], self.outer_scales, rows)
        _each_group(out, scales, torch.Tensor.mul_)
        if self.offsets is not None:
            offsets = self._factors(self.offsets[rows], self.outer_offsets, rows)
            _each_group(out, offsets, torch.Tensor.add_)

    def _factors(
        self, factors: torch.Tensor, outer: torch.Tensor | None, rows: slice
    ) -> tuple[torch.Tensor, int]:
        """Return factors of some rows in float32, and the columns that each is for."""
        if outer is None:
            return factors.float(), self.group
        per = math.gcd(self.group, self.OUTER_COLUMNS)
        factors = factors.float().repeat_interleave(self.group // per, 1)
        outer = outer[rows].float().repeat_interleave(self.OUTER_COLUMNS // per, 1)
        count = -(-self.shape[1] // per)
        return factors[:, :count] * outer[:, :count], per

    def _with(self, change: Callable[[torch.Tensor, int], torch.Tensor]) -> AffineCodes:
        """Return a copy with the tensors `change(tensor, columns per element)`."""

        def changed(tensor: torch.Tensor | None, per: int) -> torch.Tensor | None:
            return None if tensor is None else change(tensor, per)

        return replace(
            self,
            codes=change(self.codes, 1),
            scales=change(self.scales, self.group),
            offsets=changed(self.offsets, self.group),
            outer_scales=changed(self.outer_scales, self.OUTER_COLUMNS),
            outer_offsets=changed(self.outer_offsets, self.OUTER_COLUMNS),
        )


def _check_codes(matrix: AffineCodes) -> None:
    """Check the shapes and dtypes of codes.

    Raises:
        ValueError: one is wrong.
    """
    import torch  # noqa: PLC0415 - the contract is imported without it

    bits, group = matrix.bits, matrix.group
    if bits not in (4, 5, 6, 8):
        raise ValueError(f"AffineCodes.bits: expected 4, 5, 6 or 8, got {bits}")
    if group != 16 and (group < 32 or group % 32):
        raise ValueError(f"AffineCodes.group: expected 16 or a multiple of 32, got {group}")
    if matrix.codes.dim() != 2:
        raise ValueError(f"AffineCodes.codes: expected [rows, columns], got {_of(matrix.codes)}")
    rows, columns = matrix.shape
    groups, outer = (-(-columns // per) for per in (group, matrix.OUTER_COLUMNS))
    floats, bytes_ = (torch.float16, torch.float32), (torch.int8, torch.uint8)
    codes = torch.int8 if bits == 8 else torch.uint8
    tensors: list[tuple[str, tuple[torch.dtype, ...], tuple[int, ...]]] = [
        ("codes", (codes,), (rows, columns)),
        ("scales", floats if matrix.outer_scales is None else bytes_, (rows, groups)),
        ("offsets", floats if matrix.outer_offsets is None else bytes_, (rows, groups)),
        ("outer_scales", (torch.float16,), (rows, outer)),
        ("outer_offsets", (torch.float16,), (rows, outer)),
        ("values", (torch.float32,), (1 << bits,)),
    ]
    for name, dtypes, shape in tensors:
        tensor: torch.Tensor | None = getattr(matrix, name)
        if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != shape):
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"AffineCodes.{name}: expected {expected} {list(shape)}, got {_of(tensor)}"
            )
    values = matrix.values
    if matrix.outer_offsets is not None and matrix.offsets is None:
        raise ValueError("AffineCodes.outer_offsets: there are no offsets that they multiply")
    if values is None:
        return
    if bits == 8:
        raise ValueError("AffineCodes.values: codes of 8 bits have none")
    if not values.isfinite().all() or not torch.equal(values, values.bfloat16().float()):
        raise ValueError(
            f"AffineCodes.values: expected finite numbers that bfloat16 holds, got "
            f"{values.tolist()}"
        )


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


class DenseMatrix(QuantizedMatrix):
    """Numbers that a scheme reads and no codes can hold; the log names such matrices at start."""

    def __init__(self, weight: torch.Tensor) -> None:
        """`weight` is float32 [rows, columns]."""
        self._weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._weight.shape[0], self._weight.shape[1]

    @property
    def alignment(self) -> int:
        """1: any columns can be cut."""
        return 1

    def rows(self, start: int, stop: int) -> DenseMatrix:
        """Return some rows."""
        return DenseMatrix(self._weight[start:stop])

    def columns(self, start: int, stop: int) -> DenseMatrix:
        """Return some columns."""
        return DenseMatrix(self._weight[:, start:stop])

    def dequantize(self) -> torch.Tensor:
        """Return W."""
        return self._weight.clone()


def _each_group(
    weight: torch.Tensor,
    factors: tuple[torch.Tensor, int],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Multiply or add factors of groups of columns in place."""
    numbers, per = factors
    rows, columns = weight.shape
    whole = columns // per
    groups = weight[:, : whole * per].view(rows, whole, per)
    change(groups, numbers[:, :whole, None])
    if columns % per:  # the last group has fewer
        change(weight[:, whole * per :], numbers[:, whole:])


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight:
    """A matrix as a checkpoint stores it; a loader yields it instead of a tensor.

    Attributes:
        scheme: name of the `quantizations` component that reads it, "q4_k" for example.
        shape: rows and columns of the matrix that it stands for.
        tensors: stored tensors, by the last part of their names, "qweight" for example.
        name: name of the weight, for schemes that differ by it; empty if the loader gives none.
    """

    scheme: str
    shape: tuple[int, int]
    tensors: Mapping[str, torch.Tensor]
    name: str = ""

    def __repr__(self) -> str:
        """Return text without the numbers of the tensors."""
        tensors: object = self.tensors
        if isinstance(tensors, Mapping):
            parts = (f"{name!r}: {_short(tensor)}" for name, tensor in tensors.items())
            tensors = f"{{{', '.join(parts)}}}"
        return f"QuantizedWeight({self.scheme!r}, {self.shape!r}, {tensors})"

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a stored tensor, which has to have a dtype and shape.

        Raises:
            ValueError: it is missing, or has others.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            stored = ", ".join(sorted(self.tensors)) or "nothing"
            raise ValueError(f"{name!r} is missing, expected {dtype} {list(shape)}, got {stored}")
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(
                f"{name!r}: expected {dtype} {list(shape)} for a matrix {list(self.shape)}, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        return tensor


def _short(value: object) -> str:
    """Return a tensor's dtype and shape, or the repr of anything else."""
    import torch  # noqa: PLC0415

    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return repr(value)
