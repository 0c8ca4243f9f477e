"""GLM-4 and GLM-4.5 (GLM Team, 2025): Llama with half of each head rotated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hardpoint.plugins import ModelContext

from .llama import DecoderLayer, Llama
from .mixtral import MixtureAfterDense


class Glm4(Llama):
    """GLM-4-0414: results of attention and the MLP are normalized too; neighbors are rotated."""

    contract = 1
    replayable = True
    is_fused_mlp = True
    rotates_part = True
    rotates_neighbours = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }

    def attention_biases(self) -> tuple[bool, bool]:
        """Return the biases of q, k and v; the output projection has none."""
        return self._fields.flag("attention_bias", True), False

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        after_attention, after_mlp = (
            self._rms_norm(f"model.layers.{layer}.{name}_layernorm", self._hidden)
            for name in ("post_self_attn", "post_mlp")
        )
        return dataclasses.replace(
            super()._decoder_layer(layer),
            attention_output_norm=after_attention,
            mlp_output_norm=after_mlp,
        )


class Glm4Moe(MixtureAfterDense):
    """GLM-4.5, 4.6 and 4.7: a mixture of experts in all layers but the first."""

    contract = 1
    replayable = True
    rotates_part = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    }

    def __init__(self, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        self.head_norms = bool(context.config.hf.get("use_qk_norm"))
        super().__init__(context)

    def attention_biases(self) -> tuple[bool, bool]:
        """Return the biases of q, k and v; the output projection has none."""
        return self._fields.flag("attention_bias", False), False
