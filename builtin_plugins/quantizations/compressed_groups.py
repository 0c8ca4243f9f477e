"""How the `config_groups` of compressed-tensors store matrices: as integers, or as float8."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields

from .fp8 import E4M3, read_block, scaled, scales_of_blocks
from .module_rules import matches
from .packed import (
    SCALES,
    affine,
    alignment,
    expect,
    group_size,
    one_of,
    refuse_unknown,
    stored_bytes,
    unpack,
)

FORMATS = {
    "int": ("pack-quantized", "int-quantized", "naive-quantized"),
    "float": ("float-quantized", "naive-quantized"),
}
"""The formats of either type of weights."""
_INDICES = (torch.int32, torch.int64)
_PATTERN = "re:"


@dataclass(frozen=True)
class Weights(ABC):
    """How the matrices of one of the `config_groups` are stored.

    Attributes:
        targets: which modules are stored so: their names, "re:" with a pattern, or their class.
    """

    targets: tuple[str, ...]

    @abstractmethod
    def reading(self, columns: int) -> tuple[object, ...]:
        """Return all settings that decide the meaning of tensors that pass `check`."""

    @abstractmethod
    def check(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """

    @abstractmethod
    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return the matrix, which was checked.

        Raises:
            ValueError: a tensor's content is wrong.
        """

    @abstractmethod
    def alignment(self, columns: int) -> int | None:
        """Return at which columns a matrix can be cut; None if only its tensors show it."""

    @abstractmethod
    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets; None if they may be dequantized."""

    def rank(self, module: str) -> int:
        """Return how well a module fits the targets, the best first: name, pattern, class.

        Raises:
            ValueError: one is a pattern that cannot be used.
        """
        for rank, fits in enumerate((_is_name, _is_match, _is_class)):
            if any(fits(target, module) for target in self.targets):
                return rank
        return 3


@dataclass(frozen=True)
class Integers(Weights):
    """Integers of four or eight bits, packed (`weight_packed`) or as bytes (`weight`).

    Attributes:
        bits: number of bits of a code.
        symmetric: whether there are no zeros.
        strategy: "group", "channel" (a scale per row) or "tensor" (one for the matrix).
        group: columns that share a scale, of the strategy "group".
        reorders: whether `weight_g_idx` gives the group of a column.
    """

    bits: int
    symmetric: bool
    strategy: str
    group: int | None
    reorders: bool

    def reading(self, columns: int) -> tuple[object, ...]:
        """Return all settings that decide the meaning of tensors that pass `check`."""
        return self.bits, min(self.group or columns, columns)

    def check(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        rows, columns = stored.shape
        groups = -(-columns // (self.group or columns))
        scales = (1,) if self.strategy == "tensor" else (rows, groups)
        shapes: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {}
        shapes["weight_scale"] = SCALES, scales
        optional = {"weight_zero_point"} if self.symmetric else set[str]()
        if "weight" in stored.tensors:
            shapes["weight"] = (torch.int8,), (rows, columns)
            shapes["weight_zero_point"] = (torch.int8,), scales
        else:
            shapes["weight_packed"] = (torch.int32,), (rows, -(-columns * self.bits // 32))
            shapes["weight_zero_point"] = (torch.int32,), (-(-rows * self.bits // 32), groups)
            shapes["weight_shape"] = _INDICES, (2,)
        if self.reorders:
            shapes["weight_g_idx"] = _INDICES, (columns,)
        expect(stored, shapes, optional)

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return the matrix, which was checked.

        Raises:
            ValueError: a tensor's content is wrong.
        """
        (rows, columns), tensors = stored.shape, stored.tensors
        zeros = tensors.get("weight_zero_point")
        if "weight" in tensors:
            codes = self._codes_of_bytes("weight", tensors["weight"])
            if zeros is not None:
                zeros = self._codes_of_bytes("weight_zero_point", zeros)
        else:
            shape = tensors["weight_shape"].tolist()
            if shape != [rows, columns]:
                raise ValueError(f"weight_shape: expected {[rows, columns]}, got {shape}")
            codes = self._signed(unpack(tensors["weight_packed"], self.bits, columns))
            if zeros is not None:
                zeros = self._signed(unpack(zeros.t(), self.bits, rows).t())
        scales = tensors["weight_scale"]
        if self.strategy == "tensor":
            scales = scales.reshape(1, 1).expand(rows, 1)
            zeros = None if zeros is None else zeros.reshape(-1, 1).expand(rows, 1)
        if self.bits == 4 and zeros is None:
            zeros = torch.full(scales.shape, 8)
        group = self.group or columns
        return affine(codes, self.bits, group, scales, zeros, tensors.get("weight_g_idx"))

    def alignment(self, columns: int) -> int | None:
        """Return the size of the groups; None if `weight_g_idx` may have put columns apart."""
        return None if self.reorders else alignment(columns, self.group)

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets; None if they may be dequantized."""
        if self.reorders:
            return None
        return stored_bytes(shape, self.bits, self.group, not self.symmetric)

    def _signed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of 8 bits, to which 128 was added, as they were; of 4 as they are."""
        if self.bits == 4:
            return numbers
        return numbers.bitwise_xor(128).view(torch.int8)

    def _codes_of_bytes(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Return signed numbers, 4-bit numbers with 8 added.

        Raises:
            ValueError: they have more bits.
        """
        if self.bits == 8:
            return numbers
        if numbers.numel() and not -8 <= int(numbers.min()) <= int(numbers.max()) <= 7:
            raise ValueError(
                f"{name}: expected numbers of 4 bits, -8 to 7, got {int(numbers.min())} to "
                f"{int(numbers.max())}"
            )
        return (numbers + 8).view(torch.uint8)


@dataclass(frozen=True)
class Floats(Weights):
    """Numbers of float8 e4m3, dequantized.

    Attributes:
        strategy: "channel" (a scale per row), "tensor" (one for the matrix) or "block".
        block: rows and columns that share a scale, of the strategy "block".
    """

    strategy: str
    block: tuple[int, int] | None

    def reading(self, columns: int) -> tuple[object, ...]:  # noqa: ARG002
        """Return all settings that decide the meaning of tensors that pass `check`."""
        return self.strategy, self.block

    def check(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        if self.block is not None:
            scales: tuple[int, ...] = scales_of_blocks(stored.shape, self.block)
        else:
            scales = (1,) if self.strategy == "tensor" else (stored.shape[0], 1)
        expect(stored, {"weight": ((E4M3,), stored.shape), "weight_scale": (SCALES, scales)})

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return the numbers.

        Raises:
            ValueError: a number or a scale is not finite.
        """
        return scaled(stored.tensors["weight"], stored.tensors["weight_scale"], self.block)

    def alignment(self, columns: int) -> int:  # noqa: ARG002
        """Return 1: numbers can be cut anywhere."""
        return 1

    def stored_bytes(self, shape: tuple[int, int]) -> None:
        """Return None: matrices are dequantized."""


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_match(target: str, module: str) -> bool:
    if not target.startswith(_PATTERN):
        return False
    return matches(target, _PATTERN, module, "targets of the config_groups")


def _is_class(target: str, module: str) -> bool:  # noqa: ARG001 - all that are quantized have it
    return target == "Linear"


def read_weights(weights: Mapping[str, Any], source: str, targets: tuple[str, ...]) -> Weights:
    """Return how one of the `config_groups` stores weights.

    Args:
        weights: its own description of them.
        source: where that is, for messages.
        targets: modules of the group.

    Raises:
        ModelError: they are no integers of four or eight bits, nor float8, or a field is not known.
    """
    known = ("num_bits", "type", "symmetric", "strategy", "group_size", "actorder")
    neutral = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    refuse_unknown(weights, (*known, "block_structure", *neutral), source)
    fields = ConfigFields(weights, source)
    kind = weights.get("type", "int")
    one_of(fields, "type", kind, ["int", "float"])
    read = _read_integers if kind == "int" else _read_floats
    return read(fields, weights, targets)


def _read_integers(
    fields: ConfigFields, weights: Mapping[str, Any], targets: tuple[str, ...]
) -> Integers:
    one_of(fields, "num_bits", weights.get("num_bits", 8), [4, 8])
    one_of(fields, "block_structure", weights.get("block_structure"), [None])
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size in (None, -1) else "group")
    one_of(fields, "strategy", strategy, ["group", "channel", "tensor"])
    order = weights.get("actorder") or None
    one_of(fields, "actorder", order, [None, "weight", "static", "group", "dynamic"])
    return Integers(
        bits=int(weights.get("num_bits", 8)),
        symmetric=fields.flag("symmetric", True),
        strategy=strategy,
        group=group_size(fields, "group_size", size) if strategy == "group" else None,
        reorders=order in ("group", "dynamic"),
        targets=targets,
    )


def _read_floats(
    fields: ConfigFields, weights: Mapping[str, Any], targets: tuple[str, ...]
) -> Floats:
    one_of(fields, "num_bits", weights.get("num_bits", 8), [8])
    one_of(fields, "symmetric", fields.flag("symmetric", True), [True])
    strategy = weights.get("strategy") or "tensor"
    one_of(fields, "strategy", strategy, ["tensor", "channel", "block"])
    one_of(fields, "actorder", weights.get("actorder") or None, [None])
    block = weights.get("block_structure")
    if strategy == "block" and block is None:
        raise fields.error("block_structure", "missing, the strategy 'block' has one")
    return Floats(
        strategy=strategy,
        block=read_block(fields, "block_structure", block) if strategy == "block" else None,
        targets=targets,
    )
