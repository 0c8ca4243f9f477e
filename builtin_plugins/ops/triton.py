"""Operations in this package's Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import OpsContext, Recorded

from .cuda_graphs import CudaGraphs, RepeatedRun, decode_sizes
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
        self._graphs = CudaGraphs(context.device)

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        if not self._is_interpreted:
            return self.name
        return f"{self.name} (interpreted; CUDA graphs are replaced by repeating Python)"

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded:
        """Record a CUDA graph, or what stands for one where kernels are interpreted."""
        return RepeatedRun(run) if self._is_interpreted else self._graphs.record(run)

    def record_sizes(self, max_num_seqs: int) -> Sequence[int]:
        """Return 1, 2, 4, multiples of 8 up to 256, and `max_num_seqs` if it is less."""
        return decode_sizes(max_num_seqs)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W itself."""
        return weight
