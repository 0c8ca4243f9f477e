"""Inputs of a forward pass: batches of tokens, per-layer hooks and state tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["ForwardBatch", "TensorSpec"]


class Attend(Protocol):
    """Attention of a layer, as `ForwardBatch.attend`."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the result of attention for q [tokens, num_heads, head_size], shaped as q.

        Args:
            layer: index in `Model.kv_specs`.
            q: queries.
            k: keys [tokens, num_kv_heads, head_size].
            v: values, like k. In a layer with a `KVSpec.value_size` they are k; its last elements
                are the values, and heads of the result have so many elements.
            angles: float32 [tokens, size], as for `Ops.rotate`. With them, the first `size`
                elements of the heads of q and k are rotated first, perhaps in place.
        """


class AttentionWeights(Protocol):
    """Attention weights of the layers of a step, for `LayerWrapper.take_attention_weights`."""

    def __call__(self, layer: int, q: torch.Tensor, request_id: str, count: int) -> torch.Tensor:
        """Return how much the last tokens of a request in the step attend to each of its tokens.

        Tokens of released blocks are left out: `Request.releases` has their positions.

        Args:
            layer: index in `Model.kv_specs`, after its call of `attend`.
            q: queries of the step that `attend` got and has rotated in place.
            request_id: request of the step.
            count: number of tokens, at most its tokens in the step.

        Returns:
            Weights, summed over the tokens: float32 [num_heads, keys].
        """


class Advance(Protocol):
    """Moves the state of a layer over the tokens of sequences, for `ForwardBatch.recur`."""

    def __call__(
        self,
        states: Sequence[torch.Tensor],
        starts: np.ndarray[Any, np.dtype[np.int64]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return outputs [tokens, ...], and the states after the last token of each sequence.

        How the tokens of a sequence are divided into calls changes no result, but for rounding.

        Args:
            states: one tensor [seqs, ...] per `TensorSpec`, before the first token of each
                sequence. They are copies, which may be changed and returned.
            starts: int [seqs + 1]; tokens of sequence i are starts[i]:starts[i+1], at least one.
            inputs: inputs of the call, [tokens, ...].
        """


class Recur(Protocol):
    """Recurrence of a layer that keeps a state, as `ForwardBatch.recur`."""

    def __call__(self, layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of `advance`, for all tokens of the step.

        It is called for some of the sequences at a time, with parts of their tokens: a state is
        kept where a block of the KV cache ends, too, so that other requests find it there.

        Args:
            layer: index in `Model.state_specs`.
            advance: computes outputs and the states that follow.
            inputs: tensors [tokens, ...] of all tokens of the step.
        """


def no_states(layer: int, advance: Advance, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Reject a call of `ForwardBatch.recur`: the default for models without states.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"recur: expected a layer of state_specs(), which has none, got {layer}")


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One flat batch of tokens from many sequences, prefill and decode mixed.

    Attributes:
        token_ids: int64 [tokens].
        positions: int64 [tokens]; position of each token in its own sequence. [axes, tokens] in
            steps with images of a model that has several `MediaFormat.position_axes`.
        hidden: [tokens, hidden_size], result of `forward` of the previous stage; None in the
            first stage.
        attend: attention of a layer: `attend(layer, q, k, v)`, or with `angles` after them, which
            rotate q and k.
        routed_experts: int32 [tokens, layers, experts per token], of the size that
            `Model.routed_experts` returns: if a request asks for them, a mixture of experts writes
            the experts of each token here, in the layers of its stage. None if no request does.
        token_types: int64 [tokens]; 1 for tokens of the second of two texts, 0 for others. None if
            all are 0, and for models without `token_types`.
        recur: recurrence of a layer of `Model.state_specs`: `recur(layer, advance, x)`.
        num_layers: number of decoder layers to compute, the first ones, before the last norm; None
            is all. The other layers write no keys and values.
        needed: int64 [rows], at least one; the tokens whose hidden states are read. A model may
            skip others after the attention of its last layer: their rows are then 0. None is all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attend: Attend = field(repr=False)
    hidden: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    recur: Recur = field(default=no_states, repr=False)
    num_layers: int | None = None
    needed: torch.Tensor | None = None


@dataclass(frozen=True)
class LinearMatrix:
    """A matrix that a linear layer multiplies, as this rank has it.

    Attributes:
        stored_as: the checkpoint's matrix that it is, or is a part of; without `.weight`.
        shape: rows and columns of the checkpoint's matrix.
        rows: the rows of it that this rank has.
        columns: the columns of it that this rank has.
    """

    stored_as: str
    shape: tuple[int, int]
    rows: range
    columns: range


Branch = Literal["attention", "mlp"]


@dataclass(eq=False)
class LayerHooks:
    """Changes by step parts in the layers of a model, set while a step that they change runs.

    `Embedding.changed` and `Linear` of `hardpoint.toolkit.layers` call the first two, the model the
    others. A model that does not call one of the first three is rejected together with a part that
    needs it.

    Attributes:
        embedded: called with the embedded tokens [tokens, hidden_size], where they enter the first
            layer; returns them, or others of the same shape.
        linear: called with the checkpoint matrices of a product, x [tokens, columns] and
            y [tokens, rows]; returns y, or another one. The matrices are (name without `.weight`,
            rows of this rank), stacked in this order. Where ranks add up their parts of y, it is
            called before that.
        added: called after attention and after the MLP of a decoder layer, with its index in the
            model, "attention" or "mlp", the residual stream [tokens, hidden_size] and the tensor
            that is about to be added, of the same shape; may change both in place. If ranks share
            the layer, it is called after they have added up their parts.
        skips: called before a decoder layer with its index in the model; returns which tokens skip
            it, bool [tokens], or None if none does. Keys, values and states of the layer are
            computed for all tokens. Of tokens that skip it, the rest is not needed: `added` sets
            what is about to be added to zero. So a model that does not call it has equal results.
        matrices: the matrices of `linear` calls, by name; layers add theirs when they are
            made.
    """

    embedded: Callable[[torch.Tensor], torch.Tensor] | None = None
    linear: (
        Callable[[Sequence[tuple[str, int]], torch.Tensor, torch.Tensor], torch.Tensor] | None
    ) = None
    added: Callable[[int, Branch, torch.Tensor, torch.Tensor], None] | None = None
    skips: Callable[[int], torch.Tensor | None] | None = None
    matrices: dict[str, LinearMatrix] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorSpec:
    """Device state that the framework stores and moves, one row per request.

    Attributes:
        shape: shape of one row.
        dtype: name of a torch dtype, "int32" for example.
        fill: value of a new row before `start_row`.
    """

    shape: tuple[int, ...]
    dtype: str
    fill: float = 0


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


class StepLayout(Protocol):
    """The sequences of a step, in the order of their tokens."""

    @property
    def requests(self) -> Sequence[Any]:
        """Request of each sequence, a `LogitsRequest`."""

    @property
    def query_starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Shape [seqs + 1]: first token of each sequence, and the number of all tokens."""

    @property
    def starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Shape [seqs]: tokens of each sequence that were computed before."""


class ForwardStep:
    """The inputs of the model in a step; its attention is planned when it is needed.

    Attributes:
        layout: the sequences of the step.
        packed: the inputs in one tensor; None unless a half packs, or on a GPU.
        needs_model: whether the model itself has to run: its layers are followed, or the experts of
            tokens are reported.
    """

    __slots__ = ("_batch", "_plan", "layout", "needs_model", "packed")

    def __init__(
        self,
        plan: Callable[[], ForwardBatch],
        packed: PackedInputs | None = None,
        layout: StepLayout | None = None,
        *,
        needs_model: bool = False,
    ) -> None:
        """Plan nothing yet; `plan` plans the attention of the step and returns its inputs."""
        self._plan, self.layout = plan, layout
        self._batch: ForwardBatch | None = None
        self.packed, self.needs_model = packed, needs_model

    @property
    def batch(self) -> ForwardBatch:
        """The inputs of the model; the attention is planned by the first access."""
        if self._batch is None:
            self._batch = self._plan()
        return self._batch

    def with_positions(self, positions: torch.Tensor) -> ForwardStep:
        """Return the step with other positions of its tokens, in which the model itself runs."""
        return ForwardStep(
            lambda: replace(self.batch, positions=positions),
            self.packed,
            self.layout,
            needs_model=True,
        )


Forward = Callable[[ForwardStep], "torch.Tensor"]
"""Returns the hidden states of a step, [tokens, hidden]; they may be overwritten by the next."""
