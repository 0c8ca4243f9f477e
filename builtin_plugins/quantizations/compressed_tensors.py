"""Checkpoints of compressed-tensors, which llm-compressor writes, whose weights are integers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, short

from .packed import (
    SCALES,
    SOURCE,
    StoredScheme,
    affine,
    alignment,
    expect,
    group_size,
    one_of,
    refuse_unknown,
    stored_bytes,
    unpack,
)

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_ACTIVATIONS = ("input_activations", "output_activations")
_INDICES = (torch.int32, torch.int64)
_PATTERN = "re:"
_REPEAT = r"[*+{]|(?<!\()\?"
_MOST_REPEATS = 4


@dataclass(frozen=True)
class _Weights:
    """How the matrices of one of the `config_groups` are stored.

    Attributes:
        bits: number of bits of a code.
        symmetric: whether there are no zeros.
        strategy: "group", "channel" (a scale per row) or "tensor" (one for the matrix).
        group: columns that share a scale, of the strategy "group".
        reorders: whether `weight_g_idx` gives the group of a column.
        targets: which modules are stored so: their names, "re:" with a pattern, or their class.
    """

    bits: int
    symmetric: bool
    strategy: str
    group: int | None
    reorders: bool
    targets: tuple[str, ...]

    def reading(self, columns: int) -> tuple[int, int]:
        """Return all that decides what tensors mean that pass `check`."""
        return self.bits, min(self.group or columns, columns)

    def rank(self, module: str) -> int:
        """Return how well a module fits the targets, the best first: name, pattern, class.

        Raises:
            ValueError: one is a pattern that cannot be used.
        """
        for rank, fits in enumerate((_is_name, _is_match, _is_class)):
            if any(fits(target, module) for target in self.targets):
                return rank
        return 3

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

    def _signed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of 8 bits, to which 128 was added, as they were; of 4 as they are."""
        if self.bits == 4:
            return numbers
        return numbers.bitwise_xor(128).view(torch.int8)

    def _codes_of_bytes(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Return signed numbers, those of 4 bits with 8 added.

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


class CompressedTensors(StoredScheme):
    """Integers of four or eight bits, packed (`weight_packed`) or as bytes (`weight`).

    Activations that are to be quantised are refused, as are floating formats: the results would be
    other ones than those that the checkpoint was made for.
    """

    contract = 1
    known = ("config_groups", "format", "kv_cache_scheme", "sparsity_config", "transform_config")
    neutral = ("ignore", "quantization_status", "global_compression_ratio", "version")

    def read_config(self, fields: ConfigFields) -> None:
        """Read the `config_groups`.

        Raises:
            ModelError: one of them quantises something else than weights, or is not supported.
        """
        given = self.context.config
        one_of(fields, "kv_cache_scheme", given.get("kv_cache_scheme"), [None])
        one_of(fields, "transform_config", given.get("transform_config") or None, [None])
        sparsity = fields.table("sparsity_config").get("format", "dense")
        one_of(fields, "sparsity_config.format", sparsity, ["dense"])
        form = given.get("format", _FORMATS[0])
        one_of(fields, "format", form, [*_FORMATS, "mixed-precision"])
        groups = fields.table("config_groups")
        if not groups:
            raise fields.error("config_groups", "expected at least one, got none")
        self._weights = [_read_group(f"config_groups.{name}", g) for name, g in groups.items()]

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        self._fitting(stored)

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return codes with scales and, where there are zeros, offsets; or what they stand for.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        return self._fitting(stored).read(stored)

    def alignment(
        self, shape: tuple[int, int], stored: QuantizedWeight | None = None
    ) -> int | None:
        """Return the size of the groups; None if `weight_g_idx` may have put columns apart.

        Raises:
            ValueError: a tensor is missing, or its dtype or shape is wrong.
        """
        if stored is None or (weights := self._fitting(stored)).reorders:
            return None
        return alignment(shape[1], weights.group)

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets; None if matrices differ in these."""
        if not self.context.config:
            return None
        forms = {replace(weights, targets=()) for weights in self._weights}
        if len(forms) > 1 or self._weights[0].reorders:
            return None
        weights = self._weights[0]
        return stored_bytes(shape, weights.bits, weights.group, not weights.symmetric)

    def _fitting(self, stored: QuantizedWeight) -> _Weights:
        """Return the group of the config that the tensors fit.

        Mostly the stored tensors determine the group; if several groups would read them
        differently, their `targets` do.

        Raises:
            ValueError: they fit none, or several that read them in different ways.
        """
        fitting: list[_Weights] = []
        errors: list[ValueError] = []
        for weights in dict.fromkeys(self._weights):
            try:
                weights.check(stored)
                fitting.append(weights)
            except ValueError as error:
                errors.append(error)
        if not fitting:
            raise errors[0]
        columns = stored.shape[1]
        if len({weights.reading(columns) for weights in fitting}) > 1:
            ranks = [weights.rank(stored.name.rpartition(".")[0]) for weights in fitting]
            fitting = [w for w, rank in zip(fitting, ranks, strict=True) if rank == min(ranks)]
        if len({weights.reading(columns) for weights in fitting}) > 1:
            targets = " and ".join(str(list(weights.targets)) for weights in fitting)
            raise ValueError(
                f"it fits {len(fitting)} of the config_groups, which differ; expected targets of "
                f"which one fits best, got {targets}"
            )
        return fitting[0]


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_match(target: str, module: str) -> bool:
    if not target.startswith(_PATTERN):
        return False
    pattern = target.removeprefix(_PATTERN)
    # What repeats a group, or repeats much, can take exponential time.
    if re.search(r"\)[*+{]", pattern) or len(re.findall(_REPEAT, pattern)) > _MOST_REPEATS:
        raise ValueError(
            f"targets of the config_groups: expected patterns with at most {_MOST_REPEATS} "
            f"repeats, none of them of a group, got {short(target)}"
        )
    try:
        return re.match(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as cause:
        raise ValueError(
            f"targets of the config_groups: {short(target)} is no pattern: {cause}"
        ) from cause


def _is_class(target: str, module: str) -> bool:  # noqa: ARG001 - all that are quantised have it
    return target == "Linear"


def _read_group(name: str, group: Any) -> _Weights:
    """Return how one of the `config_groups` stores weights.

    Raises:
        ModelError: it quantises something else, or is not supported.
    """
    fields = ConfigFields({name: group}, SOURCE)
    values = fields.table(name)
    place = f"{SOURCE}.{name}"
    refuse_unknown(values, ("targets", "weights", "format", *_ACTIVATIONS), place)
    inner = ConfigFields(values, place)
    for activations in _ACTIVATIONS:
        if given := values.get(activations):
            raise inner.error(
                activations,
                f"activations that are quantised are not supported, expected none; got "
                f"{short(given)}",
            )
    one_of(inner, "format", values.get("format") or _FORMATS[0], _FORMATS)
    weights = inner.table("weights")
    if not weights:
        raise inner.error("weights", f"expected a table, got {short(values.get('weights'))}")
    return _read_weights(weights, f"{place}.weights", _read_targets(inner, values.get("targets")))


def _read_targets(fields: ConfigFields, targets: Any) -> tuple[str, ...]:
    """Return the targets of a group.

    Raises:
        ModelError: they are no strings.
    """
    targets = [] if targets is None else targets
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.error("targets", f"expected a list of strings, got {short(targets)}")
    return tuple(targets)


def _read_weights(weights: Mapping[str, Any], source: str, targets: tuple[str, ...]) -> _Weights:
    known = ("num_bits", "type", "symmetric", "strategy", "group_size", "actorder")
    neutral = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    refuse_unknown(weights, (*known, *neutral), source)
    fields = ConfigFields(weights, source)
    one_of(fields, "type", weights.get("type", "int"), ["int"])
    one_of(fields, "num_bits", weights.get("num_bits", 8), [4, 8])
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size in (None, -1) else "group")
    one_of(fields, "strategy", strategy, ["group", "channel", "tensor"])
    order = weights.get("actorder") or None
    one_of(fields, "actorder", order, [None, "weight", "static", "group", "dynamic"])
    return _Weights(
        bits=int(weights.get("num_bits", 8)),
        symmetric=fields.flag("symmetric", True),
        strategy=strategy,
        group=group_size(fields, "group_size", size) if strategy == "group" else None,
        reorders=order in ("group", "dynamic"),
        targets=targets,
    )
