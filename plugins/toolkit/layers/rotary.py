"""Rotary position embeddings (RoPE), with the variants that configs name.

Importing this module loads torch, as `models` does.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hardpoint.plugins.model import ModelContext
from hardpoint.toolkit.hf_config import ConfigFields, short

__all__ = ["RotaryEmbedding"]

_log = logging.getLogger("hardpoint")
_ROPE_ROWS = 1 << 16  # positions per computation of angles
_DEFAULT_THETA = 10000.0
_LENGTH_DEPENDENT = ("dynamic",)
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su")  # and "yarn" with factors of its kind, in the first files of Phi-3


class _Rotation(NamedTuple):
    """The rotation of a config.

    Attributes:
        frequencies: inverse ones, float32 [size / 2].
        scale: factor of cosines and sines.
        variant: as in `RotaryEmbedding`.
        notes: lines for the log.
    """

    frequencies: torch.Tensor
    scale: float = 1.0
    variant: str = ""
    notes: tuple[str, ...] = ()


class RotaryEmbedding:
    """The angles of all positions (RoPE, arXiv:2104.09864), in float32.

    LongRoPE (arXiv:2402.13753) has two sets of factors, for sequences up to and above
    `original_max_position_embeddings`. Keys in the cache would have to be rotated again when a
    sequence grows beyond it, so that max_model_len decides for all sequences.

    Attributes:
        size: elements of a head that are rotated, the first ones; `partial_rotary_factor` of all.
        variant: inputs of the angles besides the config, for `Model.kv_variant`.
    """

    def __init__(
        self,
        head_size: int,
        context: ModelContext,
        *,
        source: str,
        fields: Mapping[str, Any] | None = None,
        is_partial: bool = True,
    ) -> None:
        """Compute the frequencies; `allocate` computes the table.

        Args:
            head_size: elements of a head.
            context: the context of the model; its config has the parameters.
            source: names the config in messages.
            fields: instead of the config's, for models that have several sets of parameters.
            is_partial: whether `partial_rotary_factor` is read. Most models of transformers rotate
                whole heads, whatever it is.

        Raises:
            ModelError: the config's RoPE is not supported.
        """
        self._frequencies, self._scale, self.variant, self._notes = _rotation(
            context.config.hf if fields is None else fields,
            head_size,
            source,
            context.max_model_len,
            is_partial=is_partial,
        )
        self._context = context
        self._table = torch.empty(0)
        self._gather_rows = context.ops.gather_rows
        self.size = 2 * len(self._frequencies)

    def allocate(self) -> None:
        """Compute the table for positions 0 to max_model_len - 1."""
        for note in self._notes:
            _log.warning("model: %s", note)
        rows, half = self._context.max_model_len, len(self._frequencies)
        self._table = torch.empty((rows, 2 * half), device=self._context.device)
        for start in range(0, rows, _ROPE_ROWS):
            end = min(start + _ROPE_ROWS, rows)
            positions = torch.arange(start, end, dtype=torch.float32)
            angles = torch.outer(positions, self._frequencies)
            self._table[start:end, :half] = angles.cos() * self._scale
            self._table[start:end, half:] = angles.sin() * self._scale

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles for `ForwardBatch.attend`, float32 [tokens, size]."""
        return self._gather_rows(self._table, positions)


def _rotation(
    hf: Mapping[str, Any], head_size: int, source: str, max_model_len: int, *, is_partial: bool
) -> _Rotation:
    fields = ConfigFields(hf, source)
    parameters = _parameters(hf, fields)
    notes = _lost_theta(fields, parameters["rope_theta"])
    kind = parameters["rope_type"]
    if not isinstance(kind, str):
        raise fields.error("rope_type", f"expected a string, got {short(kind)}")
    size = head_size
    if kind != "proportional":  # where all elements are paired, and the angles of some are 0
        factor = parameters.pop("partial_rotary_factor", None)
        size = _rotary_size(factor if is_partial else None, head_size, fields)
    if kind in _LENGTH_DEPENDENT:
        raise fields.error(
            "rope_type", f"{kind!r} depends on the running length and is not supported"
        )
    is_long = kind in _LONGROPE or (kind == "yarn" and "long_factor" in parameters)
    if not is_long and kind not in ("default", "factors"):
        return _Rotation(*_scaled(parameters, hf, size, fields), notes=notes)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    powers = parameters["rope_theta"] ** exponents
    if is_long:
        rotation = _longrope(parameters, powers, fields, max_model_len)
        return rotation._replace(notes=notes + rotation.notes)
    frequencies = 1.0 / powers
    if kind == "factors":
        frequencies = frequencies / _factors("factors", parameters, len(powers), fields)
    return _Rotation(frequencies, notes=notes)


def _rotary_size(factor: Any, head_size: int, fields: ConfigFields) -> int:
    name = "partial_rotary_factor"
    size = head_size if factor is None else int(fields.positive(name, factor) * head_size)
    if size > head_size or size < 2 or size % 2:
        raise fields.error(
            name,
            f"expected a number of at most 1 that gives an even part of the head size {head_size}, "
            f"got {short(factor)}",
        )
    return size


def _factors(
    name: str, parameters: Mapping[str, Any], count: int, fields: ConfigFields
) -> torch.Tensor:
    """Return a field that is a list of numbers above 0, float32 [count]."""
    factors = parameters.get(name)
    if not isinstance(factors, list) or len(factors) != count:
        raise fields.error(name, f"expected {count} numbers > 0, got {short(factors)}")
    numbers = [fields.positive(name, factor) for factor in factors]
    return torch.tensor(numbers, dtype=torch.float32)


def _longrope(
    parameters: Mapping[str, Any],
    powers: torch.Tensor,
    fields: ConfigFields,
    max_model_len: int,
) -> _Rotation:
    """Return the result of `_rotation` for LongRoPE; `powers` are the powers of theta."""
    longest = fields.whole("max_position_embeddings")
    stated = parameters.get(_ORIGINAL)
    original = fields.whole(_ORIGINAL, longest if stated is None else stated)
    if original < 2:
        raise fields.error(_ORIGINAL, f"expected at least 2, got {original}")
    both = {
        variant: _factors(f"{variant}_factor", parameters, len(powers), fields)
        for variant in ("short", "long")
    }
    variant = "long" if max_model_len > original else "short"
    scale = parameters.get("attention_factor")
    if scale is None:
        factor = parameters.get("factor")
        factor = longest / original if factor is None else fields.positive("factor", factor)
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = fields.positive("attention_factor", scale)
    notes: tuple[str, ...] = ()
    if variant == "long":
        notes = (
            f"max_model_len {max_model_len} is above {_ORIGINAL} {original}, so that LongRoPE's "
            f"long factors rotate all sequences, short ones too; up to {original}, the short "
            "factors do",
        )
    return _Rotation(1.0 / (both[variant] * powers), scale, variant, notes)


def _parameters(hf: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    parameters = fields.rope_parameters()
    stated = (values.get("rope_theta") for values in (parameters, hf))
    theta = next((theta for theta in stated if theta is not None), _DEFAULT_THETA)
    parameters["rope_theta"] = fields.positive("rope_theta", theta)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", "default")
    if hf.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise fields.error(
            "rope_parameters", f"a set per layer type is not supported, got {short(parameters)}"
        )
    return parameters


def _lost_theta(fields: ConfigFields, theta: float) -> tuple[str, ...]:
    """Return a note if `rope_scaling` hides another `rope_theta`, as it does in transformers."""
    hidden = fields.table("rope_parameters").get("rope_theta")
    if not fields.table("rope_scaling") or hidden is None or hidden == theta:
        return ()
    return (
        f"rope_scaling replaces rope_parameters, so that rope_theta is {theta:g} and not "
        f"{short(hidden)}; set rope_theta in rope_scaling for another one",
    )


def _scaled(
    parameters: dict[str, Any], hf: Mapping[str, Any], head_size: int, fields: ConfigFields
) -> tuple[torch.Tensor, float]:
    kind = parameters["rope_type"]
    try:  # on use: importing transformers takes seconds, and few models need it
        from transformers import LlamaConfig  # noqa: PLC0415
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415
    except ModuleNotFoundError as cause:
        raise fields.error(
            "rope_type",
            f"{short(kind)} needs {cause.name}, which is not installed: pip install transformers",
        ) from cause
    if kind not in ROPE_INIT_FUNCTIONS:
        known = sorted({"default", *ROPE_INIT_FUNCTIONS} - set(_LENGTH_DEPENDENT))
        raise fields.error("rope_type", f"expected one of {', '.join(known)}, got {kind!r}")
    if kind != "linear" and hf.get(_ORIGINAL) is not None:  # counts first in transformers
        parameters[_ORIGINAL] = fields.whole(_ORIGINAL)
    if parameters.get("factor") is not None:
        fields.positive("factor", parameters["factor"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LlamaConfig(
                head_dim=head_size,
                hidden_size=head_size,
                num_attention_heads=1,
                max_position_embeddings=hf["max_position_embeddings"],
                rope_parameters=parameters,
            )
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except Exception as cause:  # wrong parameters can make it raise anything
        raise fields.error(
            "rope_parameters", f"{short(parameters)} does not work: {cause}"
        ) from cause
    if not bool(frequencies.isfinite().all()) or not 0 < scale < math.inf:
        raise fields.error(
            "rope_parameters", f"{short(parameters)} give frequencies that are not finite"
        )
    return frequencies.float(), float(scale)
