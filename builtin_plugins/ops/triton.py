"""Operations in this package's Triton kernels for GPUs."""

from __future__ import annotations

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

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        return f"{self.name} (interpreted)" if self._is_interpreted else self.name

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W itself."""
        return weight
