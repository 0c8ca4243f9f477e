"""Operations in this package's Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import OpsContext
from hardpoint.plugins.quantization import AffineCodes

from .torch import TorchOps


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
        from hardpoint.kernels.triton import codes  # noqa: PLC0415 - it imports triton

        self._codes = codes

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        return f"{self.name} (interpreted)" if self._is_interpreted else self.name

    @property
    def code_bits(self) -> tuple[int, ...]:
        """All that `AffineCodes` may have."""
        return 4, 5, 6, 8

    @property
    def layout(self) -> str:
        """That of packed codes, with its version; other matrices are packed as they are."""
        return self._codes.LAYOUT

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W itself, contiguous."""
        return weight.contiguous()

    def pack_codes(self, parts: Sequence[AffineCodes]) -> torch.Tensor:
        """Return a copy of the codes, as few bits as they are.

        Raises:
            ValueError: there are no columns.
        """
        return self._codes.pack(parts, self.context.device)

    def embedding(
        self, packed: torch.Tensor, shape: tuple[int, int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return ids -> rows, of packed codes.

        Raises:
            ValueError: packed codes have another shape, or their header is damaged.
        """
        if packed.dtype != torch.uint8:
            return None
        return self._codes.gather_codes(packed, shape, self.context.dtype)

    def linear(
        self,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return x -> x W^T + b.

        Raises:
            ValueError: packed codes have another shape, or their header is damaged.
        """
        if packed.dtype != torch.uint8:
            return super().linear(packed, shape, bias, out_dtype=out_dtype)
        return self._codes.linear_codes(packed, shape, bias, out_dtype or self.context.dtype)
