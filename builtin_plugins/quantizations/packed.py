"""Base of the schemes of safetensors checkpoints: checks, packed numbers, and groups of columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ModelError, Quantization, QuantizationContext
from hardpoint.plugins.quantization import (
    AffineCodes,
    DenseMatrix,
    QuantizedMatrix,
    QuantizedWeight,
)
from hardpoint.toolkit.hf_config import ConfigFields, short

SCALES = (torch.float16, torch.bfloat16, torch.float32)
SOURCE = "config.json: quantization_config"
Shapes = dict[str, tuple[Collection[torch.dtype], Sequence[int]]]
"""Dtypes and shapes of tensors, by the last part of their names."""
_GROUPS = 16, 32
"""Sizes of groups that codes can have: this one, and multiples of that one."""


class StoredScheme(Quantization):
    """A scheme for checkpoints with a description of their quantization in config.json."""

    contract = 1
    neutral: ClassVar[Collection[str]]
    """Fields of the config that do not change the meaning of weights."""
    known: ClassVar[Collection[str]]
    """Fields that `read_config` reads."""

    def __init__(self, context: QuantizationContext) -> None:
        """Read the checkpoint's config, if it is of this scheme.

        Raises:
            ModelError: a field has an unsupported value, or may change the meaning of weights.
        """
        super().__init__(context)
        if context.config:
            refuse_unknown(context.config, {"quant_method", *self.known, *self.neutral}, SOURCE)
            self.read_config(ConfigFields(context.config, SOURCE))

    def read_config(self, fields: ConfigFields) -> None:
        """Read the fields.

        Raises:
            ModelError: a value is not supported.
        """
        raise NotImplementedError

    def check(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong, or the checkpoint's config is of another scheme.
        """
        if not self.context.config:
            raise ValueError(f"config.json has no quantization_config of {self.name!r}")
        self.check_tensors(stored)

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes against the config.

        Raises:
            ValueError: one is wrong.
        """
        raise NotImplementedError


def refuse_unknown(values: Mapping[str, Any], known: Collection[str], source: str) -> None:
    """Refuse fields that are not known, unless they are off or empty.

    Raises:
        ModelError: there is one.
    """
    for name, value in values.items():
        if name not in known and value not in (None, False, "", [], {}):
            raise ModelError(
                f"{source}: {name}: the field is unknown and may change the meaning of weights, "
                f"expected none; got {short(value)}"
            )


def one_of(fields: ConfigFields, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Check a field that has few possible values.

    Raises:
        ModelError: it has another one.
    """
    if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
        expected = " or ".join("none" if item is None else str(item) for item in allowed)
        raise fields.error(name, f"expected {expected}, got {short(value)}")


def group_size(fields: ConfigFields, name: str, value: Any) -> int | None:
    """Return a size of groups; None is a whole row, which is stored as -1.

    Raises:
        ModelError: it is no size.
    """
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise fields.error(name, f"expected a whole number >= 1, or -1, got {short(value)}")
    return None if value == -1 else value


def expect(
    stored: QuantizedWeight,
    shapes: Mapping[str, tuple[Collection[torch.dtype], Sequence[int]]],
    optional: Collection[str] = (),
) -> None:
    """Check the stored tensors.

    Args:
        stored: the tensors.
        shapes: dtypes and shapes of a matrix's tensors.
        optional: names of tensors that may be missing.

    Raises:
        ValueError: one is missing or not known, or has another dtype or shape.
    """
    tensors = stored.tensors
    for name, (dtypes, shape) in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            if name in optional:
                continue
            raise ValueError(
                f"the tensor {name!r} is missing; there are {', '.join(sorted(tensors)) or 'none'}"
            )
        if tensor.dtype not in dtypes or list(tensor.shape) != list(shape):
            expected = " or ".join(map(_dtype, dtypes))
            raise ValueError(
                f"{name}: expected {expected} {list(shape)} for a matrix {list(stored.shape)}, "
                f"got {_dtype(tensor.dtype)} {list(tensor.shape)}"
            )
    if unknown := tensors.keys() - shapes.keys():
        raise ValueError(
            f"the tensor {min(unknown)!r} is not known; expected {', '.join(sorted(shapes))}"
        )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return unsigned numbers of 4 or 8 bits, uint8 [rows, count].

    Args:
        packed: int32, the first numbers of a row in the lowest bits of its first element.
        bits: number of bits of a number.
        count: how many numbers a row has; further ones are padding.
    """
    numbers = packed.contiguous().view(torch.uint8)
    if bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
    return numbers[:, :count]


def affine(
    codes: torch.Tensor,
    bits: int,
    group: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Return the matrix (codes - zeros) * scales.

    It is dense if codes cannot hold it: if columns of a group are not together, or groups are
    neither of 16 nor of a multiple of 32 columns.

    Args:
        codes: [rows, columns], uint8 of 4 bits or int8.
        bits: number of bits of a code.
        group: columns that share a scale and a zero, at least `columns` if all do.
        scales: [rows, groups].
        zeros: the same, whole numbers; None is 0.
        group_of: the group of each column; None if they are in order.

    Raises:
        ValueError: a scale is not finite, or a number of `group_of` is none of a group.
    """
    if not bool(scales.isfinite().all()):
        raise ValueError("the scales have numbers that are not finite")
    columns = codes.shape[1]
    in_order = torch.arange(columns) // group
    if group_of is not None:
        if columns and not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
            raise ValueError(
                f"g_idx: expected numbers of groups, 0 to {scales.shape[1] - 1}, got "
                f"{int(group_of.min())} to {int(group_of.max())}"
            )
        in_order = group_of.long()
    if group >= columns:
        group = -(-columns // _GROUPS[1]) * _GROUPS[1]
    has_order = group_of is None or torch.equal(in_order, torch.arange(columns) // group)
    if not has_order or (group != _GROUPS[0] and group % _GROUPS[1]):
        return _dense(codes, scales.float(), zeros, in_order)
    values, offsets = None, None
    if zeros is not None:
        first = float(zeros.flatten()[0]) if zeros.numel() else 0.0
        if bits == 4 and bool((zeros == first).all()):
            values = torch.arange(16.0) - first
        elif bool(zeros.any()):
            offsets = -zeros.float() * scales.float()
    dtype = torch.float16 if fits(scales) and (offsets is None or fits(offsets)) else None
    scales = scales.to(dtype or torch.float32)
    offsets = None if offsets is None else offsets.to(dtype or torch.float32)
    return AffineCodes(codes, bits, group, scales, offsets, values=values)


def alignment(columns: int, group: int | None) -> int:
    """Return the columns at which an `affine` matrix with groups in order can be cut."""
    if group is None or group >= columns:
        return 1  # a row has one scale
    return group if group == _GROUPS[0] or group % _GROUPS[1] == 0 else 1  # dequantized


def _dense(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_of: torch.Tensor
) -> DenseMatrix:
    weight = codes.float()
    if zeros is not None:
        weight -= zeros.float()[:, group_of]
    return DenseMatrix(weight.mul_(scales[:, group_of]))


def fits(numbers: torch.Tensor) -> bool:
    """Return whether float16 holds all numbers exactly."""
    return bool((numbers.half().float() == numbers.float()).all())


def stored_bytes(shape: tuple[int, int], bits: int, group: int | None, has_zeros: bool) -> int:
    """Return the bytes of a matrix of codes.

    Args:
        shape: rows and columns.
        bits: number of bits of a code.
        group: columns that share a scale; None is all.
        has_zeros: whether there are offsets, which are float32, as the scales are then.
    """
    rows, columns = shape
    groups = 1 if group is None else -(-columns // group)
    return rows * (-(-columns * bits // 8) + groups * (8 if has_zeros else 2))
