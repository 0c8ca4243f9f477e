"""A small GPT-2: learned positions, layer norms before each part, tied embeddings.

Ranks can share it: they divide heads and MLP columns, and stages have some of the blocks each.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hardpoint.plugins import ForwardBatch, KVSpec, Model, ModelContext
from hardpoint.toolkit.hf_config import ConfigFields
from hardpoint.toolkit.layers import (
    Embedding,
    Layer,
    Linear,
    LMHead,
    load_weights,
    weight_cuts,
    weight_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hardpoint.plugins.parallel import Cut


class LayerNorm:
    """Layer normalisation with weight and bias."""

    def __init__(self, name: str, size: int) -> None:
        """`name` is the name of its tensors, without `.weight` and `.bias`."""
        self._name = name
        self._size = size
        self._tensors: dict[str, torch.Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of weight and bias."""
        return {f"{self._name}.{part}": (self._size,) for part in ("weight", "bias")}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Keep weight or bias."""
        self._tensors[name.rsplit(".", 1)[1]] = tensor

    def to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Convert the tensors."""
        self._tensors = {name: t.to(device, dtype) for name, t in self._tensors.items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [tokens, size]."""
        return F.layer_norm(x, (self._size,), self._tensors["weight"], self._tensors["bias"])


class Block:
    """Attention and a feed-forward part, each with a norm before it."""

    def __init__(self, name: str, hidden: int, mine: range, context: ModelContext) -> None:
        """`name` begins the names of its tensors; `mine` are the rows of q of this rank's heads."""
        columns = context.parallel.share(4 * hidden, "columns of the MLP")
        self.norm_1 = LayerNorm(f"{name}.norm_1", hidden)
        self.norm_2 = LayerNorm(f"{name}.norm_2", hidden)
        qkv = [(f"{name}.{part}", hidden) for part in "qkv"]
        self.qkv = Linear(qkv, hidden, context, bias=True, row_ranges=[mine] * 3)
        out = [(f"{name}.out", hidden)]
        self.out = Linear(out, hidden, context, bias=True, column_range=mine)
        up = [(f"{name}.up", 4 * hidden)]
        self.up = Linear(up, hidden, context, bias=True, row_ranges=[columns])
        down = [(f"{name}.down", hidden)]
        self.down = Linear(down, 4 * hidden, context, bias=True, column_range=columns)

    def layers(self) -> list[Layer]:
        """Return the parts that have tensors."""
        return [self.norm_1, self.qkv, self.out, self.norm_2, self.up, self.down]


class TinyGPT(Model):
    """Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019)."""

    contract = 1
    parallelism = ("tensor", "pipeline")

    def __init__(self, context: ModelContext) -> None:
        """Read the fields of the config; raise ModelError for values that do not fit."""
        super().__init__(context)
        fields = ConfigFields(context.config.hf, "TinyGPT config")
        hidden = fields.whole("hidden_size", at_most=1 << 16)
        self._heads = fields.whole("num_heads")
        if hidden % self._heads:
            raise fields.error("num_heads", f"expected a divisor of {hidden}, got {self._heads}")
        self._head_size = hidden // self._heads
        vocab, positions = context.config.vocab_size, context.config.max_position_embeddings
        self._tokens = Embedding("tokens", vocab, hidden, context)
        self._positions = Embedding("positions", positions, hidden, context)
        heads = context.parallel.share(self._heads, "heads")
        self._my_heads = len(heads)
        mine = range(heads.start * self._head_size, heads.stop * self._head_size)
        layers = context.parallel.stage_layers(fields.whole("num_layers", at_most=1 << 10))
        self._blocks = [Block(f"blocks.{i}", hidden, mine, context) for i in layers]
        self._norm = LayerNorm("norm", hidden)
        self._head = LMHead("tokens", vocab, hidden, context)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of this stage."""
        return weight_shapes(self._layers())

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the parts of them that this rank needs."""
        return weight_cuts(self._layers())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors, and use the embedding as the head where this stage has both."""
        load_weights(self._layers(), weights)
        for layer in self._layers():
            if isinstance(layer, LayerNorm):
                layer.to(self.context.dtype, self.context.device)
        if self.context.parallel.is_first and self.context.parallel.is_last:
            self._head.tie(self._tokens)

    def kv_specs(self) -> list[KVSpec]:
        """Return one spec per block of this stage, with the heads of this rank."""
        heads, scale = self._my_heads, 1 / math.sqrt(self._head_size)
        return [KVSpec(heads, heads, self._head_size, scale) for _ in self._blocks]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [tokens, hidden]; the next stage begins with them."""
        x = batch.hidden
        if x is None:
            x = self._tokens(batch.token_ids) + self._positions(batch.positions)
        for index, block in enumerate(self._blocks):
            qkv = block.qkv(block.norm_1(x)).view(len(x), 3, self._my_heads, self._head_size)
            attended = batch.attend(index, *(part.contiguous() for part in qkv.unbind(1)))
            x = x + block.out(attended.reshape(len(x), -1))
            x = x + block.down(F.gelu(block.up(block.norm_2(x)), approximate="tanh"))
        return self._norm(x) if self.context.parallel.is_last else x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of hidden states [rows, hidden]."""
        return self._head(hidden)

    def _layers(self) -> list[Layer]:
        parallel = self.context.parallel
        layers: list[Layer] = [self._tokens, self._positions] if parallel.is_first else []
        layers += [layer for block in self._blocks for layer in block.layers()]
        if parallel.is_last:
            layers += [self._norm] if parallel.is_first else [self._norm, self._head]
        return layers
