"""Operations of models and samplers between the large ones, on one device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from .component import Component, Context

if TYPE_CHECKING:
    import torch

__all__ = ["Ops", "OpsContext", "Recorded"]


@dataclass(frozen=True, kw_only=True)
class OpsContext(Context["Ops"]):
    """Context of operations.

    Attributes:
        device: of the tensors.
        dtype: of weights and hidden states.
    """

    device: torch.device
    dtype: torch.dtype


class Recorded(Protocol):
    """Operations that were recorded; called, it repeats them and returns their result.

    Attributes:
        num_bytes: of the tensors that it keeps.
    """

    num_bytes: int

    def __call__(self) -> torch.Tensor:
        """Repeat the operations; return the tensor with the result, always the same one."""


class Ops(Component):
    """The operations of which models are built, besides attention. One per device.

    Tensors have the context's dtype and device unless said otherwise. The last dimension is
    contiguous; rows may be parts of wider ones. A row's result must not depend on the other rows.
    Sums are of float32 at least, and results are rounded once. On a CPU they compute in as many
    threads as `torch.get_num_threads()` says, which may change between steps.

    A constructor raises ModelError if the operations cannot run here, so that `ops.use = "auto"`
    tries the next ones.
    """

    devices: ClassVar[tuple[str, ...]]
    """Device types that they run on."""

    context: OpsContext

    def describe(self) -> str:
        """Return what runs, for the line that the engine logs: "native_cpu (avx2)" for example."""
        return self.name

    @property
    def replayable(self) -> bool:
        """Whether `record` works. It holds for the class that says so, not for those derived."""
        return False

    def record(self, run: Callable[[], torch.Tensor]) -> Recorded | None:  # noqa: ARG002
        """Call `run` and return what repeats its operations; None if that is not possible.

        The operations of `run` are those of this object, of an attention backend and views. They
        are repeated on the same tensors, whose elements may have changed: those that `run` read.
        """
        return None

    @property
    def layout(self) -> str:
        """Name of the layout of packed matrices; it differs where their bytes may differ.

        With a name, what `pack` returns may be written to a file, and `linear` may get it back
        in another process, from memory that cannot be written to. Empty, the default: it is not
        kept.
        """
        return ""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W in the layout that `linear` takes; by default W itself.

        Called once per matrix while weights are loaded. The caller may free `weight` afterwards.
        With a `layout`, the result is a contiguous tensor.
        """
        return weight

    @abstractmethod
    def linear(
        self,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function x [rows, columns of W] -> x W^T + b [rows, rows of W].

        Called once per matrix. The function may keep `packed` and `bias`, which stay as they are.

        Args:
            packed: what `pack` returned for W.
            shape: rows and columns of W.
            bias: b, [rows of W].
            out_dtype: of the results, which may have been rounded to the context's before; None
                is the context's.
        """

    @abstractmethod
    def gather_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return table[ids], [ids, columns]. The table may be of another dtype; ids are int64."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta to x in place, both [rows, size], and return `rms_norm` of the sum."""

    @abstractmethod
    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> None:
        """Rotate heads in place (RoPE, arXiv:2104.09864).

        The halves a and b of a head become a cos - b sin and b cos + a sin.

        Args:
            x: [rows, heads, head_size].
            angles: float32 [rows, head_size]; of each row, cosines, then sines.
        """

    @abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [rows, size] for x [rows, 2 * size], gate before up."""

    @abstractmethod
    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_and_mul`, with GELU in its tanh form (arXiv:1606.08415)."""
