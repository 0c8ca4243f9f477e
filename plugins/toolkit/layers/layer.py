"""Building blocks of models: layers with weights under Hugging Face names, in the fastest layout.

Importing this module loads torch, which importing `hardpoint.plugins` does not. A layer has the
shapes of its checkpoint tensors (`shapes`) and loads them one at a time in any order (`load`).
Tensors that are used together are fused as they arrive, so loading needs little more memory than
the loaded model.

A layer of a model that several ranks share (`ModelContext.parallel`) has the part of its tensors
that its rank needs (`cuts`), and exchanges results with the other ranks where it must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch

from hardpoint.plugins.model import ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.plugins.quantization import QuantizedMatrix


class Layer(Protocol):
    """A part of a model that has checkpoint tensors."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer's tensors by Hugging Face name."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor; called once for each name."""


class PackedLayer(Layer, Protocol):
    """A layer with packed tensors for the weight cache."""

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return the layer's tensors as it keeps them, under names that no other layer has.

        None if it keeps something else than tensors.
        """

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `packed` from among the tensors of other layers.

        Raises:
            KeyError, ValueError: a tensor is missing, or has a wrong shape or dtype.
        """


@runtime_checkable
class QuantizableLayer(Protocol):
    """A layer with quantizable matrices."""

    def quantizable(self) -> Iterable[str]:
        """Return their names."""

    def load_quantized(self, name: str, matrix: QuantizedMatrix) -> None:
        """Load one, instead of its tensor."""


def weight_shapes(layers: Iterable[Layer]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of some layers, for `Model.weight_shapes`."""
    return {name: shape for layer in layers for name, shape in layer.shapes().items()}


def weight_cuts(layers: Iterable[Layer]) -> dict[str, Cut]:
    """Return the cuts of all tensors of some layers, for `Model.weight_cuts`.

    A layer without a method `cuts` needs its tensors whole.
    """
    return {
        name: cut
        for layer in layers
        if (cuts := getattr(layer, "cuts", None)) is not None
        for name, cut in cuts().items()
    }


def load_weights(layers: Iterable[Layer], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load each tensor into the layer that has it, for `Model.load_weights`.

    Raises:
        KeyError: no layer has a tensor of that name.
    """
    owners = {name: layer for layer in layers for name in layer.shapes()}
    for name, tensor in weights:
        owners[name].load(name, tensor)


def quantizable(layers: Iterable[Layer]) -> dict[str, QuantizableLayer]:
    """Return the layers of quantizable matrices, by name, for `Model.quantizable`.

    They are the weights of layers with a method `load_quantized`.
    """
    return {
        name: layer
        for layer in layers
        if isinstance(layer, QuantizableLayer)
        for name in layer.quantizable()
    }


def packed_weights(layers: Iterable[PackedLayer]) -> dict[str, torch.Tensor] | None:
    """Return the tensors that some layers keep, for `Model.packed_weights`.

    None if a layer keeps something else than tensors.
    """
    packed: dict[str, torch.Tensor] = {}
    for layer in layers:
        if (tensors := layer.packed()) is None:
            return None
        packed |= tensors
    return packed


def load_packed(layers: Iterable[PackedLayer], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the result of `packed_weights` for the same layers, for `Model.load_packed`.

    Raises:
        KeyError, ValueError: a tensor is missing, has a wrong shape or dtype, or is of no layer.
    """
    layers = list(layers)
    for layer in layers:
        layer.load_packed(tensors)
    if unknown := tensors.keys() - (packed_weights(layers) or {}).keys():
        raise ValueError(f"no layer has the tensors {', '.join(sorted(unknown)[:3])}")


def packed_tensor(
    tensors: Mapping[str, torch.Tensor],
    name: str,
    shape: tuple[int, ...],
    context: ModelContext,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a tensor of `dtype`, None is the model's, on the model's device.

    Raises:
        KeyError, ValueError: it is missing, or has another shape or dtype.
    """
    tensor = tensors[name]
    dtype = dtype or context.dtype
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.to(context.device)


class RMSNorm:
    """Root mean square layer normalization (Zhang and Sennrich, 2019), summed in float32."""

    def __init__(
        self, name: str, size: int, eps: float, context: ModelContext, *, offset: float = 0.0
    ) -> None:
        """Describe the norm.

        Args:
            name: the Hugging Face name without `.weight`.
            size: the last dimension.
            eps: is added to the mean square.
            offset: is added to the weight; the sum is kept in float32.
        """
        self._name = f"{name}.weight"
        self._shape = (size,)
        self._eps = eps
        self._offset = offset
        self._normalize, self._add = context.ops.rms_norm, context.ops.add_rms_norm
        self._context = context
        dtype = torch.float32 if offset else context.dtype
        self._weight = torch.empty(0, dtype=dtype, device=context.device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the weight's shape."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 - it has only one
        """Load the weight."""
        self._weight = self._weight.new_empty(self._shape).copy_(tensor)
        if self._offset:
            self._weight += self._offset

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the weight."""
        return {self._name: self._weight}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the weight."""
        dtype = self._weight.dtype
        self._weight = packed_tensor(tensors, self._name, self._shape, self._context, dtype)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [..., size], normalized over its last dimension.

        Args:
            x: the input to normalize.
            delta: is added to x first, in place: the residual connection; both [rows, size].
        """
        if delta is None:
            return self._normalize(x, self._weight, self._eps)
        return self._add(x, delta, self._weight, self._eps)


class Vector:
    """One value per row of something else, such as a bias of a router's experts.

    Attributes:
        tensor: the values, [elements of this rank]; loading writes them to this same tensor.
    """

    def __init__(
        self,
        name: str,
        size: int,
        context: ModelContext,
        *,
        dtype: torch.dtype | None = None,
        mine: range | None = None,
    ) -> None:
        """Describe the vector.

        Args:
            name: the whole Hugging Face name.
            size: number of elements in the checkpoint.
            dtype: dtype that it is kept in; None is the context's.
            mine: the elements that this rank has; None is all.
        """
        self._name, self._size, self._context = name, size, context
        self._mine = range(size) if mine is None else mine
        dtype = context.dtype if dtype is None else dtype
        self.tensor = torch.empty(len(self._mine), dtype=dtype, device=context.device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the whole vector."""
        return {self._name: (self._size,)}

    def cuts(self) -> dict[str, Cut]:
        """Return the part that this rank has."""
        if len(self._mine) == self._size:
            return {}
        return {self._name: Cut(0, self._mine.start, self._mine.stop)}

    def load(self, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 - it has only one
        """Load the vector."""
        self.tensor.copy_(tensor)

    def packed(self) -> dict[str, torch.Tensor]:
        """Return the vector."""
        return {self._name: self.tensor}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the vector."""
        shape, dtype = (len(self._mine),), self.tensor.dtype
        self.tensor.copy_(packed_tensor(tensors, self._name, shape, self._context, dtype))
