"""EAGLE-3 heads (Li et al., arXiv:2503.01840), in the format of EAGLE and SpecForge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hardpoint.plugins import ForwardBatch, ModelContext
from hardpoint.toolkit.layers import Linear, LMHead, PackedLayer

from .layer import HeadLayer

_NUM_HIDDEN = 3  # hidden states that `fc` joins
_MAX_SIZE = 1 << 20


class Eagle3Head(HeadLayer):
    """A Llama layer over embeddings and hidden states, each normalized, side by side.

    Attributes:
        draft_vocab_size: tokens that it may draft.
    """

    contract = 1
    names: ClassVar[Mapping[str, str]] = {"model.layers.0.": "midlayer.", "model.norm.": "norm."}

    def __init__(self, context: ModelContext) -> None:
        """Create the layers.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        fields, context = self._fields, self.context
        vocab_size = context.config.vocab_size
        self.draft_vocab_size = fields.whole("draft_vocab_size", vocab_size, at_most=_MAX_SIZE)
        target_size = fields.whole("target_hidden_size", self._hidden, at_most=_MAX_SIZE)
        self._fc = Linear([("fc", self._hidden)], _NUM_HIDDEN * target_size, context)
        self._hidden_norm = self._rms_norm("midlayer.hidden_norm", self._hidden)
        self._draft_head = LMHead("lm_head", self.draft_vocab_size, self._hidden, context)
        self._keeps_normed = fields.flag("norm_before_residual", False)

    @classmethod
    def head_fields(cls, hf: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:  # noqa: ARG003
        """Return the first layer."""
        return 0, {}

    def head_layers(self) -> list[PackedLayer]:
        """Return the layers that have weights, besides the decoder layer."""
        return [self._fc, self._hidden_norm, self._draft_head]

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [tokens, hidden_size] of three layers side by side."""
        return self._fc(hidden)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return both, normalized, side by side."""
        (layer,) = self._decoder_layers
        assert layer.input_norm is not None
        return torch.cat([layer.input_norm(embedded), self._hidden_norm(hidden)], -1)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the residual stream after the layer, [tokens, hidden_size]."""
        if batch.hidden is None:
            return super().forward(batch)
        embedded, hidden = (x.contiguous() for x in batch.hidden.chunk(2, -1))
        (layer,), (rope, *_) = self._decoder_layers, self._ropes
        assert rope is not None
        joined = self.join(embedded, hidden)
        residual = joined[:, self._hidden :].contiguous() if self._keeps_normed else hidden
        q, k, v = self._project(layer, joined, rope)
        attended = batch.attend(0, q, k, v, rope.at(batch.positions))
        h = self._add(layer.mlp_norm, residual, self._output(layer, attended))
        return residual.add_(layer.mlp(h))

    def draft_logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, draft_vocab_size] of results of `forward`."""
        return self._draft_head(self.normalize(output))

    def projections(self, layer: int) -> tuple[Linear, Linear]:
        """Return the projections of twice the hidden size to q, k and v, and of the output."""
        _, output = super().projections(layer)
        name, size = f"model.layers.{layer}.self_attn", self._head_size
        heads = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}
        parts = [(f"{name}.{part}_proj", count * size) for part, count in heads.items()]
        qkv_bias, _ = self.attention_biases()
        return Linear(parts, 2 * self._hidden, self.context, bias=qkv_bias), output
