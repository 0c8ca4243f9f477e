"""Rotary position embedding (Su et al., 2021), in the half-split layout of Hugging Face weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .hf_config import ConfigFields

DEFAULT_THETA = 10000.0
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


class RotaryEmbedding:
    """Tables of cosines and signed sines for all positions."""

    def __init__(
        self,
        hf: Mapping[str, Any],
        head_size: int,
        max_len: int,
        *,
        source: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Compute tables for positions 0 to max_len - 1; `source` names the config in messages.

        Raises:
            ModelError: the config's RoPE is not supported.
        """
        frequencies, scale = _frequencies(hf, head_size, source)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._half = head_size // 2
        # The sign of rotate_half is in the sine table, so that rotation needs a roll only.
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [tokens, 1, head_size] for positions [tokens]."""
        return self._cos[positions], self._sin[positions]

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [tokens, heads, head_size] by the cosines and sines from `at`."""
        return torch.addcmul(x * cos, torch.roll(x, self._half, -1), sin)


def _frequencies(hf: Mapping[str, Any], head_size: int, source: str) -> tuple[torch.Tensor, float]:
    """Return float32 inverse frequencies [head_size / 2], and the factor of cosines and sines."""
    fields = ConfigFields(hf, source)
    parameters = _parameters(hf, fields)
    kind = parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error(
            "partial_rotary_factor",
            f"expected 1.0 (whole heads are rotated), got {parameters['partial_rotary_factor']!r}",
        )
    if kind in _LENGTH_DEPENDENT:
        raise fields.error(
            "rope_type", f"{kind!r} depends on the running length and is not supported"
        )
    if kind not in ("default", "factors"):
        return _scaled(parameters, hf, head_size, fields)
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    if kind == "factors":
        frequencies = frequencies / torch.tensor(parameters["factors"], dtype=torch.float32)
    return frequencies, 1.0


def _parameters(hf: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """Return the RoPE parameters, from `rope_parameters` or `rope_theta` with `rope_scaling`."""
    parameters = fields.table("rope_parameters") or fields.table("rope_scaling")
    theta = parameters.get("rope_theta") or hf.get("rope_theta") or DEFAULT_THETA
    parameters["rope_theta"] = fields.positive("rope_theta", theta)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", "default")
    if hf.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise fields.error(
            "rope_parameters", f"a set per layer type is not supported, got {parameters!r}"
        )
    return parameters


def _scaled(
    parameters: dict[str, Any], hf: Mapping[str, Any], head_size: int, fields: ConfigFields
) -> tuple[torch.Tensor, float]:
    """Compute a scaled variant with functions of transformers."""
    # Imported on use: importing transformers takes seconds, and few models need it.
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    kind = parameters["rope_type"]
    if kind not in ROPE_INIT_FUNCTIONS:
        known = sorted({"default", *ROPE_INIT_FUNCTIONS} - set(_LENGTH_DEPENDENT))
        raise fields.error("rope_type", f"expected one of {', '.join(known)}, got {kind!r}")
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
    except (KeyError, TypeError, ValueError) as cause:
        raise fields.error("rope_parameters", f"{parameters!r} does not work: {cause}") from cause
    return frequencies.float(), float(scale)
