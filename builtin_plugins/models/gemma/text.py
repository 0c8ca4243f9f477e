"""Gemma 2 and 3: the Llama architecture with norms after each part, windows and soft caps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hardpoint.builtin_plugins.models.layer_types import TypedLayers
from hardpoint.builtin_plugins.models.llama import FULL, SLIDING, DecoderLayer
from hardpoint.plugins import ModelContext
from hardpoint.toolkit.layers import RMSNorm, RotaryEmbedding


class _Gemma(TypedLayers):
    """Common to both.

    The weights of norms are added to 1, embeddings are multiplied by the square root of
    the hidden size, and the outputs of attention and MLP are normalized before they are added.
    """

    contract = 1
    activation_field = "hidden_activation"
    default_activation = "gelu_pytorch_tanh"

    def __init__(self, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        fields = self._fields
        if fields.flag("use_bidirectional_attention", False):
            raise fields.error(
                "use_bidirectional_attention", "expected false (causal attention), got true"
            )
        self._attention_scale = 1.0 / math.sqrt(fields.number("query_pre_attn_scalar"))
        self._attention_softcap = self._softcap("attn_logit_softcapping")
        self._logits_softcap = self._softcap("final_logit_softcapping")

    def attention_scale(self) -> float:
        """Return 1 / sqrt(query_pre_attn_scalar)."""
        return self._attention_scale

    def attention_softcap(self) -> float | None:
        """Return `attn_logit_softcapping`."""
        return self._attention_softcap

    def embedding_scale(self) -> float:
        """Return sqrt(hidden_size), rounded to the dtype of the weights."""
        return float(torch.tensor(math.sqrt(self._hidden)).to(self.context.dtype))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states, in float32, limited by the soft cap."""
        logits, cap = super().compute_logits(hidden), self._logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _softcap(self, name: str) -> float | None:
        """Return a soft cap; a field that is null switches it off."""
        value = self._hf.get(name)
        return None if value is None else self._fields.positive(name, value)

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        after_attention, before_mlp, after_mlp = (
            self._rms_norm(f"model.layers.{layer}.{name}_layernorm", self._hidden)
            for name in ("post_attention", "pre_feedforward", "post_feedforward")
        )
        return dataclasses.replace(
            super()._decoder_layer(layer),
            attention_output_norm=after_attention,
            mlp_norm=before_mlp,
            mlp_output_norm=after_mlp,
        )

    def _rms_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(name, size, self._eps, self.context, offset=1.0)


class Gemma2(_Gemma):
    """Gemma 2 (Gemma Team, 2024): soft caps, and a window in every other layer."""

    contract = 1
    replayable = True
    interval = 2
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }


class Gemma3(_Gemma):
    """The text model of Gemma 3 (Gemma Team, 2025).

    q and k are normalized per head, and layers with a window have rotary embeddings of their own.
    """

    contract = 1
    replayable = True
    head_norms = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }

    def full_attention_interval(self) -> int:
        """Return `sliding_window_pattern`."""
        return self._fields.whole("sliding_window_pattern", 6)

    def rotary_embeddings(self) -> list[RotaryEmbedding]:
        """Return each layer's, of its type.

        The parameters are in `rope_parameters` by type of layer, or in `rope_theta` and
        `rope_scaling` for full attention, and `rope_local_base_freq` for windows.
        """
        return self.rotary_embeddings_by_type(
            {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
        )
