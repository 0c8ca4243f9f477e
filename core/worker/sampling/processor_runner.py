"""One processor in the pipeline: run over its rows, checked, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hardpoint.plugins import (
    BatchLogitsProcessor,
    BatchUpdate,
    Edits,
    LogitsProcessor,
    LogitsRequest,
    Phase,
    RequestFault,
    SparseLogitsProcessor,
)
from hardpoint.plugins.errors import PluginFaultError
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.plugins.manifest import Source
from hardpoint.plugins.stats import PluginMeter

from .device_state import DeviceState
from .edits import CompiledEdits, compile_edits
from .rows import ProcessorRows


class StageFault(Exception):  # noqa: N818 - it is control flow: the step is run again
    """A stage failed for its rows as a whole; the guilty are to be found one by one."""

    def __init__(self, stage: Stage, cause: Exception) -> None:
        """Keep who failed and why."""
        super().__init__(f"{stage.name}: {cause}")
        self.stage = stage
        self.cause = cause


@dataclass(eq=False)
class Stage:
    """A processor, who it is, and what it cost.

    Attributes:
        ends_engine: a fault ends the engine instead of the requests that use the plugin.
        rebuild: builds the processor afresh when its books of the batch are lost; without it, it
            stays broken.
        broken: why it cannot run any more, if its books of the batch are lost.
    """

    processor: LogitsPlugin
    source: Source
    device: torch.device
    max_rows: int
    ends_engine: bool = False
    rebuild: Callable[[], LogitsPlugin] | None = None
    meter: PluginMeter = field(default_factory=PluginMeter)
    broken: Exception | None = None

    def __post_init__(self) -> None:
        """Derive what does not change."""
        self.name = self.processor.name
        cls = type(self.processor)
        self.has_state = cls.start is not LogitsPlugin.start
        self.advances = self.has_state and cls.advance is not LogitsPlugin.advance
        # Kept, because isinstance on an abstract class takes as long as a sparse edit.
        self.is_sparse = isinstance(self.processor, SparseLogitsProcessor)
        self.is_dense = isinstance(self.processor, LogitsProcessor)
        self.greedy_skips = self.processor.argmax_invariant or (
            self.processor.phase is Phase.TEMPERATURE
        )
        self.device_state = DeviceState(self.processor, self.max_rows, self.device)

    def fault(self, what: str, cause: Exception | str) -> RequestFault:
        """Return the fault of one request that this stage ends, and count it.

        Raises:
            PluginFaultError: instead, if the operator wants the engine to end.
        """
        self.meter.faults += 1
        reason = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        message = f"{self.source}: its {what} failed: {reason}"
        if self.ends_engine:
            raise PluginFaultError(message) from (None if isinstance(cause, str) else cause)
        return RequestFault(message, self.name)

    @contextmanager
    def measured(self, rows: int = 0) -> Iterator[None]:
        """Add the time spent inside to the meter."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.meter.seconds += time.perf_counter() - began
            self.meter.rows += rows

    @property
    def what(self) -> str:
        """The name of the method that changes logits."""
        return "edits" if isinstance(self.processor, SparseLogitsProcessor) else "apply"

    def update(
        self, update: BatchUpdate | None, whole: Callable[[], BatchUpdate] | None = None
    ) -> None:
        """Hand a batch-level processor the changes of the batch; keep device state in place.

        One that failed has lost its books; its users have ended since. It starts again with
        the `whole` batch as it is now.
        """
        if update is not None and self.device_state:
            self.device_state.move(update)
        if not isinstance(self.processor, BatchLogitsProcessor):
            return
        try:
            with self.measured():
                if self.broken is not None:
                    if self.rebuild is None or whole is None:
                        return
                    self.processor.close()
                    self.processor, update = self.rebuild(), whole()
                assert isinstance(self.processor, BatchLogitsProcessor)  # rebuilt of the same class
                self.processor.update_state(update)
                self.broken = None
        except Exception as cause:
            self.broken = cause

    def share(self, requests: Sequence[LogitsRequest], version: int) -> Share | None:
        """Return this stage's part of a step, or None if no row uses it."""
        rows = [
            row
            for row, request in enumerate(requests)
            if self.name in request.arguments and not (self.greedy_skips and request.params.greedy)
        ]
        if not rows:
            return None
        own = ProcessorRows(
            self.name, [requests[row] for row in rows], version, self.device, self.device_state
        )
        every = len(rows) == len(requests)
        index = None if every else torch.tensor(rows, device=self.device)
        return Share(self, own, rows, index)


@dataclass(eq=False)
class Share:
    """A stage's rows in one make-up of the batch.

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

    def run(self, logits: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Run the processor over its rows.

        Raises:
            StageFault: it failed; rows of its own may be damaged.
        """
        meter = self.stage.meter
        meter.steps += 1
        began = time.perf_counter()  # not `measured`: a context manager costs more than the edits
        try:
            return self._dispatch(logits, batch_size)
        except Exception as cause:
            raise StageFault(self.stage, cause) from cause
        finally:
            meter.seconds += time.perf_counter() - began
            meter.rows += len(self.batch_rows)

    def _dispatch(self, logits: torch.Tensor, batch_size: int) -> torch.Tensor:
        stage = self.stage
        processor: Any = stage.processor
        if stage.is_sparse:
            self._edit(processor.edits(self.rows), logits)
            return logits
        if stage.is_dense:
            part = logits if self.index is None else logits.index_select(0, self.index)
            return self._put_back(logits, _checked(processor.apply(part, self.rows), part))
        if stage.broken is not None:
            raise stage.broken
        return self._whole_batch(processor, logits, batch_size)

    def _edit(self, edits: Edits | None, logits: torch.Tensor) -> None:
        if edits is None:
            return
        if edits is not self.last_edits or self.compiled is None:
            if not isinstance(edits, Edits):
                raise TypeError(f"expected Edits or None, got {type(edits).__name__}")
            self.compiled = compile_edits(edits, self.batch_rows, logits)
            self.last_edits = edits
        self.compiled(logits)

    def _whole_batch(
        self, processor: BatchLogitsProcessor, logits: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """Lay the step's rows out as the batch has them, apply, and take its own rows back.

        Rows that repeat for draft tokens are applied position by position.
        """
        for layer in _layers(self.rows.requests):
            requests = [self.rows.requests[place] for place in layer]
            source = torch.tensor([self.batch_rows[place] for place in layer], device=logits.device)
            target = torch.tensor([_row_in_batch(r) for r in requests], device=logits.device)
            whole = logits.new_zeros(batch_size, logits.shape[1])
            whole.index_copy_(0, target, logits.index_select(0, source))
            result = _checked(processor.apply(whole), whole)
            logits.index_copy_(0, source, result.index_select(0, target))
        return logits

    def _put_back(self, logits: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return result if self.index is None else logits.index_copy_(0, self.index, result)


def _layers(requests: Sequence[LogitsRequest]) -> list[list[int]]:
    """Group places so that each batch row stands once per group, in order."""
    seen: dict[int, int] = {}
    layers: list[list[int]] = []
    for place, request in enumerate(requests):
        row = _row_in_batch(request)
        depth = seen[row] = seen.get(row, -1) + 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(place)
    return layers


def _row_in_batch(request: LogitsRequest) -> int:
    return request.row if request.draft_of is None else request.draft_of.row


def _checked(result: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a processor's result if it is logits like those that it was given."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(result).__name__}")
    for what in ("shape", "dtype", "device"):
        wanted, got = getattr(part, what), getattr(result, what)
        if got != wanted:
            raise ValueError(f"expected logits of {what} {wanted}, got {got}")
    return result


def row_is_sound(row: torch.Tensor) -> bool:
    """Whether a token can be chosen from logits [vocab]: no NaN, no +inf, something left."""
    return math.isfinite(float(row.amax()))
