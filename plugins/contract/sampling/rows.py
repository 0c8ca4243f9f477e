"""Rows of the logits: their requests, and how they move between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hardpoint.plugins.component.type_variables import ArgumentsT_co, StateT_co
from hardpoint.plugins.requests.params import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = [
    "Added",
    "BatchUpdate",
    "LogitsRequest",
    "Move",
    "Moved",
    "RowMap",
    "Rows",
]

T = TypeVar("T")


class Move(Enum):
    """Kinds of moves."""

    UNIDIRECTIONAL = "unidirectional"
    """The source's state moves to the destination; the source is empty afterwards."""
    SWAP = "swap"
    """Source and destination are swapped; one of them may be empty."""


@dataclass(frozen=True, eq=False)
class Added:
    """A request that was added to the batch; a previous request of the row is gone.

    Attributes:
        params: sampling parameters; `plugin_args` holds the checked arguments by plugin name.
        prompt_token_ids: None for a prompt of embeddings; for a mixed one None where one stands.
        output_token_ids: live list that grows with each token; do not copy it.
        generation: generation of the plugins that the request was admitted with.
    """

    row: int
    params: SamplingParams
    prompt_token_ids: Sequence[int] | None
    output_token_ids: Sequence[int]
    generation: int = 0


@dataclass(frozen=True)
class Moved:
    """A request that was moved to another row."""

    source: int
    destination: int
    direction: Move


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the batch since the last step: apply `removed`, then `added`, then `moved`.

    Attributes:
        batch_size: rows after the update; rows 0 to batch_size - 1 are in use.
        removed: rows that became empty, highest first.
    """

    batch_size: int
    removed: tuple[int, ...] = ()
    added: tuple[Added, ...] = ()
    moved: tuple[Moved, ...] = ()


class RowMap(Generic[T]):
    """State by row of a batch processor, updated with the batch.

    A function makes the state of an added request, or returns None if it needs none.
    """

    def __init__(self, start: Callable[[Added], T | None]) -> None:
        """Create an empty map; `start` is called once per added request."""
        self._start = start
        self._states: dict[int, T] = {}

    def __len__(self) -> int:
        """Return the number of rows with state."""
        return len(self._states)

    def __contains__(self, row: int) -> bool:
        """Return whether a row has state."""
        return row in self._states

    def __getitem__(self, row: int) -> T:
        """Return a row's state; KeyError if it has none."""
        return self._states[row]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows with state, in ascending order."""
        return iter(sorted(self._states))

    def apply(self, update: BatchUpdate | None) -> bool:
        """Apply a batch update to the states; return whether any changed."""
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
        # Both are removed before either is stored, so that chained moves do not overwrite.
        source = self._states.pop(move.source, None)
        destination = self._states.pop(move.destination, None)
        if source is not None:
            self._states[move.destination] = source
        if move.direction is Move.SWAP and destination is not None:
            self._states[move.source] = destination
        return source is not None or destination is not None


@dataclass(slots=True, eq=False, frozen=True)
class LogitsRequest:
    """One request, as logits processors see it: they change nothing of it.

    Attributes:
        prompt_token_ids: None in place of an id where the prompt has an embedding.
        output_token_ids: live list that grows with each token; do not copy it.
        stop_token_ids: every token id that ends the request.
        arguments: by plugin name, for the plugins that the request uses.
        state: results of `start`, by plugin name.
        child_index: index among the prompt's `n` completions.
        row: its row in the batch, in this step.
        sampler_arguments: its arguments for the sampler.
        draft_of: the request with the draft token that the row verifies; its `output_token_ids`
            then end with the drafts before it. None for other rows.
        generation: generation of the plugins that the request was admitted with.
        group: the group of a request with members, and of these; None of any other.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: Sequence[int]
    child_index: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0
    sampler_arguments: Any = None
    draft_of: LogitsRequest | None = None
    generation: int = 0
    group: RowGroup | None = None


@dataclass(slots=True, eq=False)
class RowGroup:
    """A request in the batch with its members, which run in the same steps.

    Attributes:
        leader: id of the request.
        parts: step parts that opened members; for each its name, its arguments of the request, and
            the ids of the members.
        requests: these requests by id, as far as they are in the batch.
        fault: the `RequestFault` of a part that was to combine logits; None without one.
    """

    leader: str
    parts: Sequence[tuple[str, Mapping[str, Any], Sequence[str]]] = ()
    requests: dict[str, LogitsRequest] = field(default_factory=dict)
    fault: Any = None

    @property
    def members(self) -> list[LogitsRequest]:
        """The members, in the order of the parts."""
        return [self.requests[name] for _, _, names in self.parts for name in names]


class Rows(Protocol[ArgumentsT_co, StateT_co]):
    """The rows of one step with requests that use a processor, in the order of `logits`.

    `Rows[Arguments, History]` in an annotation states the types of arguments and states.

    Attributes:
        requests: one per row.
        version: changes with the rows or their order; a key for caches. While it is the same, all
            rows get the same number of tokens.
    """

    if not TYPE_CHECKING:  # type checkers know that the second parameter has a default

        def __class_getitem__(cls, parameters: Any) -> Any:
            """Return the type for `Rows[Arguments]`, too."""
            pair = parameters if isinstance(parameters, tuple) else (parameters, Any)
            return super().__class_getitem__(pair)

    @property
    def requests(self) -> Sequence[LogitsRequest]:
        """One per row."""

    @property
    def version(self) -> int:
        """A key for caches."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def arguments(self) -> Sequence[ArgumentsT_co]:
        """Return each row's arguments for this processor."""

    def states(self) -> Sequence[StateT_co]:
        """Return each row's state for this processor."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the argument `name` of every row as [rows, 1] on the device.

        Whole numbers give int64, others float32. It is rebuilt only when the rows change.
        """

    def state_tensor(self, name: str) -> torch.Tensor:
        """Return the device state `name` of every row as [rows, *shape]; read it only."""


class DraftedStep(Protocol):
    """A step in which some requests have drafts: the rows of logits to sample.

    A row is a pair: the index of a request, and the number of its drafts that are before the row.
    Row `(index, n)` samples the token after the first n drafts of `requests[index]`. A request has
    one row more than drafts.

    Attributes:
        requests: requests that get tokens in this step.
        drafts: drafts of each request; may be empty.
        in_turn: whether a row can only be sampled after the row before it, since a logits
            processor of a request with drafts has `observe`, which reads the token's logprob.
    """

    requests: Sequence[LogitsRequest]
    drafts: Sequence[Sequence[int]]
    in_turn: bool

    def sample(self, rows: Sequence[tuple[int, int]]) -> Sequence[int | None]:
        """Sample the token of each of these rows, in one pass of logits processors and sampler.

        Rows may be sampled again. A row after drafts needs the row before it: in the same call,
        earlier in `rows`, or in an earlier call.

        Returns:
            None for a row that cannot be sampled: a logits processor failed for it. The fault of a
            request's first row ends the request.
        """
