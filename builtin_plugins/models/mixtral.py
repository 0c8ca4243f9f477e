"""Mixtral (Jiang et al., 2024): the Llama architecture with a mixture of experts in each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ForwardBatch
from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import MLP, ExpertsConfig, MixtureOfExperts, SigmoidRouting

from .llama import Llama

_MAX_EXPERTS = 1 << 12  # far above all models that are known


class Mixture(Llama):
    """Common to Llama-like models with mixtures of experts."""

    contract = 1
    parallelism: ClassVar[tuple[str, ...]] = ("tensor", "pipeline", "expert")

    @property
    def routed_experts(self) -> tuple[int, int]:
        """All layers, also layers without experts."""
        return self._num_layers, self._fields.whole("num_experts_per_tok")

    def run_mlp(self, index: int, h: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Report the experts of each token, if a request asks for them."""
        mlp, routed = self._decoder_layers[index].mlp, batch.routed_experts
        if routed is None or not isinstance(mlp, MixtureOfExperts):
            return mlp(h)
        return mlp(h, routed[:, self._my_layers[index]])

    def read_counts(self, name: str) -> tuple[int, int]:
        """Return how many experts there are, and how many compute a token.

        Args:
            name: field with the number of experts.

        Raises:
            ModelError: they are not counts, or the operations have another activation.
        """
        fields = self._fields
        count = fields.whole(name, at_most=_MAX_EXPERTS)
        per_token = fields.whole("num_experts_per_tok")
        if per_token > count:
            raise fields.error(
                "num_experts_per_tok", f"expected at most {name} ({count}), got {per_token}"
            )
        activation = self.context.config.hf.get("hidden_act") or "silu"
        if activation != "silu":
            raise fields.error("hidden_act", f"expected 'silu' of experts, got {short(activation)}")
        return count, per_token


class MixtureAfterDense(Mixture):
    """Common to models after DeepSeek-V3 (arXiv:2412.19437).

    The first layers are dense. The others have some experts that all tokens share; sigmoids choose
    among the other experts.
    """

    contract = 1

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
        )
        experts = self.route(experts)
        return MixtureOfExperts(f"model.layers.{layer}.mlp", self._hidden, experts, self.context)

    def route(self, experts: ExpertsConfig) -> ExpertsConfig:
        """Return the experts with how they are chosen."""
        groups, chosen = self.read_groups(experts, least=2)
        routing = SigmoidRouting(groups=groups, chosen_groups=chosen, scale=self.expert_scale())
        return dataclasses.replace(experts, sigmoid=routing)

    def expert_scale(self) -> float:
        """Return the factor of the experts' weights."""
        return self._fields.number("routed_scaling_factor", 1.0)

    def read_groups(self, experts: ExpertsConfig, *, least: int) -> tuple[int, int]:
        """Return the number of groups of experts, and the number of groups per token.

        Args:
            experts: the experts.
            least: how many a group has at least.

        Raises:
            ModelError: the groups do not divide the experts, or have too few.
        """
        fields, count = self._fields, experts.count
        groups, chosen = fields.whole("n_group", 1), fields.whole("topk_group", 1)
        if count % groups or (groups > 1 and count // groups < least):
            raise fields.error(
                "n_group",
                f"expected a divisor of n_routed_experts {count} that leaves {least} of them in a "
                f"group, got {groups}",
            )
        if chosen > groups or chosen * (count // groups) < experts.per_token:
            raise fields.error(
                "topk_group",
                f"expected at most n_group ({groups}), with room for {experts.per_token} experts "
                f"of a token, got {chosen}",
            )
        return groups, chosen


class Mixtral(Mixture):
    """Mixtral 8x7B, 8x22B and others."""

    contract = 1
    replayable = True
    has_window = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }

    def mlp(self, layer: int) -> MLP:
        """Return a mixture of experts."""
        count, per_token = self.read_counts("num_local_experts")
        experts = ExpertsConfig(
            count=count,
            per_token=per_token,
            width=self._intermediate,
            normalize=True,
            gate="w1",
            up="w3",
            down="w2",
        )
        name = f"model.layers.{layer}.block_sparse_moe"
        return MixtureOfExperts(name, self._hidden, experts, self.context)
