"""Modules that replace modules of transformers, with weights packed for the operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardpoint.plugins import ModelContext, ModelError
from hardpoint.plugins.parallel import Cut
from hardpoint.toolkit.layers import Embedding, Linear, RMSNorm

from .attention import SharedStep

_NAME = "RMSNorm"
_ROWS = 3


class WeightReadError(ModelError):
    """A module computes with the weight of another module, which has been replaced."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(
            f"model: modules of transformers read a weight {list(weight.shape)} in place of "
            "calling its layer, and cannot run"
        )
        self.weight = weight


class _Absent(torch.Tensor):
    """The weight of a replaced layer: a dtype and a device, and no numbers to compute with."""

    _device: torch.device

    @staticmethod
    def of(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> _Absent:
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Absent)
        tensor._device = device
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's own cannot be written
        return self._device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            WeightReadError: always.
        """
        values = [*args, *(kwargs or {}).values()]
        raise WeightReadError(next(x for x in values if isinstance(x, cls)))


class _Called(nn.Module):
    """A module called without the wrappers of `nn.Module`, because they take time."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.forward(x)
        return result


class PackedLinear(_Called):
    """A matrix product, `nn.Linear` of transformers."""

    def __init__(
        self,
        linear: Linear,
        shape: tuple[int, int],
        step: SharedStep,
        dtype: torch.dtype,
        share: tuple[int, int],
    ) -> None:
        """Describe it.

        Args:
            shape: rows and columns of the matrix.
            step: has whether there are weights yet.
            dtype: dtype of the result.
            share: rows and columns that this rank has.
        """
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = shape
        self._step, self._dtype, self._share = step, dtype, share
        self.weight = _Absent.of(shape, dtype, step.device)
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., rows] for x [..., columns]."""
        if self._step.is_dry:
            rows, columns = self._share
            _check_columns(x, columns)
            return x.new_zeros((*x.shape[:-1], rows), dtype=self._dtype)
        y = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)


class PackedEmbedding(_Called):
    """The table of embedded tokens, `nn.Embedding` of transformers."""

    def __init__(
        self, table: Embedding, shape: tuple[int, int], step: SharedStep, dtype: torch.dtype
    ) -> None:
        """`shape`: shape of the table; the others are as in `PackedLinear`."""
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = shape
        self._step = step
        self.weight = _Absent.of(shape, dtype, step.device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [..., columns] for ids [...]."""
        if self._step.is_dry:
            shape = (*ids.shape, self.embedding_dim)
            return torch.zeros(shape, dtype=self.weight.dtype, device=ids.device)
        return self.table(ids.flatten()).view(*ids.shape, -1)


class PackedNorm(_Called):
    """Root mean square normalization by the operations of the engine."""

    def __init__(self, norm: RMSNorm, size: int, step: SharedStep) -> None:
        """`norm` computes it, of `size` elements; `step` has whether there are weights yet."""
        super().__init__()
        self.norm, self._size, self._step = norm, size, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalized over its last dimension."""
        if self._step.is_dry:
            _check_columns(x, self._size)
            return x
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)


def _check_columns(x: torch.Tensor, columns: int) -> None:
    """Check the input of a layer, which may be sharded in another way than the layer."""
    if x.shape[-1] != columns:
        raise ValueError(f"a layer of {columns} columns is given {x.shape[-1]}")


class Transposed:
    """A linear layer with a transposed matrix in checkpoints, such as GPT-2's."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes in checkpoints."""
        return {name: shape[::-1] for name, shape in self.linear.shapes().items()}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor."""
        self.linear.load(name, tensor.t() if tensor.dim() == 2 else tensor)

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrix and the bias."""
        return self.linear.packed()

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them."""
        self.linear.load_packed(tensors)


class TiedHead:
    """A head with a bias, with tensors tied to the table of tokens."""

    def __init__(self, linear: Linear, stored: Mapping[str, str]) -> None:
        """Describe it.

        Args:
            stored: names in checkpoints of its own tensors, by the names in `linear`.
        """
        self.linear, self._stored = linear, stored

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its own tensors."""
        shapes = self.linear.shapes()
        return {stored: shapes[name] for name, stored in self._stored.items()}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load one of them."""
        self.linear.load(
            next(stored_name for stored_name, of in self._stored.items() if of == name), tensor
        )

    def packed(self) -> dict[str, torch.Tensor] | None:
        """Return the packed matrix and the bias."""
        return self.linear.packed()

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load them."""
        self.linear.load_packed(tensors)


class Plain:
    """A tensor that modules of transformers read themselves: norms, routers, experts."""

    def __init__(
        self,
        name: str,
        like: torch.Tensor,
        places: Sequence[tuple[nn.Module, str]],
        dtype: torch.dtype,
        context: ModelContext,
        part: Cut | None,
    ) -> None:
        """Describe it.

        Args:
            name: in checkpoints.
            like: one of its shape.
            part: the part of it that this rank has; None is all.
        """
        self._name, self._whole, self._places = name, tuple(like.shape), places
        self._dtype, self._context, self._part = dtype, context, part
        self._shape = self._whole if part is None else part.shape(self._whole)
        self._put(torch.zeros((), dtype=dtype).expand(self._shape))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return its shape."""
        return {self._name: self._whole}

    def cuts(self) -> dict[str, Cut]:
        """Return the part of it that this rank has."""
        return {} if self._part is None else {self._name: self._part}

    def load(self, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 - it has only one
        """Load it."""
        self._put(tensor.to(self._context.device, self._dtype, copy=True).contiguous())

    def empty(self) -> torch.Tensor:
        """Return one without content, as this rank has it."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._context.device)

    def use(self, tensor: torch.Tensor) -> None:
        """Use a tensor from `empty`."""
        self._put(tensor)

    def packed(self) -> dict[str, torch.Tensor]:
        """Return it."""
        module, attribute = self._places[0]
        return {self._name: getattr(module, attribute).detach()}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load it.

        Raises:
            KeyError, ValueError: it is missing or wrong.
        """
        tensor = tensors[self._name]
        if tuple(tensor.shape) != self._shape or tensor.dtype != self._dtype:
            raise ValueError(f"{self._name}: {tensor.dtype} {list(tensor.shape)}")
        self._put(tensor.to(self._context.device))

    def _put(self, tensor: torch.Tensor) -> None:
        for module, attribute in self._places:
            if attribute in module._parameters:
                module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[attribute] = tensor


def cut(tensor: torch.Tensor, cuts: Mapping[str, Cut], name: str) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    part: torch.Tensor = cuts[name].of(tensor) if name in cuts else tensor
    return part


@dataclass(frozen=True)
class Norm:
    """A root mean square norm.

    Attributes:
        size: elements of a row.
        eps: is added to the mean square.
        offset: is added to the weight.
        dtype: dtype of the weight.
    """

    size: int
    eps: float
    offset: float
    dtype: torch.dtype


def read_norm(module: nn.Module) -> Norm | None:
    """Return the norm that a module is, with a weight and nothing else; None for other modules.

    It is tried, on random numbers, since classes of that name differ between architectures.
    """
    parameters = dict(module.named_parameters())
    if not type(module).__name__.endswith(_NAME) or list(parameters) != ["weight"]:
        return None
    weight = parameters["weight"]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, len(weight), generator=generator)
    trial = torch.randn(len(weight), generator=generator)
    try:
        with torch.inference_mode():
            result = torch.func.functional_call(module, {"weight": trial}, (x,))
    except (RuntimeError, TypeError):  # it takes something else
        return None
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if result.shape == x.shape and torch.allclose(
            result, normalised * (trial + offset), rtol=1e-4, atol=1e-5
        ):
            return Norm(len(weight), eps, offset, weight.dtype)
    return None
