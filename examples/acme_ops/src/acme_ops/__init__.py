"""Operations for Hardpoint that compute norms and activations by single calls of torch."""

import torch
from torch.nn import functional

from hardpoint.plugins import Ops, Wrapper

__all__ = ["OneCall"]


class OneCall(Wrapper[Ops], Ops):
    """Delegates to other operations, but for norms and activations, which are one call each.

    `add_rms_norm` is overridden with `rms_norm`: the wrapped object's calls its own norm.
    """

    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        """Options: `wraps`, the operations that do the rest."""

        wraps: str = "torch"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, computed in float32."""
        normed = functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
        return normed.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place, and return the norm of the sum."""
        return self.rms_norm(x.add_(delta), weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, rounded once."""
        gate, up = x.float().chunk(2, -1)
        return functional.silu(gate).mul_(up).to(x.dtype)

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up, rounded once."""
        gate, up = x.float().chunk(2, -1)
        return functional.gelu(gate, approximate="tanh").mul_(up).to(x.dtype)
