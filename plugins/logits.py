"""Logits processors: change what the model says before a token is chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from . import typed
from .component import Component, Context
from .params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .tokenizing import Tokenizer

__all__ = [
    "Edits",
    "LogitsContext",
    "LogitsPlugin",
    "LogitsProcessor",
    "LogitsRequest",
    "Op",
    "Phase",
    "PrepareContext",
    "Rows",
    "SparseLogitsProcessor",
]


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


@dataclass(frozen=True, kw_only=True)
class LogitsContext(Context):
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
    """

    options: Any
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    vocab_size: int
    tokenizer: Tokenizer | None


@dataclass(slots=True, eq=False)
class LogitsRequest:
    """One request as logits processors see it.

    Attributes:
        output_token_ids: grows as tokens are chosen; read it, never keep a copy.
        stop_token_ids: every token id that ends the request.
        arguments: by plugin name; present for the plugins that the request uses.
        state: by plugin name, what `start` returned.
        child_index: which of the prompt's `n` completions.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: Sequence[int]
    child_index: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


class Rows(Protocol):
    """The rows of one step whose requests use a processor, in the order of `logits`.

    Attributes:
        requests: one per row.
        version: changes whenever the rows or their order change; for caches.
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
        params_fields: fields of SamplingParams that it honours; `Arguments` has fields of the
            same names. For replacements of the built-ins.
    """

    phase: ClassVar[Phase]
    argmax_invariant: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    params_fields: ClassVar[tuple[str, ...]] = ()

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
            ValueError: to refuse the request; the message reaches the user.
        """
        return arguments

    def start(self, request: LogitsRequest) -> Any:  # noqa: ARG002
        """Return this request's state, from its prompt and the outputs so far.

        Called when a request enters the batch, also when it re-enters after preemption.
        """
        return None

    def advance(self, state: Any, token: int) -> Any:  # noqa: ARG002
        """Return the state after one more accepted output token; may change it in place."""
        return state


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
    """Set every other token of the row to -inf; values are not used."""


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
