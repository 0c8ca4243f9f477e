"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): a mixture of experts with sinks in attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ClampedSwiGLU
from hardpoint.toolkit.layers import (
    MLP,
    ExpertsConfig,
    MixtureOfExperts,
    RotaryEmbedding,
    Vector,
)

from .layer_types import TypedLayers
from .llama import DecoderLayer, Llama
from .mixtral import Mixture

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary parameters of a config that has none."""


class GptOss(TypedLayers, Mixture):
    """gpt-oss-20b and 120b: every other layer has a window, all matrices but the head's biases."""

    contract = 1
    replayable = True
    interval = 2
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    }

    def attention_biases(self) -> tuple[bool, bool]:
        """Return `attention_bias`, for q, k and v and for the output projection."""
        bias = self._fields.flag("attention_bias", True)
        return bias, bias

    def rotary_embeddings(self) -> Sequence[RotaryEmbedding | None]:
        """Return the rotary embedding of all layers, by default YaRN as in the first files."""
        fields = dict(self._hf)
        if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
            fields["rope_parameters"] = _YARN
        return [self.rotary_embedding(fields)] * self._num_layers

    def mlp(self, layer: int) -> MLP:
        """Return a mixture of experts."""
        fields = self._fields
        count, per_token = self.read_counts("num_local_experts")
        experts = ExpertsConfig(
            count=count,
            per_token=per_token,
            width=self._intermediate,
            normalize=True,  # the softmax of the chosen ones
            router="router",
            has_biases=True,
            clamped=ClampedSwiGLU(
                fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
            ),
        )
        return MixtureOfExperts(f"model.layers.{layer}.mlp", self._hidden, experts, self.context)

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        sinks = Vector(
            f"model.layers.{layer}.self_attn.sinks",
            self._heads,
            self.context,
            dtype=torch.float32,
            mine=self._my_heads,
        )
        return dataclasses.replace(Llama._decoder_layer(self, layer), sinks=sinks)
