"""Qwen 2 and 3 with mixtures of experts; Qwen2 has a shared expert for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import MLP, ExpertsConfig, MixtureOfExperts

from .llama import Llama
from .mixtral import Mixture
from .qwen import Qwen2


class QwenMixture(Mixture):
    """Common to both: some layers may be dense."""

    contract = 1
    has_shared_expert = False

    def mlp(self, layer: int) -> MLP:
        """Return a mixture of experts, or the MLP of a dense layer."""
        fields = self._fields
        every = fields.whole("decoder_sparse_step", 1)
        if layer in self._dense_layers() or (layer + 1) % every:
            return Llama.mlp(self, layer)
        name = "num_experts" if "num_experts" in self.context.config.hf else "num_local_experts"
        count, per_token = self.read_counts(name)
        shared = None
        if self.has_shared_expert:
            shared = fields.whole("shared_expert_intermediate_size")
        experts = ExpertsConfig(
            count=count,
            per_token=per_token,
            width=fields.whole("moe_intermediate_size"),
            normalize=fields.flag("norm_topk_prob", False),
            shared_width=shared,
        )
        return MixtureOfExperts(f"model.layers.{layer}.mlp", self._hidden, experts, self.context)

    def _dense_layers(self) -> list[int]:
        layers = self.context.config.hf.get("mlp_only_layers") or []
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self._fields.error(
                "mlp_only_layers", f"expected a list of layers' numbers, got {short(layers)}"
            )
        return layers


class Qwen2Moe(QwenMixture, Qwen2):
    """Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al., 2024)."""

    contract = 1
    replayable = True
    has_shared_expert = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen2.config_defaults,
        "num_key_value_heads": 16,
    }

    def attention_biases(self) -> tuple[bool, bool]:
        """Return the biases of `qkv_bias`."""
        return self._fields.flag("qkv_bias", True), False

    def slides(self, layer: int, limit: int) -> bool:
        """Return whether a layer has a sliding window: every other one below the limit."""
        return layer < limit and layer % 2 == 0


class Qwen3Moe(QwenMixture):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and others (Yang et al., 2025)."""

    contract = 1
    replayable = True
    head_norms = True
    has_window = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
    }

    def windows(self) -> list[int | None]:
        """Return the sliding window of all layers, if `use_sliding_window` is set."""
        used = self._fields.flag("use_sliding_window", False)
        return super().windows() if used else [None] * self._num_layers
