"""Run one logits processor over its rows, check its results and measure its cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch

from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.faults import log_fault, slow_message
from hardpoint.host.registry.blame import describe, faults_as, raise_unless_fault
from hardpoint.host.registry.request_arguments import skips_greedy
from hardpoint.host.system import torch_state
from hardpoint.plugins import (
    BatchLogitsProcessor,
    BatchUpdate,
    Edits,
    Finish,
    LogitsProcessor,
    LogitsRequest,
    RequestFault,
    SparseLogitsProcessor,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.device import to_device
from hardpoint.plugins.requests import FinishedError
from hardpoint.plugins.requests.stats import PluginMeter
from hardpoint.plugins.sampling.logits import FollowsBatch, LogitsPlugin
from hardpoint.plugins.sampling.phases import LogitsStage
from hardpoint.plugins.sampling.rows import Added
from hardpoint.plugins.sampling.states import takes_distribution
from hardpoint.toolkit.logits_calls.states import observer_of
from hardpoint.toolkit.logits_calls.tensor_checks import HandedOver
from hardpoint.typed import ReadOnlyDict

from .device_state import DeviceState
from .edits import CompiledEdits, compile_edits
from .rows import ProcessorRows

Faults = dict[str, RequestFault]
"""Requests that cannot go on, by id."""
End = RequestFault | Finish
Ends = dict[str, End]


class ProcessorError(Exception):
    """A processor failed for its rows as a whole; the step has to run again without that."""

    def __init__(self, runner: ProcessorRunner, cause: BaseException) -> None:
        super().__init__(runner.name)
        self.runner = runner
        self.cause = cause


@dataclass(eq=False)
class ProcessorRunner:
    """A logits processor with its origin, device state and meter.

    Attributes:
        source: names the plugin in messages.
        max_rows: rows of device state to allocate.
        ends_engine: a fault ends the engine instead of the requests that use the plugin.
        rebuild: builds a new processor when one that follows the batch has lost it; without
            it, the processor stays broken.
        activity: records the method that runs.
        slow_seconds: above which its time in a step is counted; 0 is never.
        seconds_before: seconds of the meter at the last `end_step`.
        broken: the error of `update_state` that lost the batch state, None if there was none.
        since: the generation of the plugins from which on requests use it.
        until: the generation from which on they do not any more; None if they do.
    """

    processor: LogitsPlugin
    source: Source
    device: torch.device
    max_rows: int
    ends_engine: bool = False
    rebuild: Callable[[], LogitsPlugin] | None = None
    meter: PluginMeter = field(default_factory=PluginMeter)
    activity: Activity = field(default_factory=partial(Activity, compares_settings=False))
    slow_seconds: float = 0.0
    broken: BaseException | None = None
    since: int = 0
    until: int | None = None

    def __post_init__(self) -> None:
        self.name = self.processor.name
        self.cells, self.compares_settings = self.activity.cells, self.activity.compares_settings
        self.seconds_before = 0.0
        cls = type(self.processor)
        self.has_state = cls.start is not LogitsPlugin.start
        self.advances = self.has_state and cls.advance is not LogitsPlugin.advance
        self.observes = cls.observe is not LogitsPlugin.observe
        self.wants_distribution = takes_distribution(cls)
        self.observe = observer_of(self.processor)
        # Stored, because isinstance on an abstract class takes as long as a sparse edit.
        self.is_sparse = isinstance(self.processor, SparseLogitsProcessor)
        self.is_dense = isinstance(self.processor, LogitsProcessor)
        self.greedy_skips = skips_greedy(self.processor)
        with faults_as(PluginFaultError, f"{self.source}: its device_state"):
            self.device_state = DeviceState(self.processor, self.max_rows, self.device)
        self.has_device_state = bool(self.device_state)
        self.number = self._number(self.method_name)  # read in every step
        self.stage = LogitsStage(self.source, self.processor.phase)
        self._joins = self.since > 0  # a batch that has requests already

    def serves(self, generation: int) -> bool:
        """Return whether requests of a generation of the plugins use it, if they use its name."""
        return self.since <= generation and (self.until is None or generation < self.until)

    def is_used_by(self, request: LogitsRequest) -> bool:
        """Return whether a request uses it."""
        return self.name in request.arguments and self.serves(request.generation)

    def fault(self, method: str, cause: BaseException | str) -> RequestFault:
        """Count a fault of this processor, and return it for the request that it ends.

        Args:
            cause: raised by the method, or the defect of its result.

        Raises:
            PluginFaultError: instead, if faults end the engine by the configuration.
            BaseException: the cause, if it is no fault.
        """
        error = None if isinstance(cause, str) else cause
        if error is not None:
            raise_unless_fault(error)
        self.meter.faults += 1
        message = f"{self.source}: its {method} failed: {describe(error) if error else cause}"
        if self.ends_engine:
            raise PluginFaultError(message) from error
        if self.meter.faults == 1:  # it may fail for each of its requests
            log_fault(message, error, "the request ends; later faults of it are counted only")
        return RequestFault(message, self.name)

    def end(self, method: str, cause: BaseException) -> End:
        """Return the end of a request by a `Finish`, or the fault; see `fault`."""
        if not isinstance(cause, FinishedError):
            return self.fault(method, cause)
        if cause.finish.num_tokens is not None:
            return self.fault(method, "Finish.num_tokens: expected None, as it gets each token")
        return cause.finish.of(self.source.name)

    @contextmanager
    def measured(self, method: str) -> Iterator[None]:
        """Record that a method runs in the context; add the time spent to the meter."""
        outer, self.cells[0] = self.cells[0], self._number(method)
        before = torch_state.read() if self.compares_settings else None
        began = time.perf_counter()
        try:
            yield
        finally:
            if before is not None and torch_state.read() != before:
                torch_state.put_back(before, self.source, method)
            self.meter.seconds += time.perf_counter() - began
            self.cells[0] = outer

    def end_step(self) -> None:
        """Count the step since the last call of this, if the processor took too long in it."""
        before, self.seconds_before = self.seconds_before, self.meter.seconds
        if (seconds := self.meter.seconds - before) > self.slow_seconds:
            self.meter.slow_steps += 1
            self.meter.slowest_step = max(seconds, self.meter.slowest_step)
            if self.meter.slow_steps == 1:
                slow_message(self.source, seconds, self.slow_seconds)

    def _number(self, method: str) -> int:
        return self.activity.number("logits_processors", self.source, method)

    @property
    def method_name(self) -> str:
        """The name of the method that changes logits."""
        return "edits" if self.is_sparse else "apply"

    def update(
        self, update: BatchUpdate | None, full_update: Callable[[], BatchUpdate] | None = None
    ) -> None:
        """Pass the changes of the batch to a processor that follows it; move device state along.

        A broken processor is rebuilt from `full_update` after its users have ended.
        """
        if update is not None and self.has_device_state:
            self.device_state.move(update)
        if not isinstance(self.processor, FollowsBatch):
            return
        try:
            with self.measured("update_state"):
                if self._joins and full_update is not None:
                    self._joins, update = False, full_update()
                elif self.broken is not None:
                    if self.rebuild is None or full_update is None:
                        return
                    self.processor.close()
                    self.processor, update = self.rebuild(), full_update()
                assert isinstance(self.processor, FollowsBatch)  # rebuilt of the same class
                self.processor.update_state(self._of_its_generations(update))
                self.broken = None
        except BaseException as cause:
            raise_unless_fault(cause)
            self.broken = cause

    def _of_its_generations(self, update: BatchUpdate | None) -> BatchUpdate | None:
        if update is None or all(self.serves(added.generation) for added in update.added):
            return update
        return replace(update, added=tuple(map(self._without_others, update.added)))

    def _without_others(self, added: Added) -> Added:
        arguments = added.params.plugin_args
        if self.serves(added.generation) or self.name not in arguments:
            return added
        remaining = ReadOnlyDict({name: arguments[name] for name in arguments if name != self.name})
        return replace(added, params=msgspec.structs.replace(added.params, plugin_args=remaining))

    def active_rows(self, requests: Sequence[LogitsRequest], version: int) -> ActiveRows | None:
        """Return the rows of a step that use the processor, or None if no row does."""
        rows = [
            row
            for row, request in enumerate(requests)
            if self.is_used_by(request) and not (self.greedy_skips and request.params.greedy)
        ]
        if not rows:
            return None
        processor_rows = ProcessorRows(
            self.name, [requests[row] for row in rows], version, self.device, self.device_state
        )
        index = to_device(rows, self.device) if len(rows) < len(requests) else None
        return ActiveRows(self, processor_rows, rows, index)


@dataclass(eq=False)
class ActiveRows:
    """The rows that use one processor, for as long as the rows of the step stay the same.

    Attributes:
        rows: as the processor sees them.
        batch_rows: their places in the step's logits.
        index: the same on the device; None if every row uses the processor.
        last_edits: the edits that `compiled` was made from.
    """

    runner: ProcessorRunner
    rows: ProcessorRows
    batch_rows: list[int]
    index: torch.Tensor | None
    last_edits: Edits | None = None
    compiled: CompiledEdits | None = None

    def run(self, logits: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Run the processor over its rows.

        Args:
            logits: float32 [rows, vocab]; may be edited in place.
            batch_size: rows of the worker's batch, for batch-level processors.

        Raises:
            ProcessorError: the processor failed; `logits` may be damaged.
        """
        runner = self.runner
        meter, cells = runner.meter, runner.cells
        meter.steps += 1
        outer, cells[0] = cells[0], runner.number
        # Not `measured`: a context manager costs more than the edits.
        before = torch_state.read() if runner.compares_settings else None
        began = time.perf_counter()
        try:
            return self._dispatch(logits, batch_size)
        except BaseException as cause:
            raise_unless_fault(cause)
            raise ProcessorError(runner, cause) from cause
        finally:
            if before is not None and torch_state.read() != before:
                torch_state.put_back(before, runner.source, runner.method_name)
            cells[0] = outer
            meter.seconds += time.perf_counter() - began
            meter.rows += len(self.batch_rows)

    def _dispatch(self, logits: torch.Tensor, batch_size: int) -> torch.Tensor:
        runner = self.runner
        processor: Any = runner.processor
        if runner.broken is not None:
            raise runner.broken
        if runner.is_sparse:
            self._apply_edits(processor.edits(self.rows), logits)
            return logits
        if runner.is_dense:
            part = logits if self.index is None else logits.index_select(0, self.index)
            handed_over = HandedOver(part)
            result = handed_over.result(processor.apply(part, self.rows))
            return result if self.index is None else logits.index_copy_(0, self.index, result)
        return self._apply_to_batch(processor, logits, batch_size)

    def _apply_edits(self, edits: Edits | None, logits: torch.Tensor) -> None:
        if edits is None:
            return
        if edits is not self.last_edits or self.compiled is None:
            if not isinstance(edits, Edits):
                raise TypeError(f"expected Edits or None, got {type(edits).__name__}")
            ops = self.runner.processor.context.ops
            self.compiled = compile_edits(edits, self.batch_rows, logits, ops)
            self.last_edits = edits
        self.compiled(logits)

    def _apply_to_batch(
        self, processor: BatchLogitsProcessor, logits: torch.Tensor, batch_size: int
    ) -> torch.Tensor:
        """Apply a batch-level processor: in the batch's row order, then copy its rows back.

        A batch row that has several rows in the step, for draft tokens, is applied once for each.
        """
        for layer in _layers(self.rows.requests):
            requests = [self.rows.requests[index] for index in layer]
            source = to_device([self.batch_rows[index] for index in layer], logits.device)
            target = to_device([_row_in_batch(r) for r in requests], logits.device)
            batch = logits.new_zeros(batch_size, logits.shape[1])
            batch.index_copy_(0, target, logits.index_select(0, source))
            handed_over = HandedOver(batch)
            result = handed_over.result(processor.apply(batch))
            logits.index_copy_(0, source, result.index_select(0, target))
        return logits


def _layers(requests: Sequence[LogitsRequest]) -> list[list[int]]:
    """Group the positions of `requests` so that a group has each batch row once, in order."""
    seen: dict[int, int] = {}
    layers: list[list[int]] = []
    for index, request in enumerate(requests):
        row = _row_in_batch(request)
        depth = seen[row] = seen.get(row, -1) + 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(index)
    return layers


def _row_in_batch(request: LogitsRequest) -> int:
    return request.row if request.draft_of is None else request.draft_of.row


def row_is_finite(row: torch.Tensor) -> bool:
    """Return whether a token can be chosen from logits [vocab]: NaN and +inf win every maximum."""
    return math.isfinite(float(row.amax()))
