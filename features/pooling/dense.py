"""Linear layers after the pooling, of folders of sentence-transformers."""

from __future__ import annotations

from typing import Any

import safetensors
import torch

from hardpoint.errors import ModelError

from .folder import DenseLayer


class Dense:
    """A linear layer and its activation, in float32."""

    def __init__(self, layer: DenseLayer, device: Any) -> None:
        """Load the weights.

        Raises:
            ModelError: they are missing, damaged, or of other shapes.
        """
        path = layer.folder / "model.safetensors"
        shapes = {"linear.weight": [layer.out_features, layer.in_features]}
        if layer.bias:
            shapes["linear.bias"] = [layer.out_features]
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if (sizes := {name: list(tensor.shape) for name, tensor in found.items()}) != shapes:
            raise ModelError(f"{path}: expected tensors of the shapes {shapes}, got {sizes}")
        self._weight = found["linear.weight"].float().to(device)
        bias = found.get("linear.bias")
        self._bias = None if bias is None else bias.float().to(device)
        self._activation = getattr(torch.nn, layer.activation)()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result for a vector."""
        result: torch.Tensor = self._activation(
            torch.nn.functional.linear(values, self._weight, self._bias)
        )
        return result
