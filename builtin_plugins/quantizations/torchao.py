"""Checkpoints of torchao as safetensors: integers with scales of groups or rows, and float8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, short

from .fp8 import E4M3, scaled
from .packed import (
    SCALES,
    SOURCE,
    Shapes,
    StoredScheme,
    affine,
    alignment,
    expect,
    group_size,
    one_of,
)

_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
_FLOAT8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_ROWS = {"PerRow": ("dim", -1), "PerAxis": ("axis", 0)}
"""Granularities with one scale per row, and the field that states them."""
_BITS = {f"int{bits}": bits for bits in range(2, 9)}


class TorchAO(StoredScheme):
    """Integers of two to eight bits, one in a byte, or float8 e4m3: `_weight_qdata`.

    The scales, `_weight_scale` [rows, groups], are of groups of columns or of rows; integers may
    have zeros (`_weight_zero_point`). Integers of up to four bits take four in memory, others
    eight; float8 is dequantized. Configs that pack codes for one kernel (`Int4WeightOnlyConfig`)
    are refused. Activations that were to be quantized while the model runs are left as they are.
    """

    contract = 1
    known = ("quant_type", "quant_type_kwargs")
    neutral = (
        "include_input_output_embeddings",
        "modules_to_not_convert",
        "untie_embedding_weights",
    )

    def read_config(self, fields: ConfigFields) -> None:
        """Read which numbers there are, and the size of groups.

        Raises:
            ModelError: it is a config that is not supported, or one per module.
        """
        one_of(fields, "quant_type_kwargs", fields.table("quant_type_kwargs"), [{}])
        kinds = fields.table("quant_type")
        if list(kinds) != ["default"]:
            raise fields.error("quant_type", f"expected the table default, got {short(kinds)}")
        config = ConfigFields(kinds, f"{SOURCE}.quant_type").table("default")
        place = f"{SOURCE}.quant_type.default"
        self._kind = config.get("_type")
        supported = (*_INT8, *_INTX, *_FLOAT8)
        one_of(ConfigFields(config, place), "_type", self._kind, supported)
        values = ConfigFields(config, place).table("_data")
        inner = ConfigFields(values, f"{place}._data")
        self._bits, self._has_zeros = 8, False
        self._group: int | None = None
        if self._kind in _INTX:
            name = _data(inner.table("weight_dtype"))
            one_of(inner, "weight_dtype", name, tuple(_BITS))
            self._bits = 4 if _BITS[name] <= 4 else 8
            mapping = _data(inner.table("weight_mapping_type") or inner.table("mapping_type"))
            self._has_zeros = mapping == "ASYMMETRIC"
        name = "weight_granularity" if values.get("weight_granularity") else "granularity"
        if values.get(name) is not None:
            self._group = _read_granularity(f"{place}._data", name, values[name])
        elif values.get("group_size") is not None:
            self._group = group_size(inner, "group_size", values["group_size"])

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        rows, columns = stored.shape
        groups = 1 if self._group is None else -(-columns // self._group)
        shapes: Shapes = {_SCALE: (SCALES, (rows, groups))}
        optional = {_ZERO}
        if self._kind in _FLOAT8:
            shapes[_QDATA] = (E4M3,), (rows, columns)
            scale = stored.tensors.get(_SCALE)
            if scale is not None and scale.shape == (1, 1):  # one of the matrix
                shapes[_SCALE] = SCALES, (1, 1)
        else:
            shapes[_QDATA] = (torch.int8,), (rows, columns)
            shapes[_ZERO] = (torch.int8,), (rows, groups)
        expect(stored, shapes, optional)

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return codes with scales and, where there are zeros, offsets; of float8 the numbers.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        tensors = stored.tensors
        codes, scales, zeros = tensors[_QDATA], tensors[_SCALE], tensors.get(_ZERO)
        if self._kind in _FLOAT8:
            return scaled(codes, scales, None)
        if self._bits == 4:
            codes = self._four_bits(_QDATA, codes).view(torch.uint8)
            if zeros is None:
                zeros = torch.zeros(scales.shape, dtype=torch.int8)
            zeros = self._four_bits(_ZERO, zeros)
        return affine(codes, self._bits, self._group or stored.shape[1], scales, zeros)

    def alignment(
        self,
        shape: tuple[int, int],
        stored: QuantizedWeight | None = None,  # noqa: ARG002
    ) -> int | None:
        """Return the size of the groups."""
        return alignment(shape[1], self._group) if self.context.config else None

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets; None if they are dequantized."""
        if not self.context.config or self._kind in _FLOAT8:
            return None
        rows, columns = shape
        groups = 1 if self._group is None else -(-columns // self._group)
        of_group = 8 if self._has_zeros else 4
        return rows * (-(-columns * self._bits // 8) + groups * of_group)

    def _four_bits(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers from -8 to 7 with 8 added.

        Raises:
            ValueError: there are others.
        """
        if numbers.numel() and not -8 <= int(numbers.min()) <= int(numbers.max()) <= 7:
            raise ValueError(
                f"{name}: expected numbers of 4 bits, -8 to 7, got {int(numbers.min())} to "
                f"{int(numbers.max())}"
            )
        return numbers + 8


def _data(value: Mapping[str, Any]) -> str:
    """Return the name of a dtype or of a kind, as torchao writes them."""
    return str(value.get("_data"))


def _read_granularity(place: str, name: str, value: Any) -> int | None:
    """Return the size of groups; None is a row, or a matrix.

    Args:
        place: where the field is, for messages.
        value: the granularity; of two, the first one belongs to activations.

    Raises:
        ModelError: scales are of something else.
    """
    if isinstance(value, list) and len(value) == 2:
        value = value[1]
    values = ConfigFields({name: value}, place).table(name)
    inner = ConfigFields(values, f"{place}.{name}")
    kind = values.get("_type")
    one_of(inner, "_type", kind, ("PerGroup", "PerTensor", *_ROWS))
    data = inner.table("_data")
    if kind == "PerGroup":
        return group_size(inner, "group_size", data.get("group_size"))
    if kind in _ROWS:
        field, expected = _ROWS[kind]
        one_of(inner, field, data.get(field, expected), [expected])
    return None
