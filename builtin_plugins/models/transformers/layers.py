"""Modules in the place of those of transformers, whose weights are packed for the operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hardpoint.plugins import ModelContext
from hardpoint.plugins.parallel import Cut
from hardpoint.toolkit.layers import Embedding, Linear, RMSNorm

from .attention import Step

_NAME = "RMSNorm"
_ROWS = 3


class PackedLinear(nn.Module):
    """A matrix product, `nn.Linear` of transformers."""

    def __init__(
        self, linear: Linear, shape: tuple[int, int], step: Step, dtype: torch.dtype, rows: int
    ) -> None:
        """Describe it.

        Args:
            linear: computes it.
            shape: rows and columns of the matrix.
            step: has whether there are weights yet.
            dtype: dtype of the result.
            rows: those that this rank computes.
        """
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = shape
        self._step, self._dtype, self._rows = step, dtype, rows
        self.weight = torch.empty(shape, dtype=dtype, device="meta")  # has a dtype, no numbers
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., rows] for x [..., columns]."""
        if self._step.is_dry:
            return x.new_zeros((*x.shape[:-1], self._rows), dtype=self._dtype)
        y = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)


class PackedEmbedding(nn.Module):
    """The table of embedded tokens, `nn.Embedding` of transformers."""

    def __init__(
        self, table: Embedding, shape: tuple[int, int], step: Step, dtype: torch.dtype
    ) -> None:
        """`shape` is that of the table; the others are as in `PackedLinear`."""
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = shape
        self._step = step
        self.weight = torch.empty(shape, dtype=dtype, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [..., columns] for ids [...]."""
        if self._step.is_dry:
            shape = (*ids.shape, self.embedding_dim)
            return torch.zeros(shape, dtype=self.weight.dtype, device=ids.device)
        return self.table(ids.flatten()).view(*ids.shape, -1)


class PackedNorm(nn.Module):
    """Root mean square normalisation by the operations of the engine."""

    def __init__(self, norm: RMSNorm, step: Step) -> None:
        """`norm` computes it; `step` has whether there are weights yet."""
        super().__init__()
        self.norm, self._step = norm, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised over its last dimension."""
        if self._step.is_dry:
            return x
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class Transposed:
    """A linear layer whose matrix checkpoints have with its columns first, as GPT-2's do."""

    def __init__(self, linear: Linear) -> None:
        """`linear` computes it."""
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
    """A head with a bias, whose matrix is the table of tokens."""

    def __init__(self, linear: Linear) -> None:
        """`linear` computes it."""
        self.linear = linear

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the bias."""
        return {n: s for n, s in self.linear.shapes().items() if n.endswith(".bias")}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Load the bias."""
        self.linear.load(name, tensor)

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
    ) -> None:
        """Describe it.

        Args:
            name: in checkpoints.
            like: one of its shape.
            places: modules that have it, and their names of it.
            dtype: its dtype.
            context: the context of the model.
        """
        self._name, self._shape, self._places = name, tuple(like.shape), places
        self._dtype, self._context = dtype, context
        self._put(torch.zeros((), dtype=dtype).expand(self._shape))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return its shape."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 - it has only one
        """Load it."""
        self._put(tensor.to(self._context.device, self._dtype, copy=True).contiguous())

    def packed(self) -> dict[str, torch.Tensor]:
        """Return it."""
        module, attribute = self._places[0]
        return {self._name: getattr(module, attribute).detach()}

    def load_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load it.

        Raises:
            KeyError, ValueError: it is missing, or not what it should be.
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
    found: torch.Tensor = cuts[name].of(tensor) if name in cuts else tensor
    return found


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
            found = torch.func.functional_call(module, {"weight": trial}, (x,))
    except (RuntimeError, TypeError):  # it takes something else
        return None
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if found.shape == x.shape and torch.allclose(
            found, normalised * (trial + offset), rtol=1e-4, atol=1e-5
        ):
            return Norm(len(weight), eps, offset, weight.dtype)
    return None
