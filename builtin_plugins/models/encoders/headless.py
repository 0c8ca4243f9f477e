"""Decoders without the matrix that gives logits: checkpoints for vectors, and for classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch

from hardpoint.builtin_plugins.models.llama import Llama, Mistral
from hardpoint.builtin_plugins.models.qwen import Qwen2, Qwen3
from hardpoint.plugins import ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.layers import Linear, PackedLayer

_PREFIX = "model."


class WithoutHead(Llama):
    """The layers of a decoder; names of tensors have no prefix `model.`."""

    contract = 1
    replayable = True
    generates: ClassVar[bool] = False

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint tensors that the model needs, by Hugging Face name."""
        shapes = super().weight_shapes()
        return {name.removeprefix(_PREFIX): shape for name, shape in shapes.items()}

    def weight_cuts(self) -> dict[str, Cut]:
        """Return the parts of them that this rank has."""
        return {name.removeprefix(_PREFIX): cut for name, cut in super().weight_cuts().items()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors one by one."""
        super().load_weights((_PREFIX + name, tensor) for name, tensor in weights)

    def quantizable(self) -> Iterable[str]:
        """Return the names of all matrices."""
        return [name.removeprefix(_PREFIX) for name in super().quantizable()]

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load a matrix of few bits."""
        super().load_quantized(_PREFIX + name, matrix)

    def _layers(self) -> list[PackedLayer]:
        layers = super()._layers()
        return layers[:-1] if self.context.parallel.is_last else layers

    def _stored_layers(self) -> list[PackedLayer]:
        return self._layers()

    @property
    def _ties_head(self) -> bool:
        return False


class LlamaModel(WithoutHead):
    """Llama."""

    contract = 1
    replayable = True


class MistralModel(WithoutHead, Mistral):
    """Mistral."""

    contract = 1
    replayable = True


class Qwen2Model(WithoutHead, Qwen2):
    """Qwen2 and Qwen2.5."""

    contract = 1
    replayable = True


class Qwen3Model(WithoutHead, Qwen3):
    """Qwen3."""

    contract = 1
    replayable = True


class WithClasses(Llama):
    """The layers of a decoder, and a matrix of classes for the last token of a prompt."""

    contract = 1
    replayable = True
    generates: ClassVar[bool] = False
    classifies: ClassVar[bool] = True

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        names = self._hf.get("id2label")
        known = len(names) if isinstance(names, Mapping) else 0
        rows = known or self._fields.whole("num_labels", 2)
        self._classes = Linear([("score", rows)], self._hidden, context)
        del context.hooks.matrices["score"]  # `forward` does not multiply it

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits of classes [rows, classes] of the last tokens of prompts."""
        return self._classes(pooled.to(self.context.dtype))

    def _layers(self) -> list[PackedLayer]:
        layers = super()._layers()
        return [*layers[:-1], self._classes] if self.context.parallel.is_last else layers

    @property
    def _ties_head(self) -> bool:
        return False


class LlamaClassifier(WithClasses):
    """Llama."""

    contract = 1
    replayable = True


class MistralClassifier(WithClasses, Mistral):
    """Mistral."""

    contract = 1
    replayable = True


class Qwen2Classifier(WithClasses, Qwen2):
    """Qwen2 and Qwen2.5."""

    contract = 1
    replayable = True


class Qwen3Classifier(WithClasses, Qwen3):
    """Qwen3."""

    contract = 1
    replayable = True
