"""OLMo 2 and 3 (OLMo Team): Llama with norms after attention and the MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.toolkit.layers import RMSNorm, RotaryEmbedding

from .layer_types import TypedLayers
from .llama import LAYER_TYPES, DecoderLayer, Llama


class Olmo2(Llama):
    """OLMo 2 (2024): the results of attention and the MLP are normalized, not their inputs.

    q and k are normalized too, over all heads together.
    """

    contract = 1
    replayable = True
    config_defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def normalise_heads(
        self, q_norm: RMSNorm, k_norm: RMSNorm, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k [tokens, heads, head_size], normalized over all heads of all ranks."""
        communicator = self.context.parallel.tensor
        if communicator.size == 1:
            return q_norm(q.flatten(1)).view_as(q), k_norm(k.flatten(1)).view_as(k)
        assert isinstance(q_norm, _PartialNorm)
        assert isinstance(k_norm, _PartialNorm)
        squares = [part.flatten(1).float().square().mean(-1) for part in (q, k)]
        # All ranks have as many heads; key and value heads that several ranks have count as often.
        means = communicator.all_reduce(torch.stack(squares)) / communicator.size
        return q_norm.normalised(q, means[0]), k_norm.normalised(k, means[1])

    def _decoder_layer(self, layer: int) -> DecoderLayer:
        name, size = f"model.layers.{layer}", self._head_size
        heads = {"q": (self._heads, self._my_heads), "k": (self._kv_heads, self._my_kv_heads)}
        q_norm, k_norm = (
            _PartialNorm(
                f"{name}.self_attn.{part}_norm",
                count * size,
                range(mine.start * size, mine.stop * size),
                self._eps,
                self.context,
            )
            for part, (count, mine) in heads.items()
        )
        return dataclasses.replace(
            super()._decoder_layer(layer),
            input_norm=None,
            mlp_norm=None,
            q_norm=q_norm,
            k_norm=k_norm,
            attention_output_norm=self._rms_norm(f"{name}.post_attention_layernorm", self._hidden),
            mlp_output_norm=self._rms_norm(f"{name}.post_feedforward_layernorm", self._hidden),
        )


class Olmo3(Olmo2, TypedLayers):
    """OLMo 3 (2025): three of four layers have a window; a scaling of RoPE is of the others."""

    contract = 1
    replayable = True
    config_defaults: ClassVar[Mapping[str, Any]] = {
        **Olmo2.config_defaults,
        "sliding_window": 4096,
    }

    def rotary_embeddings(self) -> list[RotaryEmbedding]:
        """Return each layer's, of its type."""
        return self.rotary_embeddings_by_type(dict.fromkeys(LAYER_TYPES, ("rope_theta", 5e5)))


class _PartialNorm(RMSNorm):
    """A norm with a part of the weight in each rank."""

    def __init__(
        self, name: str, size: int, mine: range, eps: float, context: ModelContext
    ) -> None:
        super().__init__(name, len(mine), eps, context)
        self._size, self._mine = size, mine

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(super().shapes(), (self._size,))

    def cuts(self) -> dict[str, Cut]:
        if len(self._mine) == self._size:
            return {}
        return dict.fromkeys(self.shapes(), Cut(0, self._mine.start, self._mine.stop))

    def normalised(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, heads, head_size], normalized.

        Args:
            x: the part of this rank.
            mean: mean of the squares of all parts, float32 [tokens].
        """
        scale = torch.rsqrt(mean + self._eps)[:, None]
        return (x.flatten(1).float() * scale * self._weight).to(x.dtype).view_as(x)
