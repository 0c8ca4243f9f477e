"""Logits processors: change what the model says before a token is chosen."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from . import typed
from .component import Component, Context
from .params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .reasoning import ReasoningParser
    from .tokenizer import Tokenizer

__all__ = [
    "Added",
    "BatchLogitsProcessor",
    "BatchUpdate",
    "Edits",
    "LogitsContext",
    "LogitsPlugin",
    "LogitsProcessor",
    "LogitsRequest",
    "Move",
    "Moved",
    "Op",
    "Phase",
    "PrepareContext",
    "Reads",
    "RowMap",
    "Rows",
    "SparseLogitsProcessor",
    "TensorSpec",
]


T = TypeVar("T")


class Move(Enum):
    """What a move does."""

    UNIDIRECTIONAL = "unidirectional"
    """The source's state goes to the destination; the source is empty afterwards."""
    SWAP = "swap"
    """Source and destination change places; one of them may be empty."""


@dataclass(frozen=True, eq=False)
class Added:
    """A request that took a row. Whatever stood there before is gone.

    Attributes:
        row: its row.
        params: what it asked for; `plugin_args` holds the checked arguments by plugin name.
        prompt_token_ids: None for a prompt that came as embeddings.
        output_token_ids: grows as tokens are chosen; read it, never keep a copy.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: Sequence[int] | None
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class Moved:
    """A request that changed its row."""

    source: int
    destination: int
    direction: Move


@dataclass(frozen=True)
class BatchUpdate:
    """What changed since the last step. Apply `removed`, then `added`, then `moved`, in order.

    Attributes:
        batch_size: rows after the update; rows 0 to batch_size - 1 are in use.
        removed: rows that were left and not taken again, highest first.
    """

    batch_size: int
    removed: tuple[int, ...] = ()
    added: tuple[Added, ...] = ()
    moved: tuple[Moved, ...] = ()


class RowMap(Generic[T]):
    """State by row, kept true through batch updates.

    For batch-level processors: give it a function that makes the state of an added request, or
    returns None for one that needs none.
    """

    def __init__(self, start: Callable[[Added], T | None]) -> None:
        """`start` is called once per added request."""
        self._start = start
        self._states: dict[int, T] = {}

    def __len__(self) -> int:
        """Return the number of rows with state."""
        return len(self._states)

    def __contains__(self, row: int) -> bool:
        """Whether a row has state."""
        return row in self._states

    def __getitem__(self, row: int) -> T:
        """Return a row's state; KeyError if it has none."""
        return self._states[row]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows with state, in ascending order."""
        return iter(sorted(self._states))

    def apply(self, update: BatchUpdate | None) -> bool:
        """Carry the states over an update; return whether anything changed."""
        if update is None:
            return False
        changed = False
        for row in update.removed:
            changed |= self._states.pop(row, None) is not None
        for added in update.added:
            changed |= self._states.pop(added.row, None) is not None
            if (state := self._start(added)) is not None:
                self._states[added.row] = state
                changed = True
        for move in update.moved:
            changed |= self._move(move)
        return changed

    def _move(self, move: Moved) -> bool:
        # Both are taken out before either is put back, so that chained moves never overwrite.
        source = self._states.pop(move.source, None)
        destination = self._states.pop(move.destination, None)
        if source is not None:
            self._states[move.destination] = source
        if move.direction is Move.SWAP and destination is not None:
            self._states[move.source] = destination
        return source is not None or destination is not None


class Phase(IntEnum):
    """When a processor runs; phases run in this order."""

    MASK = 0
    """Forbid tokens (grammars first)."""
    BIAS = 1
    """Add to logits."""
    PENALTY = 2
    """Punish or reward tokens by what came before."""
    TEMPERATURE = 3
    """Rescale. Greedy requests skip this phase."""
    TRUNCATE = 4
    """Drop unlikely tokens (top_k, then top_p, then min_p)."""
    FORCE = 5
    """Leave exactly what must come next."""


class Reads(Enum):
    """What a processor looks at beside arguments and its own state."""

    LOGITS = "logits"
    """Nothing else; it never makes the host wait for the device."""
    DEVICE_IDS = "device_ids"
    """The newest tokens, on the device, in `advance_rows`."""
    HOST_IDS = "host_ids"
    """Token ids on the host: `output_token_ids`, or `advance`."""


@dataclass(frozen=True)
class TensorSpec:
    """State on the device that the framework keeps and moves: one row per request.

    Attributes:
        shape: of one row.
        dtype: a torch dtype's name, "int32" for example.
        fill: what a fresh row holds before `start_row`.
    """

    shape: tuple[int, ...]
    dtype: str
    fill: float = 0


@dataclass(frozen=True, kw_only=True)
class LogitsContext(Context["LogitsPlugin"]):
    """What a logits processor is built with, in each worker.

    Attributes:
        device: where logits live.
        vocab_size: width of a row.
        max_num_seqs: most rows that one step can have.
    """

    device: torch.device
    vocab_size: int
    max_num_seqs: int


@dataclass(frozen=True, kw_only=True)
class PrepareContext:
    """What `prepare` may look at, in the frontend.

    Attributes:
        params: the whole request's parameters, checked.
        stop_token_ids: every token id that ends the request.
        reasoning: the configured reasoning parser, if there is one.
    """

    options: Any
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    vocab_size: int
    tokenizer: Tokenizer | None
    reasoning: ReasoningParser | None = None


@dataclass(slots=True, eq=False)
class LogitsRequest:
    """One request as logits processors see it.

    Attributes:
        output_token_ids: grows as tokens are chosen; read it, never keep a copy.
        stop_token_ids: every token id that ends the request.
        arguments: by plugin name; present for the plugins that the request uses.
        state: by plugin name, what `start` returned.
        child_index: which of the prompt's `n` completions.
        row: its row in the running batch, at this step.
        draft_of: for a row that stands for a draft token, the request that it drafts for; its
            `output_token_ids` then hold the drafts before it.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: Sequence[int]
    child_index: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    row: int = 0
    draft_of: LogitsRequest | None = None


class Rows(Protocol):
    """The rows of one step whose requests use a processor, in the order of `logits`.

    Attributes:
        requests: one per row.
        version: changes whenever the rows or their order change; for caches. While it stays the
            same, all rows get equally many tokens.
    """

    requests: Sequence[LogitsRequest]
    version: int

    def __len__(self) -> int:
        """Return the number of rows."""

    def arguments(self) -> Sequence[Any]:
        """Return each row's arguments for this processor."""

    def states(self) -> Sequence[Any]:
        """Return each row's state for this processor."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the argument `name` of every row as [rows, 1] on the device.

        Whole numbers give int64, others float32. It is rebuilt only when the rows change.
        """

    def state_tensor(self, name: str) -> torch.Tensor:
        """Return the device state `name` of every row as [rows, *shape]; read it only."""


class LogitsPlugin(Component):
    """What every form of logits processor shares. Derive from one of the forms, not from this.

    A request uses the processor if it gives arguments for it: under `plugin_args[name]`, or by
    setting one of the `params_fields`. A class without `Arguments` of its own, once enabled, is
    used by every request.

    Attributes:
        phase: when it runs.
        argmax_invariant: True promises that the likeliest token of a row never changes; greedy
            requests then skip it.
        before, after: names of processors of the same phase that it must precede or follow.
        params_fields: fields of SamplingParams that it honours; those that `Arguments` has too
            become arguments. For the built-ins and their replacements.
        reads: what it looks at. This engine waits for token ids in every step; one that samples
            asynchronously will wait only where an active processor needs them.

    State. `apply` and `edits` never change it: they may be called twice for a step, or for rows
    that stand for draft tokens. Host state is built by `start` and carried on by `advance`; device
    state is declared by `device_state`, filled by `start_row` and carried on by `advance_rows`.
    """

    phase: ClassVar[Phase]
    argmax_invariant: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    params_fields: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[Reads] = Reads.HOST_IDS

    class Arguments(typed.Arguments):
        """No arguments; override with a subclass of `hardpoint.plugins.Arguments`."""

    context: LogitsContext

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:  # noqa: ARG003
        """Check or complete one request's arguments, in the frontend, once.

        Returns:
            The arguments to use: the same, or others of the same type (strings resolved to
            token ids, say).

        Raises:
            ValueError: to refuse the request; the message reaches the user, behind the path of the
                arguments. A RequestError reaches the user as it is.
        """
        return arguments

    @classmethod
    def uses(cls, params: SamplingParams) -> bool:  # noqa: ARG003
        """Whether a request uses the processor without giving arguments for it.

        By default those requests do if it takes no arguments. If they do, every field of
        `Arguments` must have a default.
        """
        return cls.Arguments is LogitsPlugin.Arguments

    def start(self, request: LogitsRequest) -> Any:  # noqa: ARG002
        """Return this request's state, from its prompt and the outputs so far.

        Called when a request enters the batch, also when it re-enters after preemption.
        """
        return None

    def advance(self, state: Any, token: int) -> Any:  # noqa: ARG002
        """Return the state after one more accepted output token; may change it in place.

        Called once per accepted token, before the next `apply` or `edits`.
        """
        return state

    def fork(self, state: Any) -> Any:
        """Return a copy that `advance` may carry over draft tokens without touching `state`."""
        return copy.deepcopy(state)

    def device_state(self) -> Mapping[str, TensorSpec]:
        """Return the tensors that the framework keeps for each request, by name."""
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
        """Carry device state over one more token per row, in place.

        Args:
            rows: those that got a token and use this processor.
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
            rows: who the rows belong to.

        Returns:
            float32 [rows, vocab]: `logits` itself or a new tensor.
        """


class Op(Enum):
    """What an edit does to its logit."""

    ADD = "add"
    """Add the value. A token at -inf stays there."""
    SET = "set"
    """Replace by the value."""
    KEEP_ONLY = "keep_only"
    """Set every other token of the row to -inf; values are not used. A kept token keeps its logit,
    also -inf."""


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
        """Return this step's edits; None is none.

        Returning the very object of the last step, while `rows.version` is the same, costs no
        check and no copy.
        """


class BatchLogitsProcessor(LogitsPlugin):
    """The batch form: every row of the running batch, and books of who stands where.

    For classes that were written so, and for work that crosses rows. Most authors want one of the
    other forms: here a mistake in the books gives one request another's treatment.

    Attributes:
        supports_drafts: whether `apply` is right when rows repeat for draft tokens; without it,
            speculation is refused by name.
    """

    supports_drafts: ClassVar[bool] = False

    @classmethod
    def uses(cls, params: SamplingParams) -> bool:  # noqa: ARG003
        """Whether a request uses this processor unasked; by default every request does."""
        return True

    @abstractmethod
    def update_state(self, update: BatchUpdate | None) -> None:
        """Take a step's changes of the batch, before the model runs; None is no change.

        Called every step, also without a change: output lists grow all the same.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the new logits.

        Args:
            logits: float32 [batch_size, vocab], in the rows of the batch; may be edited in place.
                Rows of requests that get no token in this step hold zeros.
        """
