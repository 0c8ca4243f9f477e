"""Adapter for classes in the form of vLLM V1's logits processors: `BatchUpdate`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hardpoint.plugins import (
    BatchUpdate,
    LogitsContext,
    LogitsRequest,
    Move,
    Phase,
    RowMap,
    Rows,
    SamplingParams,
)
from hardpoint.plugins.sampling import Added
from hardpoint.toolkit.logits_calls import drafts_of

from .drafts import base_of, by_depth
from .objects import ExternalParams, VllmConfigFields
from .rows import VLLMClass, run_on

if TYPE_CHECKING:
    import torch


V1_METHODS = ("is_argmax_invariant", "update_state", "apply")


class MoveDirectionality(Enum):
    """Stand-in for vLLM's enum where vLLM is not installed; members equal vLLM's by name."""

    UNIDIRECTIONAL = 1
    SWAP = 2

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is the member of this name of an enum of this name."""
        if not isinstance(other, Enum) or type(other).__name__ != "MoveDirectionality":
            return NotImplemented
        return self.name == other.name

    def __hash__(self) -> int:
        """Hash by name."""
        return hash(self.name)


@dataclass(frozen=True)
class ExternalBatchUpdate:
    """A batch update in vLLM's shape.

    Attributes:
        removed: rows.
        added: (row, params, prompt ids, live output ids).
        moved: (source, destination, direction).
    """

    batch_size: int
    removed: tuple[int, ...]
    added: tuple[tuple[int, ExternalParams, Any, Any], ...]
    moved: tuple[tuple[int, int, Enum], ...]


@dataclass(eq=False)
class _Handed:
    """A request as the class has it.

    Attributes:
        outputs: the request's live output tokens.
        seen: the list that the class has in their place; it grows by one token per call.
    """

    params: ExternalParams
    prompt: Any
    outputs: Sequence[int]
    seen: list[int]

    def grow(self) -> None:
        """Append the next output token, if there is one."""
        if len(self.seen) < len(self.outputs):
            self.seen.append(self.outputs[len(self.seen)])


class VLLMV1Class(VLLMClass):
    """Runs a class in vLLM V1's form on the rows of the batch.

    The class gets tokens one by one, as without speculation: `update_state(None)` is called once
    more for each further token that a step kept. Rows after draft tokens are computed by a copy of
    the object, which is dropped afterwards.
    """

    contract = 1
    phase = Phase.BIAS
    adapter = "vLLM V1 class"

    def __init__(self, context: LogitsContext) -> None:
        """Construct the external object.

        Raises:
            ValueError: `is_argmax_invariant` differs between class and object.
        """
        super().__init__(context)
        self._config = VllmConfigFields(context)
        self._inner = self.external.target(self._config, context.device, False)
        if self.argmax_invariant and not self._inner.is_argmax_invariant():
            raise ValueError(
                "is_argmax_invariant() is True before its constructor ran and False after; it "
                "must be a constant"
            )
        self._directions = _directions()
        self._rows = RowMap(self._handed)
        self._batch_size = 0

    def update_state(self, update: BatchUpdate | None) -> None:
        """Translate a batch update to vLLM's shape and pass it on, after the tokens before it."""
        gone = (
            set() if update is None else {*update.removed, *(added.row for added in update.added)}
        )
        staying = [self._rows[row] for row in self._rows if row not in gone]
        while any(len(row_state.seen) + 1 < len(row_state.outputs) for row_state in staying):
            for row_state in staying:
                row_state.grow()
            self._inner.update_state(None)
        for row_state in staying:
            row_state.grow()
        self._inner.update_state(None if update is None else self._translated(update))

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits that the external object returns for the rows."""
        requests = rows.requests
        groups = by_depth(requests)
        logits = self._applied(self._inner, logits, requests, groups[0])
        if len(groups) > 1:
            inner = self._copied()
            lengths = {row: len(self._rows[row].seen) for row in self._rows}
            deepest = {base_of(r).row: drafts_of(r) for r in sorted(requests, key=_num_drafts)}
            try:
                for depth, group in enumerate(groups[1:], 1):
                    for row, drafts in deepest.items():
                        self._rows[row].seen.extend(drafts[depth - 1 : depth])
                    inner.update_state(None)
                    logits = self._applied(inner, logits, requests, group)
            finally:
                for row, length in lengths.items():
                    del self._rows[row].seen[length:]
        return logits

    def _applied(
        self,
        inner: Any,
        logits: torch.Tensor,
        requests: Sequence[LogitsRequest],
        source: list[int],
    ) -> torch.Tensor:
        if not source:
            return logits
        place = [base_of(requests[index]).row for index in source]
        return run_on(logits, source, inner.apply, (place, self._batch_size))

    def _copied(self) -> Any:
        """Return a copy of the external object, which has the same lists of tokens.

        Raises:
            TypeError: it cannot be copied.
        """
        shared: list[Any] = [self._config]
        for row in self._rows:
            row_state = self._rows[row]
            shared += (row_state.params, row_state.prompt, row_state.seen)
        memo = {id(item): item for item in shared if item is not None}
        try:
            return copy.deepcopy(self._inner, memo)
        except Exception as cause:
            raise TypeError(
                f"it cannot be copied, which draft tokens need: {type(cause).__name__}: {cause}; "
                f"give the class a __deepcopy__, or turn speculation off"
            ) from cause

    def _handed(self, added: Added) -> _Handed:
        """Return a request for the class; with default parameters if it does not use the plugin."""
        params = self.params_of(added.params) or ExternalParams(SamplingParams(), {})
        outputs = added.output_token_ids
        return _Handed(params, added.prompt_token_ids, outputs, list(outputs))

    def _translated(self, update: BatchUpdate) -> ExternalBatchUpdate:
        self._batch_size = update.batch_size
        self._rows.apply(BatchUpdate(update.batch_size, update.removed, update.added))
        added_rows = {added.row: self._rows[added.row] for added in update.added}
        self._rows.apply(BatchUpdate(update.batch_size, moved=update.moved))
        return ExternalBatchUpdate(
            batch_size=update.batch_size,
            removed=update.removed,
            added=tuple((row, h.params, h.prompt, h.seen) for row, h in added_rows.items()),
            moved=tuple(
                (m.source, m.destination, self._directions[m.direction]) for m in update.moved
            ),
        )


def _num_drafts(request: LogitsRequest) -> int:
    return len(drafts_of(request))


def _directions() -> dict[Move, Enum]:
    """Return vLLM's own enum members where vLLM is installed, else the stand-ins."""
    directions: Any = MoveDirectionality
    try:
        module = importlib.import_module("vllm.v1.sample.logits_processor")
        directions = module.MoveDirectionality
    except ImportError:
        pass
    return {Move.UNIDIRECTIONAL: directions.UNIDIRECTIONAL, Move.SWAP: directions.SWAP}
