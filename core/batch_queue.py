"""Steps that are under way at once, for executors that work as a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput

__all__ = ["Batch", "BatchQueue", "start_batch"]

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """A step that was started.

    Attributes:
        forward: of the model; a result of None means that sampling has it.
        sampling: None where the plan has no tokens, so that nothing is sampled.
    """

    plan: SchedulerOutput
    forward: Future[ModelRunnerOutput | None]
    sampling: Future[ModelRunnerOutput] | None

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.forward.done() and (self.sampling is None or self.sampling.done())

    def result(self) -> ModelRunnerOutput:
        """Wait for the outcome.

        Raises:
            BaseException: the forward pass's own error, or else that of sampling.
        """
        output = self.forward.result()
        if output is None and self.sampling is not None:
            output = self.sampling.result()
        if output is None:
            raise RuntimeError(f"the executor gave no result for step {self.plan.step}")
        return output


class BatchQueue:
    """Batches in the order in which they were planned, at most so many at once."""

    def __init__(self, depth: int) -> None:
        """Start empty, with room for `depth` batches."""
        self._depth = depth
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        """Return the number of batches under way."""
        return len(self._batches)

    @property
    def has_time(self) -> bool:
        """Whether another batch can be started before anything is ready to be taken."""
        return len(self._batches) < self._depth and not self._batches[0].done

    def push(self, batch: Batch) -> None:
        """Add the newest batch.

        Raises:
            RuntimeError: there is no room; a batch that was dropped would never come back.
        """
        if len(self._batches) >= self._depth:
            raise RuntimeError(f"{self._depth} batches are under way, no more may be")
        self._batches.append(batch)

    def pop(self) -> Batch:
        """Take out the oldest batch, which need not be done."""
        return self._batches.popleft()


def start_batch(
    plan: SchedulerOutput,
    execute: Callable[[SchedulerOutput], Future[ModelRunnerOutput | None]],
    sample: Callable[[SchedulerOutput], Future[ModelRunnerOutput]],
) -> Batch:
    """Start a step. What fails here fails when the step's turn comes: results stay in order."""
    forward = _called(execute, plan)
    sampling = _called(sample, plan) if plan.total_num_scheduled_tokens else None
    return Batch(plan, forward, sampling)


def _called(call: Callable[[SchedulerOutput], Future[T]], plan: SchedulerOutput) -> Future[T]:
    try:
        return call(plan)
    except BaseException as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed
