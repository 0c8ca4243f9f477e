"""Modules of transformers that compute root mean square norms, found by what they compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_NAME = "RMSNorm"
_ROWS = 3


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
