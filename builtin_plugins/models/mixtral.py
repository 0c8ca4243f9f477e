"""Mixtral (Jiang et al., 2024): the Llama architecture with a mixture of experts in each layer."""

from __future__ import annotations

from typing import ClassVar

import torch

from hardpoint.plugins import ForwardBatch
from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import MLP, ExpertsConfig, MixtureOfExperts

from .llama import Llama

_MAX_EXPERTS = 1 << 12  # far above all models that are known


class Mixture(Llama):
    """Common to Llama-like models with mixtures of experts."""

    contract = 1
    parallelism: ClassVar[tuple[str, ...]] = ("tensor", "pipeline", "expert")

    @property
    def routed_experts(self) -> tuple[int, int]:
        """All layers, also those that have no experts."""
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


class Mixtral(Mixture):
    """Mixtral 8x7B, 8x22B and others."""

    contract = 1
    replayable = True

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
