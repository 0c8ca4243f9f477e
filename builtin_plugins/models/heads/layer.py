"""Base of drafting heads: one decoder layer of an architecture, under the names of the head."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.plugins import ForwardBatch, ModelContext, ModelError
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.layers import PackedLayer


class HeadLayer(Llama):
    """A decoder layer that drafts tokens from a hidden state and the token after it.

    The speculator embeds tokens with the engine's model. `forward` reads `ForwardBatch.hidden`
    [tokens, 2 * hidden_size]: the embedding of each token, then the hidden state before it.
    """

    contract = 1
    parallelism: ClassVar[tuple[str, ...]] = ()
    generates = False
    is_architecture = False
    names: ClassVar[Mapping[str, str]] = {}
    """Beginnings of weight names in the architecture, and in the files of the head."""

    def __init__(self, context: ModelContext) -> None:
        """Create the layers; `load_weights` loads their weights.

        Raises:
            ModelError: a field of the config is missing, invalid or not supported.
        """
        layer, fields = self.head_fields(context.config.hf)
        fields |= {"num_hidden_layers": layer + 1, "tie_word_embeddings": False}
        hf = {**context.config.hf, **fields}
        config = dataclasses.replace(context.config, hf=hf)
        stage = dataclasses.replace(context.parallel, stage=layer, num_stages=layer + 1)
        super().__init__(dataclasses.replace(context, config=config, parallel=stage))
        self.context = context

    @classmethod
    @abstractmethod
    def head_fields(cls, hf: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the index of the layer, and changed fields of the config.

        Raises:
            ModelError: the config has no such layer.
        """

    @abstractmethod
    def head_layers(self) -> list[PackedLayer]:
        """Return the layers that have weights, besides the decoder layer."""

    @abstractmethod
    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the decoder layer for embeddings and hidden states [tokens, ...]."""

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [tokens, hidden_size] of rows of `DraftRequest.hidden`."""
        return hidden

    def following(self, output: torch.Tensor) -> torch.Tensor:
        """Return the hidden states for the next draft, of results of `forward`."""
        return output

    def normalize(self, output: torch.Tensor) -> torch.Tensor:
        """Return the input of the output layer, of results of `forward` [rows, hidden_size]."""
        return self._norm(output)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the residual stream after the layer, [tokens, hidden_size].

        Raises:
            ModelError: it is the model of the engine.
        """
        if batch.hidden is None:
            raise ModelError(
                f"model: {self.context.config.architecture} is a drafting head; expected it in "
                f"plugin.eagle3.model"
            )
        embedded, hidden = (x.contiguous() for x in batch.hidden.chunk(2, -1))
        x = self.join(embedded, hidden)
        super().forward(dataclasses.replace(batch, hidden=x))  # adds to x in place
        return x

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors of the head."""
        return {self._stored(name): shape for name, shape in super().weight_shapes().items()}

    def weight_cuts(self) -> dict[str, Cut]:
        """Return no cuts: a rank has all of a head."""
        return {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one."""
        super().load_weights(self._named(weights))

    def _named(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = {self._stored(name): name for name in super().weight_shapes()}
        for name, tensor in weights:
            yield names[name], tensor

    def quantizable(self) -> Iterable[str]:
        """Return the names of matrices."""
        return [self._stored(name) for name in super().quantizable()]

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        names = {self._stored(other): other for other in super().quantizable()}
        super().load_quantized(names[name], matrix)

    def _stored(self, name: str) -> str:
        for begin, stored in self.names.items():
            if name.startswith(begin):
                return stored + name.removeprefix(begin)
        return name

    def _layers(self) -> list[PackedLayer]:
        (layer,) = self._decoder_layers
        return [*layer.layers(), self._norm, *self.head_layers()]
