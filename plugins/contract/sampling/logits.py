"""Logits processors: change the logits before a token is chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from hardpoint.plugins.component.base import Context
from hardpoint.plugins.model.forward import TensorSpec
from hardpoint.plugins.model.logits_ops import LogitsOps, Op
from hardpoint.plugins.requests.params import SamplingParams
from hardpoint.plugins.text.arguments import ComponentWithArguments

from .phases import Phase
from .rows import BatchUpdate, LogitsRequest, Rows
from .states import RequestStates

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchLogitsProcessor",
    "Edits",
    "FollowsBatch",
    "LogitsContext",
    "LogitsProcessor",
    "Reads",
    "SparseLogitsProcessor",
]


class Reads(Enum):
    """Inputs of a processor in addition to arguments and its own state."""

    LOGITS = "logits"
    """None; the host never waits for the device."""
    DEVICE_IDS = "device_ids"
    """The newest tokens, on the device, in `advance_rows`."""
    HOST_IDS = "host_ids"
    """Token ids on the host: `output_token_ids`, or `advance`."""


@dataclass(frozen=True, kw_only=True)
class LogitsContext(Context["LogitsPlugin"]):
    """Context of a logits processor, in each worker.

    Attributes:
        device: device of the logits.
        vocab_size: width of a row.
        max_num_seqs: maximum number of rows in a step.
        ops: operations on logits, quick ones on this device.
        max_model_len: most tokens of a prompt and its output; 0 if the context was made by hand.
        model: folder or file of the model; empty if the context was made by hand.
        tokenizer: folder of its tokenizer; empty if that is the model's.
    """

    device: torch.device
    vocab_size: int
    max_num_seqs: int
    ops: LogitsOps = field(default_factory=LogitsOps)
    max_model_len: int = 0
    model: str = ""
    tokenizer: str = ""


class LogitsPlugin(RequestStates, ComponentWithArguments):
    """Base of every form of logits processor. Derive from one of the forms, not from this.

    A request uses the processor if it gives arguments for it: under `plugin_args[name]`, or by
    setting one of the `params_fields`. A class without `Arguments` of its own, once enabled, is
    used by every request. Fields of a greedy request select no stateless processor that it skips.

    Attributes:
        phase: when it runs.
        argmax_invariant: True promises that the likeliest token of a row never changes; greedy
            requests then skip it.
        before, after: names of processors of the same phase that it must precede or follow.
        params_fields: fields of SamplingParams that it honors; fields that `Arguments` has too
            become arguments. For the built-ins and their replacements: of two processors that name
            one field, the second is rejected.
        reads: its inputs. Only the conformance kit reads it so far: this engine waits for
            token ids in every step. An engine that plans steps ahead will wait only where an active
            processor needs them.
        supports_drafts: whether rows may stand for draft tokens; without it, speculation is
            rejected, naming the processor.

    State. `apply` and `edits` never change it: they may be called twice for a step, or for rows
    that stand for draft tokens. Host state that depends on tokens alone is built by `start` and
    carried on by `advance`; device state is declared by `device_state`, filled by `start_row` and
    carried on by `advance_rows`. Host state that depends on logits, too, is carried on by
    `observe`, and declared by `State` and `max_state_bytes`.
    """

    phase: ClassVar[Phase]
    argmax_invariant: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    params_fields: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[Reads] = Reads.HOST_IDS
    supports_drafts: ClassVar[bool] = True

    context: LogitsContext

    @classmethod
    def uses(cls, params: SamplingParams) -> bool:  # noqa: ARG003
        """Return whether a request without arguments for the processor uses it.

        By default it does if the processor takes no arguments. If so, every field of `Arguments`
        must have a default.
        """
        return cls.Arguments is LogitsPlugin.Arguments

    def device_state(self) -> Mapping[str, TensorSpec]:
        """Return the specs of the device tensors of each request, by name."""
        return {}

    def start_row(self, request: LogitsRequest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill a request's device state in place, from its prompt and the outputs so far.

        Args:
            request: as for `start`.
            tensors: by name, [*shape], holding `fill`.
        """

    def advance_rows(
        self, rows: Rows, tokens: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Advance device state in place by one token per row.

        Args:
            rows: rows of the requests that got a token and use this processor.
            tokens: int64 [rows], on the device.
            tensors: by name, [rows, *shape]; changes are written back.
        """


class LogitsProcessor(LogitsPlugin):
    """The dense form: whole rows in, whole rows out."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the new logits of the rows that use this processor.

        Args:
            logits: float32 [rows, vocab]; only rows that use this processor. May be edited in
                place.
            rows: the requests of the rows.

        Returns:
            float32 [rows, vocab]: `logits` itself or a new tensor.
        """


@dataclass(frozen=True, eq=False)
class Edits:
    """A list of edits; `row`, `token` and `value` have equal length.

    Attributes:
        row: positions in `rows`, not in the batch.
        token: token ids.
        value: added or set; ignored by KEEP_ONLY.
    """

    row: Sequence[int]
    token: Sequence[int]
    value: Sequence[float] = ()
    op: Op = Op.ADD


class SparseLogitsProcessor(LogitsPlugin):
    """The sparse form: a few edits per row, checked and applied by the framework."""

    @abstractmethod
    def edits(self, rows: Rows) -> Edits | None:
        """Return this step's edits; None is no edit.

        The same object as in the last step, with the same `rows.version`, is neither checked nor
        copied again.
        """


class FollowsBatch(LogitsPlugin):
    """Base of processors that follow which request is in which row; of the batch form, or another.

    For adapters. A processor of another form gets its rows as that form does, with their requests;
    their `row` is the row of the batch.
    """

    @abstractmethod
    def update_state(self, update: BatchUpdate | None) -> None:
        """Apply the batch's changes of a step, before the model runs; None is no change.

        Called in every step, since output lists also grow without a change.
        """


class BatchLogitsProcessor(FollowsBatch):
    """The batch form: all rows of the batch, with updates of the request in each row.

    For classes of other engines, and for work across rows. Most authors should use one of the other
    forms: here a wrong row map applies one request's settings to another. It has no `observe`, and
    declares `supports_drafts` if `apply` handles rows that repeat for draft tokens.
    """

    supports_drafts: ClassVar[bool] = False

    @classmethod
    def uses(cls, params: SamplingParams) -> bool:  # noqa: ARG003
        """Return whether a request without arguments uses it; by default every request does."""
        return True

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the new logits.

        Args:
            logits: float32 [batch_size, vocab], in the rows of the batch; may be edited in place.
                Rows of requests that get no token in this step hold zeros.
        """
