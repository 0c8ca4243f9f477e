"""Operations in this package's Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import OpsContext

from .torch import TorchOps

if TYPE_CHECKING:
    import torch


class TritonOps(TorchOps):
    """Operations in Triton; products of numbers are those of torch's libraries."""

    contract = 1
    devices = ("cpu", "cuda")
    replayable = True

    def __init__(self, context: OpsContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        self._is_interpreted = load_kernels(context, "ops.use")
        from hardpoint.kernels.triton import experts, layers, lora  # noqa: PLC0415 - needs triton

        self._layers, self._experts, self._lora = layers, experts, lora

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        return f"{self.name} (interpreted)" if self._is_interpreted else self.name

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W itself."""
        return weight

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normalised rows."""
        return self._layers.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place; return the normalised rows."""
        return self._layers.add_rms_norm(x, delta, weight, eps)

    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """Rotate heads in place."""
        self._layers.rotate(x, angles)

    def scale(self, x: torch.Tensor, factor: float) -> None:
        """Multiply x by a number, in place."""
        self._layers.scale(x, factor)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Add delta to x in place."""
        self._layers.add(x, delta)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up."""
        return self._layers.silu_and_mul(x)

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up."""
        return self._layers.gelu_and_mul(x)

    def experts(
        self,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        shape: tuple[int, int],
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return (x, chosen, weights) -> the weighted sum of experts."""
        if any(matrix.dtype != self.context.dtype for matrix in (*gate_up, *down)):
            return super().experts(gate_up, down, shape)  # some are codes
        return self._experts.Experts(gate_up, down, shape)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        adapters: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Add what low-rank adapters change to y, in place."""
        self._lora.add_lora(y, x, a, b, adapters, scales)
