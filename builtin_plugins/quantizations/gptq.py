"""Checkpoints of AutoGPTQ and GPTQModel (GPTQ, arXiv:2210.17323)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ModelError
from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, short

from .module_rules import matches
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

_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word with all numbers 1, by their bits."""
_LEAVES, _CHANGES = "-:", "+:"
"""Beginnings of the patterns of `dynamic`; the second one may be left out."""


@dataclass(frozen=True)
class _Layout:
    """How matrices are stored.

    Attributes:
        bits: number of bits of a code.
        group: columns that share a scale and a zero; None is a whole row.
        reorders: whether columns of a group may be apart.
        symmetric: whether all zeros are the same.
    """

    bits: int
    group: int | None
    reorders: bool
    symmetric: bool


class GPTQ(StoredScheme):
    """Four or eight bits with a scale and a zero per group.

    A matrix is stored transposed: `qweight` int32 [columns / codes of a word, rows], `qzeros` int32
    [groups, rows / codes of a word], `scales` [groups, rows], and `g_idx` [columns], the group of
    each column. Where `desc_act` has put columns of a group apart, it is dequantized.

    `dynamic` has patterns of modules that are stored in another way. The first pattern that
    fits counts: "-:" begins modules that are not quantized, "+:" modules with fields of their own.
    """

    contract = 1
    known: ClassVar[Collection[str]] = (
        "bits",
        "group_size",
        "desc_act",
        "sym",
        "checkpoint_format",
        "format",
        "pack_dtype",
        "dynamic",
    )
    neutral: ClassVar[Collection[str]] = (
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "disable_exllama",
        "exllama_config",
        "lm_head",
        "max_input_length",
        "meta",
        "method",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "modules_in_block_to_quantize",
        "module_name_preceding_first_block",
        "mse",
        "offload_to_disk",
        "pack_impl",
        "pad_token_id",
        "quantizer",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
    )

    def read_config(self, fields: ConfigFields) -> None:
        """Read the bits, the size of the groups, and how zeros are stored.

        Raises:
            ModelError: there are not four or eight bits, or it is another format.
        """
        config = self.context.config
        self._layout = _read_layout(fields, config)
        one_of(fields, "pack_dtype", config.get("pack_dtype", "int32"), ["int32"])
        name = "checkpoint_format" if config.get("checkpoint_format") else "format"
        kind = config.get(name) or "gptq"
        one_of(fields, name, kind, ["gptq", "gptq_v2"])
        self._stores_less = kind == "gptq"
        self._rules = {
            pattern: self._read_rule(pattern, rule)
            for pattern, rule in fields.table("dynamic").items()
        }

    def _read_rule(self, pattern: str, rule: Any) -> _Layout | None:
        """Return how modules are stored that fit a pattern of `dynamic`; None if as numbers.

        Raises:
            ModelError: it is no pattern, or has unsupported changes.
        """
        try:
            matches(pattern, _prefix(pattern), "", "dynamic")
        except ValueError as cause:
            raise ModelError(f"{SOURCE}: {cause}") from cause
        if pattern.startswith(_LEAVES):
            return None
        values = ConfigFields({pattern: rule}, f"{SOURCE}.dynamic").table(pattern)
        place, config = f"{SOURCE}.dynamic.{pattern}", self.context.config
        refuse_unknown(values, (*_LAYOUT, *GPTQ.neutral), place)
        changed = {name: values.get(name, config.get(name)) for name in _LAYOUT}
        return _read_layout(ConfigFields(changed, place), changed)

    def _layout_of(self, stored: QuantizedWeight) -> _Layout:
        """Return how a matrix is stored.

        Raises:
            ValueError: it is not quantized by the config.
        """
        module = stored.name.rpartition(".")[0]
        for pattern, layout in self._rules.items():
            if matches(pattern, _prefix(pattern), module, "dynamic"):
                if layout is None:
                    raise ValueError(
                        f"dynamic: {short(pattern)} leaves it as it was, expected a weight of "
                        f"numbers; there are {', '.join(sorted(stored.tensors))}"
                    )
                return layout
        return self._layout

    def check_tensors(self, stored: QuantizedWeight) -> None:
        """Check names, dtypes and shapes.

        Raises:
            ValueError: one is wrong.
        """
        layout = self._layout_of(stored)
        (rows, columns), per = stored.shape, 32 // layout.bits
        groups = -(-columns // (layout.group or columns))
        expect(
            stored,
            {
                "qweight": ((torch.int32,), (-(-columns // per), rows)),
                "qzeros": ((torch.int32,), (groups, -(-rows // per))),
                "scales": (SCALES, (groups, rows)),
                "g_idx": ((torch.int32, torch.int64), (columns,)),
            },
            optional=() if layout.reorders else ("g_idx",),
        )

    def read(self, stored: QuantizedWeight) -> QuantizedMatrix:
        """Return codes with scales and, if zeros differ, offsets; or dequantized numbers.

        Raises:
            ValueError: a tensor is missing, or its dtype, shape or content is wrong.
        """
        self.check(stored)
        (rows, columns), tensors = stored.shape, stored.tensors
        layout, zeros = self._layout_of(stored), tensors["qzeros"]
        if self._stores_less:  # subtracted from all of an int32, so that a zero may have borrowed
            zeros = zeros + _ONES[layout.bits]
        codes = unpack(tensors["qweight"].t(), layout.bits, columns)
        zeros = unpack(zeros, layout.bits, rows).t()
        if layout.bits == 8:
            codes, zeros = codes.bitwise_xor(128).view(torch.int8), zeros.short() - 128
        return affine(
            codes,
            layout.bits,
            layout.group or columns,
            tensors["scales"].t().contiguous(),
            zeros,
            tensors.get("g_idx"),
        )

    def alignment(
        self, shape: tuple[int, int], stored: QuantizedWeight | None = None
    ) -> int | None:
        """Return the size of the groups; None if `g_idx` may have put columns of one apart."""
        if stored is None or "g_idx" in stored.tensors:
            return None
        return alignment(shape[1], self._layout_of(stored).group)

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets; None if matrices differ in these."""
        if not self.context.config:
            return None
        layouts = {self._layout, *self._rules.values()} - {None}
        if len(layouts) > 1 or self._layout.reorders:
            return None
        return stored_bytes(
            shape, self._layout.bits, self._layout.group, not self._layout.symmetric
        )


_LAYOUT = ("bits", "group_size", "desc_act", "sym")
"""Fields of the config that a rule of `dynamic` can change."""


def _read_layout(fields: ConfigFields, config: Mapping[str, Any]) -> _Layout:
    """Return how matrices are stored.

    Raises:
        ModelError: there are not four or eight bits, or a field has another wrong value.
    """
    one_of(fields, "bits", config.get("bits"), list(_ONES))
    return _Layout(
        bits=int(config["bits"]),
        group=group_size(fields, "group_size", config.get("group_size")),
        reorders=fields.flag("desc_act", False),
        symmetric=fields.flag("sym", True),
    )


def _prefix(pattern: str) -> str:
    return _LEAVES if pattern.startswith(_LEAVES) else _CHANGES


_WHOLE = 16
"""Bits from which a number is no code."""


class AutoRound(GPTQ):
    """Checkpoints that AutoRound writes under its own name, packed as in GPTQ.

    Layers that it left as they were have plain weights.
    """

    contract = 1
    known = (
        "act_bits",
        "bits",
        "data_type",
        "extra_config",
        "group_size",
        "packing_format",
        "sym",
    )
    neutral = (
        *GPTQ.neutral,
        "act_data_type",
        "act_dynamic",
        "act_group_size",
        "act_sym",
        "amp",
        "autoround_version",
        "enable_alg_ext",
        "enable_minmax_tuning",
        "enable_norm_bias_tuning",
        "enable_quanted_input",
        "gradient_accumulate_steps",
        "iters",
        "low_cpu_mem_usage",
        "low_gpu_mem_usage",
        "lr",
        "minmax_lr",
        "momentum",
        "nsamples",
        "provider",
        "regex_config",
        "scale_dtype",
        "seqlen",
        "supported_types",
        "to_quant_block_names",
    )

    def read_config(self, fields: ConfigFields) -> None:
        """Read the bits, the size of the groups, and the packing.

        Raises:
            ModelError: there are not four or eight bits, or it is packed in another way.
        """
        config = self.context.config
        packing = config.get("packing_format") or "auto_round:auto_gptq"
        one_of(fields, "packing_format", packing, ["auto_round:auto_gptq", "auto_round:gptq"])
        one_of(fields, "data_type", config.get("data_type") or "int", ["int"])
        one_of(fields, "act_bits", config.get("act_bits") or _WHOLE, [_WHOLE, 32])
        super().read_config(fields)
        for name, layer in fields.table("extra_config").items():
            self._check_layer(name, layer)

    def _check_layer(self, name: str, layer: object) -> None:
        """Check that a layer with an entry of its own is stored as the others, or not quantized.

        Raises:
            ModelError: it is not.
        """
        if not isinstance(layer, dict):
            raise ConfigFields(self.context.config, SOURCE).error(
                f"extra_config.{name}", f"expected a table, got {short(layer)}"
            )
        fields = ConfigFields(layer, f"{SOURCE}.extra_config.{name}")
        bits = layer.get("bits", self._layout.bits)
        if bits in (_WHOLE, 32):
            return
        one_of(fields, "bits", bits, [self._layout.bits, _WHOLE])
        size = group_size(fields, "group_size", layer.get("group_size", self._layout.group or -1))
        one_of(fields, "group_size", size, [self._layout.group])
