"""GLM-4 (GLM Team, 2025): Llama with half of each head rotated, and norms after each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from .llama import DecoderLayer, Llama


class Glm4(Llama):
    """What attention and the MLP return is normalised too; neighbours are rotated."""

    contract = 1
    replayable = True
    is_fused_mlp = True
    rotates_neighbours = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }

    def attention_biases(self) -> tuple[bool, bool]:
        """Return that of q, k and v; the output projection has none."""
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
