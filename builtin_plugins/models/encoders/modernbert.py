"""ModernBERT (Warner et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.builtin_plugins.models.llama import FULL, SLIDING
from hardpoint.plugins import ForwardBatch, ModelContext
from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import Embedding, Linear, PackedLayer, RotaryEmbedding

from .encoder import EncoderModel, LayerNorm

_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""The field of each type of layer, and its value where the config has none."""


@dataclass(frozen=True)
class _ModernBertLayer:
    kind: str
    attention_norm: LayerNorm | None
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear

    def layers(self) -> list[PackedLayer]:
        norm: list[PackedLayer] = [] if self.attention_norm is None else [self.attention_norm]
        return [*norm, self.qkv, self.output, self.mlp_norm, self.up, self.down]


class ModernBert(EncoderModel):
    """Rotary positions, norms before attention and MLP, a gated MLP; most layers see a window."""

    contract = 1

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; `load_weights` loads their weights.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        fields = self._fields
        self._act = self._activation("hidden_activation")
        self._eps = fields.number("norm_eps", 1e-5)
        self._norm_bias = fields.flag("norm_bias", False)
        self._window = fields.whole("local_attention", 128) // 2
        kinds = self._kinds()
        self._ropes = {kind: self._rope(kind) for kind in dict.fromkeys(kinds)}
        name, vocab = f"{self.prefix}embeddings", context.config.vocab_size
        self._embedding = Embedding(f"{name}.tok_embeddings", vocab, self._hidden, context)
        self._norm = self._layer_norm(f"{name}.norm")
        self._encoder_layers = [self._layer(index, kind) for index, kind in enumerate(kinds)]
        self._final_norm = self._layer_norm(f"{self.prefix}final_norm")

    def layers(self) -> Sequence[PackedLayer]:
        """Return the layers that have weights."""
        parts: list[PackedLayer] = [self._embedding, self._norm]
        for layer in self._encoder_layers:
            parts += layer.layers()
        return [*parts, self._final_norm]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one."""
        self._allocate_rotary()
        super().load_weights(weights)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load packed tensors."""
        self._allocate_rotary()
        super().load_packed(tensors)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden], after the final norm."""
        starts = self._starts(batch)
        angles = {kind: rope.at(batch.positions) for kind, rope in self._ropes.items()}
        x = self._norm(self._embedding(batch.token_ids))
        for layer in self._encoder_layers:
            h = x if layer.attention_norm is None else layer.attention_norm(x)
            window = self._window if layer.kind == SLIDING else None
            x = x + layer.output(self._attend(layer.qkv(h), starts, angles[layer.kind], window))
            up, gate = layer.up(layer.mlp_norm(x)).chunk(2, -1)
            # Of rows with gaps, torch computes some elements by another function.
            x = x + layer.down(self._act(up.contiguous()) * gate)
        return self._final_norm(x)

    def _allocate_rotary(self) -> None:
        for rope in self._ropes.values():
            rope.allocate()

    def _kinds(self) -> list[str]:
        """Return the type of each layer.

        Raises:
            ModelError: there are others than two, or not one for each layer.
        """
        every = self._fields.whole("global_attn_every_n_layers", 3)
        default = [SLIDING if index % every else FULL for index in range(self._num_layers)]
        kinds = self._hf.get("layer_types") or default
        if len(kinds) != self._num_layers or not set(kinds) <= {FULL, SLIDING}:
            raise self._fields.error(
                "layer_types",
                f"expected {self._num_layers} of {FULL} or {SLIDING}, got {short(kinds)}",
            )
        return list(kinds)

    def _rope(self, kind: str) -> RotaryEmbedding:
        """Return the rotary embedding of a type of layer."""
        field, default = _THETAS[kind]
        by_kind = self._fields.table("rope_parameters")
        stated: dict[str, Any] = by_kind.get(kind) or {}
        scaling = self._fields.table("rope_scaling")
        parameters = {"rope_theta": self._fields.number(field, default), **stated, **scaling}
        return RotaryEmbedding(
            self._head_size,
            self.context,
            source=f"{self.context.config.architecture} config",
            fields={**self._hf, "rope_parameters": parameters, "rope_scaling": None},
            is_partial=False,
        )

    def _layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self._hidden, self._eps, self.context, bias=self._norm_bias)

    def _layer(self, index: int, kind: str) -> _ModernBertLayer:
        name, hidden, inner = f"{self.prefix}layers.{index}", self._hidden, self._intermediate
        of_attention = self._fields.flag("attention_bias", False)
        of_mlp = self._fields.flag("mlp_bias", False)

        def linear(part: str, rows: int, columns: int, bias: bool) -> Linear:
            return Linear([(f"{name}.{part}", rows)], columns, self.context, bias=bias)

        return _ModernBertLayer(
            kind=kind,
            attention_norm=self._layer_norm(f"{name}.attn_norm") if index else None,
            qkv=linear("attn.Wqkv", 3 * hidden, hidden, of_attention),
            output=linear("attn.Wo", hidden, hidden, of_attention),
            mlp_norm=self._layer_norm(f"{name}.mlp_norm"),
            up=linear("mlp.Wi", 2 * inner, hidden, of_mlp),
            down=linear("mlp.Wo", hidden, inner, of_mlp),
        )


class ModernBertClassifier(ModernBert):
    """ModernBERT with a head that classifies: a dense layer, a norm, the matrix of the classes."""

    contract = 1
    classifies = True
    prefix = "model."

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        bias = self._fields.flag("classifier_bias", False)
        self._head_act = self._activation("classifier_activation")
        self._dense = self._head("head.dense", self._hidden, bias=bias)
        self._head_norm = self._layer_norm("head.norm")
        self._classes = self._head("classifier", self._num_classes())

    def layers(self) -> Sequence[PackedLayer]:
        """Return the layers that have weights."""
        return [*super().layers(), self._dense, self._head_norm, self._classes]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of the vectors of prompts."""
        dense = self._dense(pooled.to(self.context.dtype))
        return self._classes(self._head_norm(self._head_act(dense)))
