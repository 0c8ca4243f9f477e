"""Layers of vision towers, whole in each rank and in the dtype of the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint.builtin_plugins.models.encoders.encoder import Tensors
from hardpoint.plugins import ModelContext


class Affine(Tensors):
    """A linear layer with a bias, whole in each rank."""

    def __init__(self, name: str, rows: int, columns: int, context: ModelContext) -> None:
        """`name` is the Hugging Face name without `.weight`."""
        self._names = f"{name}.weight", f"{name}.bias"
        super().__init__({self._names[0]: (rows, columns), self._names[1]: (rows,)}, context)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x [..., columns]."""
        weight, bias = self._names
        return F.linear(x, self[weight], self[bias])
