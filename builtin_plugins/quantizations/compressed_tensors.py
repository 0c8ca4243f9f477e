"""Checkpoints of compressed-tensors, which llm-compressor writes: integers and float8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hardpoint.plugins.quantization import QuantizedMatrix, QuantizedWeight
from hardpoint.toolkit.hf_config import ConfigFields, short

from .compressed_groups import FORMATS, Weights, read_weights
from .packed import SOURCE, StoredScheme, one_of, refuse_unknown

_FORMATS = (*FORMATS["int"], *FORMATS["float"])
_ACTIVATIONS = ("input_activations", "output_activations")
_BITS = 8
"""Keys of activations with optional quantization."""


class CompressedTensors(StoredScheme):
    """Integers of four or eight bits, packed (`weight_packed`) or as bytes (`weight`), or float8.

    Activations that are to be quantized with stored scales are rejected: the results would be
    other ones than the checkpoint was made for. Activations of eight bits with scales computed
    while the model runs (`dynamic`) are left as they are, which is nearer to the whole numbers.
    """

    contract = 1
    known = ("config_groups", "format", "kv_cache_scheme", "sparsity_config", "transform_config")
    neutral = ("ignore", "quantization_status", "global_compression_ratio", "version")

    def read_config(self, fields: ConfigFields) -> None:
        """Read the `config_groups`.

        Raises:
            ModelError: one of them quantizes something else than weights, or is not supported.
        """
        config = self.context.config
        one_of(fields, "kv_cache_scheme", config.get("kv_cache_scheme"), [None])
        one_of(fields, "transform_config", config.get("transform_config") or None, [None])
        sparsity = fields.table("sparsity_config").get("format", "dense")
        one_of(fields, "sparsity_config.format", sparsity, ["dense"])
        form = config.get("format", FORMATS["int"][0])
        one_of(fields, "format", form, [*dict.fromkeys(_FORMATS), "mixed-precision"])
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
        """Return codes with scales and, if there are zeros, offsets; or dequantized numbers.

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
        return None if stored is None else self._fitting(stored).alignment(shape[1])

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Return the bytes of codes, scales and offsets; None if matrices differ in these."""
        if not self.context.config:
            return None
        forms = {replace(weights, targets=()) for weights in self._weights}
        return None if len(forms) > 1 else self._weights[0].stored_bytes(shape)

    def _fitting(self, stored: QuantizedWeight) -> Weights:
        """Return the group of the config that the tensors fit.

        Mostly the stored tensors determine the group; if several groups would read them
        differently, their `targets` do.

        Raises:
            ValueError: they fit none, or several that read them in different ways.
        """
        fitting: list[Weights] = []
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


def _read_group(name: str, group: Any) -> Weights:
    """Return how one of the `config_groups` stores weights.

    Raises:
        ModelError: it quantizes something else, or is not supported.
    """
    fields = ConfigFields({name: group}, SOURCE)
    values = fields.table(name)
    place = f"{SOURCE}.{name}"
    refuse_unknown(values, ("targets", "weights", "format", *_ACTIVATIONS), place)
    inner = ConfigFields(values, place)
    for activations in _ACTIVATIONS:
        if settings := values.get(activations):
            _check_activations(inner, activations, settings)
    weights = inner.table("weights")
    if not weights:
        raise inner.error("weights", f"expected a table, got {short(values.get('weights'))}")
    forms = FORMATS.get(str(weights.get("type", "int")), ())
    if forms:
        one_of(inner, "format", values.get("format") or forms[0], forms)
    return read_weights(weights, f"{place}.weights", _read_targets(inner, values.get("targets")))


def _read_targets(fields: ConfigFields, targets: Any) -> tuple[str, ...]:
    """Return the targets of a group.

    Raises:
        ModelError: they are no strings.
    """
    targets = [] if targets is None else targets
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.error("targets", f"expected a list of strings, got {short(targets)}")
    return tuple(targets)


def _check_activations(fields: ConfigFields, name: str, settings: Any) -> None:
    """Check that activations may be left as they are.

    Raises:
        ModelError: their scales are stored, or they have another number of bits.
    """
    is_dynamic = isinstance(settings, dict) and settings.get("dynamic") is True
    if not is_dynamic or settings.get("num_bits") != _BITS:
        raise fields.error(
            name,
            f"activations that are quantized are not supported, expected none, or dynamic "
            f"eight bits, with only the weights quantized here; got {short(settings)}",
        )
