"""Paged attention in this package's Triton kernels for GPUs."""

from __future__ import annotations

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import AttentionContext

from .torch import TorchAttention


class TritonAttention(TorchAttention):
    """Attention in Triton."""

    contract = 1
    devices = ("cpu", "cuda")

    def __init__(self, context: AttentionContext) -> None:
        """Load the kernels.

        Raises:
            ModelError: they cannot run here, or there are none for the dtype.
        """
        super().__init__(context)
        load_kernels(context, "attention.use")
