"""Decoders without the matrix that gives logits: checkpoints that were trained for vectors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix
from hardpoint.toolkit.layers import PackedLayer

from .llama import Llama
from .qwen import Qwen2, Qwen3

_PREFIX = "model."


class WithoutHead(Llama):
    """The layers of a decoder, whose tensors have no `model.` before their names."""

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
    """Llama, and Mistral."""

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
