"""Operations in this package's Triton kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hardpoint.builtin_plugins.gpu import load_kernels
from hardpoint.plugins import Op, OpsContext

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
        from hardpoint.kernels.triton import logits  # noqa: PLC0415 - few machines have triton

        self._logits = logits

    def describe(self) -> str:
        """Return the name, and whether kernels are interpreted."""
        return f"{self.name} (interpreted)" if self._is_interpreted else self.name

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W itself."""
        return weight

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's most likely token."""
        return self._logits.argmax(_with_contiguous_rows(logits))

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        greedy: torch.Tensor,
    ) -> torch.Tensor:
        """Return a token of each row, drawn with the probabilities of its logits."""
        return self._logits.draw(_with_contiguous_rows(logits), seeds, positions, greedy)

    def keep_tokens(self, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Set the logits of some rows to -inf, in place, but for the tokens of a bitmask."""
        masks = _with_contiguous_rows(bitmask)
        _change(logits, lambda lines: self._logits.keep_tokens(lines, rows, masks))

    def edit(
        self,
        logits: torch.Tensor,
        op: Op,
        places: torch.Tensor,
        values: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Edit the logits of some tokens in place."""
        if op is Op.KEEP_ONLY:
            _change(logits, lambda lines: self._logits.put_only(lines, places, rows))
        else:
            add = op is Op.ADD
            _change(logits, lambda lines: self._logits.put(lines, places, values, add=add))

    def divide(self, logits: torch.Tensor, divisors: torch.Tensor) -> None:
        """Divide each row by its number, in place."""
        _change(logits, lambda lines: self._logits.divide(lines, divisors))

    def keep_top_k(self, logits: torch.Tensor, k: torch.Tensor, largest_k: int) -> None:  # noqa: ARG002
        """Set the logits below each row's k-th largest one to -inf, in place."""
        _change(logits, lambda lines: self._logits.keep_top_k(lines, k))

    def keep_top_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set the logits below each row's nucleus to -inf, in place."""
        _change(logits, lambda lines: self._logits.keep_top_p(lines, p))

    def keep_min_p(self, logits: torch.Tensor, p: torch.Tensor) -> None:
        """Set logits below each row's largest one + log(p) to -inf, in place."""
        _change(logits, lambda lines: self._logits.keep_min_p(lines, p))


def _with_contiguous_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix, or a copy: a processor may return logits that lie in memory in any way."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _change(logits: torch.Tensor, change: Callable[[torch.Tensor], None]) -> None:
    """Have logits changed in place."""
    lines = _with_contiguous_rows(logits)
    change(lines)
    if lines is not logits:
        logits.copy_(lines)
