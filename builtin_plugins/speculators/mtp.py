"""Speculator with the multi-token prediction layer of the engine's model."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.plugins import ModelError

from .trained_head import TrainedHead

_HEADS = {
    "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
    "Qwen3NextForCausalLM": "Qwen3NextMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5MTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5MTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeMTP",
}
"""The architecture of the layer, by the architecture of the model."""


class MTP(TrainedHead):
    """Drafts with the layer for multi-token prediction in the files of the engine's model.

    It shares the embedding and the output layer of the model (DeepSeek-AI, arXiv:2412.19437). Of
    several such layers, the first drafts all tokens.
    """

    contract = 1

    def open(self) -> Any:
        """Return the layer.

        Raises:
            ModelError: the model has none, or it cannot be loaded.
        """
        context = self.context
        assert context.loaded is not None
        assert context.open_head is not None
        loader = context.loaded.loader
        architecture = "" if loader is None else loader.config().architecture
        if architecture not in _HEADS:
            raise ModelError(
                f"model: expected a model with a layer for multi-token prediction "
                f"({', '.join(_HEADS)}), got {architecture}"
            )
        return context.open_head(context.MAIN_MODEL, _HEADS[architecture])

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return logits of the output layer of the engine's model."""
        logits = self._model.compute_logits(self.head.normalize(output))
        return logits.to(torch.float32, copy=True)
