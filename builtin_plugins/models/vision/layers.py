"""Layers of vision towers, whole in each rank and in the dtype of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint.builtin_plugins.models.encoders.encoder import ACTIVATIONS
from hardpoint.plugins import ModelContext
from hardpoint.toolkit.hf_config import ConfigFields, short


class Tensors:
    """Tensors of a checkpoint as they are, in the dtype of the model."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], context: ModelContext) -> None:
        """`shapes` are by Hugging Face name."""
        self._shapes, self._context = dict(shapes), context
        self._tensors: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return their shapes."""
        return dict(self._shapes)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one."""
        self._tensors[name] = tensor.to(self._context.device, self._context.dtype, copy=True)

    def packed(self) -> dict[str, torch.Tensor]:
        """Return them."""
        return dict(self._tensors)

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them.

        Raises:
            KeyError, ValueError: one is missing, or not what it should be.
        """
        for name, shape in self._shapes.items():
            tensor = tensors[name]
            if tensor.shape != shape or tensor.dtype != self._context.dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}")
            self._tensors[name] = tensor.to(self._context.device)


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


def activation(
    fields: ConfigFields, config: Mapping[str, Any], default: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of `hidden_act` of a vision config.

    Raises:
        ModelError: it is not known.
    """
    name = config.get("hidden_act", default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise fields.error(
            "hidden_act", f"expected one of {', '.join(ACTIVATIONS)}, got {short(name)}"
        )
    return ACTIVATIONS[name]
