"""BERT (Devlin et al., 2018), RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hardpoint.plugins import ForwardBatch, ModelContext
from hardpoint.toolkit.hf_config import short
from hardpoint.toolkit.layers import Embedding, Linear, PackedLayer

from .encoder import EncoderModel, LayerNorm


@dataclass(frozen=True)
class _BertLayer:
    qkv: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    norm: LayerNorm

    def layers(self) -> list[PackedLayer]:
        return [self.qkv, self.output, self.attention_norm, self.up, self.down, self.norm]


class Bert(EncoderModel):
    """Learned positions and types of tokens, norms after attention and MLP."""

    contract = 1
    token_types: ClassVar[bool] = True

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; `load_weights` loads their weights.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        super().__init__(context)
        fields, hidden = self._fields, self._hidden
        kind = self._hf.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise fields.error("position_embedding_type", f'expected "absolute", got {short(kind)}')
        if fields.flag("is_decoder", False):
            raise fields.error("is_decoder", "expected false, got true")
        self._act = self._activation("hidden_act")
        self._eps = fields.number("layer_norm_eps", 1e-12)
        self._offset = self.first_position()
        rows = fields.whole("max_position_embeddings")
        types = fields.whole("type_vocab_size", 2)
        name = f"{self.prefix}embeddings"
        self._embedding = Embedding(
            f"{name}.word_embeddings", context.config.vocab_size, hidden, context
        )
        self._positions = Embedding(f"{name}.position_embeddings", rows, hidden, context)
        self._types = Embedding(f"{name}.token_type_embeddings", types, hidden, context)
        self._norm = self._layer_norm(f"{name}.LayerNorm")
        self._encoder_layers = [self._layer(index) for index in range(self._num_layers)]

    def first_position(self) -> int:
        """Return the row of the table of positions that the first token has."""
        return 0

    def layers(self) -> Sequence[PackedLayer]:
        """Return the layers that have weights."""
        parts: list[PackedLayer] = [self._embedding, self._positions, self._types, self._norm]
        for layer in self._encoder_layers:
            parts += layer.layers()
        return parts

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden]."""
        starts = self._starts(batch)
        types = batch.token_types
        types = torch.zeros_like(batch.token_ids) if types is None else types
        x = self._embedding(batch.token_ids) + self._types(types)
        x = self._norm(x + self._positions(batch.positions + self._offset))
        for layer in self._encoder_layers:
            attended = layer.output(self._attend(layer.qkv(x), starts))
            x = layer.attention_norm(attended + x)
            x = layer.norm(layer.down(self._act(layer.up(x))) + x)
        return x

    def _layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(name, self._hidden, self._eps, self.context)

    def _layer(self, index: int) -> _BertLayer:
        name, hidden = f"{self.prefix}encoder.layer.{index}", self._hidden
        attention = f"{name}.attention"
        qkv = [(f"{attention}.self.{part}", hidden) for part in ("query", "key", "value")]

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear([(name, rows)], columns, self.context, bias=True)

        return _BertLayer(
            qkv=Linear(qkv, hidden, self.context, bias=True),
            output=linear(f"{attention}.output.dense", hidden, hidden),
            attention_norm=self._layer_norm(f"{attention}.output.LayerNorm"),
            up=linear(f"{name}.intermediate.dense", self._intermediate, hidden),
            down=linear(f"{name}.output.dense", hidden, self._intermediate),
            norm=self._layer_norm(f"{name}.output.LayerNorm"),
        )


class Roberta(Bert):
    """RoBERTa: the position of the first token follows the position of padding."""

    contract = 1

    def first_position(self) -> int:
        """Return the row of the table of positions that the first token has."""
        return self._fields.whole("pad_token_id", 1, at_least=0) + 1


class BertClassifier(Bert):
    """BERT with a head that classifies: a dense layer with tanh, and the matrix of the classes."""

    contract = 1
    classifies = True
    prefix = "bert."

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._dense, self._classes = self._heads_layers()

    def _heads_layers(self) -> tuple[Linear, Linear]:
        name = f"{self.prefix}pooler.dense"
        return self._head(name, self._hidden), self._head("classifier", self._num_classes())

    def layers(self) -> Sequence[PackedLayer]:
        """Return the layers that have weights."""
        return [*super().layers(), self._dense, self._classes]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of the first tokens of prompts."""
        return self._classes(self._dense(pooled.to(self.context.dtype)).tanh())


class RobertaClassifier(BertClassifier, Roberta):
    """RoBERTa and XLM-RoBERTa with such a head."""

    contract = 1
    prefix = "roberta."

    def _heads_layers(self) -> tuple[Linear, Linear]:
        out = self._head("classifier.out_proj", self._num_classes())
        return self._head("classifier.dense", self._hidden), out
