"""Layers for multi-token prediction (DeepSeek-AI, arXiv:2412.19437), from a model's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hardpoint.builtin_plugins.models.deepseek import DeepseekV3
from hardpoint.builtin_plugins.models.glm4 import Glm4Moe
from hardpoint.builtin_plugins.models.llama import FULL
from hardpoint.builtin_plugins.models.qwen3_5 import Qwen35, Qwen35Moe
from hardpoint.builtin_plugins.models.qwen3_next import Qwen3Next
from hardpoint.plugins import ModelContext, ModelError
from hardpoint.toolkit.layers import Linear, PackedLayer

from .layer import HeadLayer


class MTPLayer(HeadLayer):
    """A decoder layer over a projection of the embedding and the hidden state, each normalized."""

    contract = 1
    parts: ClassVar[tuple[str, str, str]] = ("", "", "")
    """Names of the norm of embeddings, the norm of hidden states, and the projection."""

    def __init__(self, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        (layer,) = self._my_layers
        embedding, hidden, projection = (name.format(layer=layer) for name in self.parts)
        self._embedding_norm = self._rms_norm(embedding, self._hidden)
        self._hidden_norm = self._rms_norm(hidden, self._hidden)
        self._projection = Linear(
            [(projection, self._hidden)], 2 * self._hidden, self.context, is_hooked=False
        )

    def head_layers(self) -> list[PackedLayer]:
        """Return the layers that have weights, besides the decoder layer."""
        return [self._embedding_norm, self._hidden_norm, self._projection]

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projection of both."""
        joined = torch.cat([self._embedding_norm(embedded), self._hidden_norm(hidden)], -1)
        return self._projection(joined)


class LastLayer(MTPLayer):
    """The layer after the layers of the model, as in DeepSeek-V3."""

    contract = 1
    parts: ClassVar[tuple[str, str, str]] = (
        "model.layers.{layer}.enorm",
        "model.layers.{layer}.hnorm",
        "model.layers.{layer}.eh_proj",
    )

    @classmethod
    def head_fields(cls, hf: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the layer after the layers of the model.

        Raises:
            ModelError: the config has no such layer.
        """
        count, layers = hf.get("num_nextn_predict_layers"), hf.get("num_hidden_layers")
        if not isinstance(count, int) or count < 1 or not isinstance(layers, int):
            raise ModelError(
                f"num_nextn_predict_layers: expected at least 1 for multi-token prediction, "
                f"got {count!r}"
            )
        return layers, {}

    def _stored(self, name: str) -> str:
        (layer,) = self._my_layers
        return name.replace("model.norm.", f"model.layers.{layer}.shared_head.norm.")


class DeepseekMTP(LastLayer, DeepseekV3):
    """The layer of DeepSeek-V3, R1 and models with their architecture."""

    contract = 1


class Glm4MoeMTP(LastLayer, Glm4Moe):
    """The layer of GLM-4.5 and later models."""

    contract = 1


class SeparateLayer(MTPLayer):
    """A layer with attention under names of its own, as in Qwen3-Next."""

    contract = 1
    names: ClassVar[Mapping[str, str]] = {"model.layers.0.": "mtp.layers.0.", "model.": "mtp."}
    parts: ClassVar[tuple[str, str, str]] = (
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.fc",
    )

    @classmethod
    def head_fields(cls, hf: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:  # noqa: ARG003
        """Return the first layer, which has attention."""
        return 0, {"layer_types": [FULL]}

    def following(self, output: torch.Tensor) -> torch.Tensor:
        """Return the hidden states for the next draft, normalized."""
        return self.normalize(output)


class Qwen3NextMTP(SeparateLayer, Qwen3Next):
    """The layer of Qwen3-Next."""

    contract = 1


class Qwen35MTP(SeparateLayer, Qwen35):
    """The layer of Qwen3.5 with dense layers."""

    contract = 1


class Qwen35MoeMTP(SeparateLayer, Qwen35Moe):
    """The layer of Qwen3.5 with experts."""

    contract = 1
