"""The inputs of the model in a step, as step parts get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from .model import ForwardBatch


class PackedInputs(Protocol):
    """The integers of a step on the device, int64, as views of one tensor.

    Attributes:
        token_ids: [tokens].
        positions: [tokens].
        slots: slots of each group, [tokens].
        lens: length of each sequence, the tokens of the step included, [seqs].
        starts: first token of each sequence, and the number of all tokens, [seqs + 1].
        tables: block tables of each group, [seqs, blocks].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    lens: torch.Tensor
    starts: torch.Tensor
    tables: list[torch.Tensor]

    @property
    def rows(self) -> torch.Tensor:
        """Token ids, positions, slots of each group, and lens: [3 + groups, tokens].

        For a step with one token per sequence.
        """


class ForwardStep:
    """The inputs of the model in a step, whose attention is planned when it is needed.

    Attributes:
        packed: the inputs in one tensor; None unless a half packs, or on a GPU.
        needs_model: whether the model itself has to run: its layers are followed, or the experts of
            tokens are reported.
    """

    __slots__ = ("_batch", "_plan", "needs_model", "packed")

    def __init__(
        self,
        plan: Callable[[], ForwardBatch],
        packed: PackedInputs | None = None,
        *,
        needs_model: bool = False,
    ) -> None:
        """Plan nothing yet; `plan` plans the attention of the step and returns its inputs."""
        self._plan = plan
        self._batch: ForwardBatch | None = None
        self.packed, self.needs_model = packed, needs_model

    @property
    def batch(self) -> ForwardBatch:
        """The inputs of the model; the attention is planned by the first access."""
        if self._batch is None:
            self._batch = self._plan()
        return self._batch


Forward = Callable[[ForwardStep], "torch.Tensor"]
"""Returns the hidden states of a step, [tokens, hidden]; they may be overwritten by the next."""
