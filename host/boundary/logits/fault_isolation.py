"""Runs logits processors again after a fault, so that it ends only the requests at fault."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch

from hardpoint.host.boundary.parts.worker_parts import LogitsObserver
from hardpoint.plugins import BatchLogitsProcessor, LogitsRequest, RequestFault

from .processor_runner import ActiveRows, Faults, ProcessorError, ProcessorRunner, row_is_finite

Recompute = Callable[[], torch.Tensor]
"""Returns the step's logits again, unedited, from its hidden states."""


class StepPipeline(Protocol):
    """Runs processors in their order."""

    runners: Sequence[ProcessorRunner]
    batch_size: int
    observer: LogitsObserver | None

    def active_rows(self, requests: list[LogitsRequest]) -> Sequence[ActiveRows]:
        """Return the rows of each processor that one of a step's requests uses, in order."""

    def single_row(self, runner: ProcessorRunner, request: LogitsRequest) -> ActiveRows | None:
        """Return a step of one request for a processor; None if the request does not use it."""


class FaultIsolation:
    """The repeated runs of one step in which a processor failed.

    A processor that raised, or that may have damaged rows of other requests, is *isolated*: it runs
    row by row, and a row for which it fails stays as it was.

    Args:
        requests: one per row of the step.
        recompute: returns the step's logits, as the processors get them.
        masked: indices of the rows that a grammar constrains.

    Attributes:
        faults: requests that cannot go on, by id.
        recompute: returns the step's logits again, as the processors get them.
    """

    def __init__(
        self,
        pipeline: StepPipeline,
        requests: list[LogitsRequest],
        recompute: Recompute,
        masked: Container[int] = (),
    ) -> None:
        self.faults: Faults = {}
        self._masked = masked
        self._pipeline = pipeline
        self._requests = requests
        self.recompute = recompute
        # What an isolated processor raised when it ran for all of its rows at once.
        self._isolated: dict[ProcessorRunner, BaseException | None] = {}

    def isolate(self, runner: ProcessorRunner, error: BaseException | None = None) -> None:
        """Isolate a processor; the first `error` of a processor is kept."""
        self._isolated.setdefault(runner, error)

    def isolate_users(self, request: LogitsRequest) -> None:
        """Isolate every processor of a request that can run on a single row."""
        for runner in self._pipeline.runners:
            if runner.is_used_by(request) and not _is_batch_level(runner):
                self.isolate(runner)

    def run(self, logits: torch.Tensor, *, check_batch_level: bool = False) -> torch.Tensor:
        """Run the processors, and again after each fault, with the failed processor isolated.

        Args:
            logits: float32 [rows, vocab]; may be edited in place.
            check_batch_level: check the rows after each batch-level processor, and count a row that
                is not finite as its fault: all other processors were tried on that row alone.
        """
        while True:
            try:
                return self._apply(logits, check_batch_level=check_batch_level)
            except ProcessorError as error:
                self.isolate(error.runner, error.cause)
                logits = self.recompute()

    def find_fault(self, logits: torch.Tensor, index: int) -> RequestFault | None:
        """Return the fault of the processor that damages a row, None if none does.

        Batch-level processors are not tried, because they cannot run on one row.

        Args:
            logits: float32 [rows, vocab], of `recompute`.
        """
        request = self._requests[index]
        masked = index in self._masked
        if not row_is_finite(logits[index]):
            after = ", or -inf for each token that its grammar allows" if masked else ""
            return RequestFault(f"the model gave logits that are NaN, infinite or all -inf{after}")
        row = logits[index : index + 1].clone()
        applied = ["the grammar of `structured`"] if masked else []
        for runner in self._pipeline.runners:
            single = self._pipeline.single_row(runner, request)
            if single is None or _is_batch_level(runner):
                continue
            try:
                row = single.run(row, 1)
            except ProcessorError as error:
                return runner.fault(runner.method_name, error.cause)
            if not row_is_finite(row[0]):
                return runner.fault(runner.method_name, _damage(row[0], applied))
            applied.append(runner.name)
        return None

    def _apply(self, logits: torch.Tensor, *, check_batch_level: bool) -> torch.Tensor:
        for active in self._pipeline.active_rows(self._requests):
            if active.runner in self._isolated:
                self._run_per_row(active, logits)
            else:
                logits = active.run(logits, self._pipeline.batch_size)
                if check_batch_level and _is_batch_level(active.runner):
                    self._check_rows(active, logits)
            if self._pipeline.observer is not None:
                self._pipeline.observer(active.runner.stage, logits, self._requests)
        return logits

    def _run_per_row(self, active: ActiveRows, logits: torch.Tensor) -> None:
        runner = active.runner
        for row, request in zip(active.batch_rows, active.rows.requests, strict=True):
            if request.request_id in self.faults:
                continue
            if _is_batch_level(runner):  # it knows no requests, so its fault is that of all users
                method = "update_state" if runner.broken is not None else "apply"
                cause = self._isolated[runner] or "its result is unusable"
                self.faults[request.request_id] = runner.fault(method, cause)
                continue
            single = self._pipeline.single_row(runner, request)
            assert single is not None  # it is one of the processor's rows
            try:
                logits[row] = single.run(logits[row : row + 1].clone(), 1)[0]
            except ProcessorError as error:
                self.faults[request.request_id] = runner.fault(runner.method_name, error.cause)

    def _check_rows(self, active: ActiveRows, logits: torch.Tensor) -> None:
        for row, request in zip(active.batch_rows, active.rows.requests, strict=True):
            if request.request_id not in self.faults and not row_is_finite(logits[row]):
                fault = active.runner.fault("apply", _damage(logits[row], ()))
                self.faults[request.request_id] = fault


def _is_batch_level(runner: ProcessorRunner) -> bool:
    return isinstance(runner.processor, BatchLogitsProcessor)


def _damage(row: torch.Tensor, applied: Sequence[str]) -> str:
    if bool(row.isnan().any()):
        return "it made logits NaN"
    if bool((row == torch.inf).any()):
        return "it made logits infinite"
    after = f", after {', '.join(applied)}" if applied else ""
    return f"it left no token to choose{after}"
