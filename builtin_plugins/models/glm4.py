"""GLM-4 and GLM-4.5 (GLM Team, 2025): Llama with half of each head rotated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hardpoint.plugins import ModelContext
from hardpoint.toolkit.layers import MLP, ExpertsConfig, MixtureOfExperts, SigmoidRouting

from .llama import DecoderLayer, Llama
from .mixtral import Mixture


class Glm4(Llama):
    """GLM-4-0414: what attention and the MLP return is normalised too; neighbours are rotated."""

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


class Glm4Moe(Mixture):
    """GLM-4.5, 4.6 and 4.7: a mixture of experts in all layers but the first."""

    contract = 1
    replayable = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
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
        """Return that of q, k and v; the output projection has none."""
        return self._fields.flag("attention_bias", False), False

    def mlp(self, layer: int) -> MLP:
        """Return a mixture of experts, or the MLP of one of the first layers."""
        fields = self._fields
        has_dense = self._hf.get("first_k_dense_replace") != 0
        if has_dense and layer < fields.whole("first_k_dense_replace", 1):
            return super().mlp(layer)
        count, per_token = self.read_counts("n_routed_experts")
        width = fields.whole("moe_intermediate_size")
        experts = ExpertsConfig(
            count=count,
            per_token=per_token,
            width=width,
            normalize=fields.flag("norm_topk_prob", True),
            shared="shared_experts",
            shared_width=width * fields.whole("n_shared_experts", 1),
            weighs_shared=False,
            sigmoid=self._routing(count, per_token),
        )
        return MixtureOfExperts(f"model.layers.{layer}.mlp", self._hidden, experts, self.context)

    def _routing(self, count: int, per_token: int) -> SigmoidRouting:
        """Return how experts are chosen.

        Raises:
            ModelError: the groups do not divide the experts, or have too few.
        """
        fields = self._fields
        groups, chosen = fields.whole("n_group", 1), fields.whole("topk_group", 1)
        if count % groups or (groups > 1 and count // groups < 2):
            raise fields.error(
                "n_group",
                f"expected a divisor of n_routed_experts {count} that leaves 2 of them in a "
                f"group, got {groups}",
            )
        if chosen > groups or chosen * (count // groups) < per_token:
            raise fields.error(
                "topk_group",
                f"expected at most n_group ({groups}), with room for {per_token} experts of a "
                f"token, got {chosen}",
            )
        return SigmoidRouting(
            groups=groups, chosen_groups=chosen, scale=fields.number("routed_scaling_factor", 1.0)
        )
