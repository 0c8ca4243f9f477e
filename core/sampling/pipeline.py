"""The logits pipeline: runs the processors of a step over the rows that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.plugins import (
    Edits,
    LogitsProcessor,
    LogitsRequest,
    Phase,
    PluginFaultError,
    SparseLogitsProcessor,
)
from hardpoint.plugins.loading import Source
from hardpoint.plugins.logits import LogitsPlugin

from .edits import CompiledEdits, compile_edits
from .rows import ProcessorRows

__all__ = ["LogitsPipeline", "Stage"]


@dataclass(frozen=True)
class Stage:
    """A processor and who it is."""

    processor: LogitsPlugin
    source: Source


@dataclass(eq=False)
class _Active:
    """A processor that some row of the current batch uses.

    Attributes:
        batch_rows: its rows in the step's logits.
        index: the same on the device; None if it has every row.
    """

    stage: Stage
    rows: ProcessorRows
    batch_rows: list[int]
    index: torch.Tensor | None
    last_edits: Edits | None = None
    compiled: CompiledEdits | None = None


class LogitsPipeline:
    """Runs processors in their order. One that no row uses costs nothing in a step."""

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        """`stages` are in the order in which they run."""
        self._stages = stages
        self._device = device
        self._by_name = {stage.processor.name: stage for stage in stages}
        self._stateful = {
            name
            for name, stage in self._by_name.items()
            if type(stage.processor).start is not LogitsPlugin.start
        }
        self._active: list[_Active] = []
        self._members: list[LogitsRequest] = []
        self._version = 0

    def start(self, request: LogitsRequest) -> None:
        """Build the states of a request that enters the batch."""
        for name in request.arguments:
            if name in self._stateful:
                stage = self._by_name[name]
                request.state[name] = _blaming(stage, "start", stage.processor.start, request)

    def advance(self, request: LogitsRequest, token: int) -> None:
        """Carry a request's states over one more output token."""
        for name, state in request.state.items():
            stage = self._by_name[name]
            request.state[name] = _blaming(stage, "advance", stage.processor.advance, state, token)

    def apply(self, logits: torch.Tensor, requests: list[LogitsRequest]) -> torch.Tensor:
        """Run the processors.

        Args:
            logits: float32 [rows, vocab]; may be edited in place.
            requests: one per row; a request that left the batch and came back is a new object.
        """
        if requests != self._members:  # compares identities: LogitsRequest has no equality
            self._activate(requests)
        for active in self._active:
            processor = active.stage.processor
            if isinstance(processor, SparseLogitsProcessor):
                _blaming(active.stage, "edits", self._edit, processor, active, logits)
            elif isinstance(processor, LogitsProcessor):
                logits = _blaming(active.stage, "apply", _transform, processor, active, logits)
        return logits

    def _activate(self, requests: list[LogitsRequest]) -> None:
        """Find who uses what; done only when the rows change."""
        self._version += 1
        self._members = list(requests)
        self._active = []
        used = {name for request in requests for name in request.arguments}
        for stage in self._stages:
            if (name := stage.processor.name) not in used:
                continue
            greedy_skips = stage.processor.argmax_invariant or (
                stage.processor.phase is Phase.TEMPERATURE
            )
            batch_rows = [
                row
                for row, request in enumerate(requests)
                if name in request.arguments and not (greedy_skips and request.params.greedy)
            ]
            if not batch_rows:
                continue
            every = len(batch_rows) == len(requests)
            self._active.append(
                _Active(
                    stage=stage,
                    rows=ProcessorRows(
                        name, [requests[row] for row in batch_rows], self._version, self._device
                    ),
                    batch_rows=batch_rows,
                    index=None if every else torch.tensor(batch_rows, device=self._device),
                )
            )

    def _edit(
        self, processor: SparseLogitsProcessor, active: _Active, logits: torch.Tensor
    ) -> None:
        edits = processor.edits(active.rows)
        if edits is None:
            return
        if edits is not active.last_edits or active.compiled is None:
            if not isinstance(edits, Edits):
                raise TypeError(f"expected Edits or None, got {type(edits).__name__}")
            active.compiled = compile_edits(edits, active.batch_rows, logits)
            active.last_edits = edits
        active.compiled(logits)


def _transform(processor: LogitsProcessor, active: _Active, logits: torch.Tensor) -> torch.Tensor:
    part = logits if active.index is None else logits.index_select(0, active.index)
    result: Any = processor.apply(part, active.rows)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(result).__name__}")
    for what in ("shape", "dtype", "device"):
        wanted, got = getattr(part, what), getattr(result, what)
        if got != wanted:
            raise ValueError(f"expected logits of {what} {wanted}, got {got}")
    return result if active.index is None else logits.index_copy_(0, active.index, result)


def _blaming(stage: Stage, what: str, call: Any, *arguments: Any) -> Any:
    """Call; on an error raise one that names the plugin."""
    try:
        return call(*arguments)
    except Exception as cause:
        raise PluginFaultError(
            f"{stage.source}: its {what} failed: {type(cause).__name__}: {cause}"
        ) from cause
