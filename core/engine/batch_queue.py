"""The batches that are under way at once in an executor that works as a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from hardpoint.host.boundary.step_check import no_result, result_of
from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")

Sample = Callable[[SchedulerOutput], Future[ModelRunnerOutput]]


@dataclass
class Batch:
    """A step that was started.

    Attributes:
        plan: the plan of the step.
        forward: the forward pass; None as its result means that sampling gives the step's result.
        sampling: None where no token is sampled, or sampling is deferred.
        is_deferred: whether sampling is still to be started.
        is_lost: whether the plan never reached the executor.
    """

    plan: SchedulerOutput
    forward: Future[ModelRunnerOutput | None]
    sampling: Future[ModelRunnerOutput] | None = None
    is_deferred: bool = False
    is_lost: bool = False

    @classmethod
    def lost(cls, plan: SchedulerOutput) -> Batch:
        """Return the batch of a plan that an interrupt kept from being started."""
        return cls(plan, completed_future(None), is_lost=True)

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.forward.done() and (self.sampling is None or self.sampling.done())

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed, as where an interrupt kept it from being started."""
        futures = (self.forward, self.sampling)
        return any(f is not None and f.done() and f.exception() is not None for f in futures)

    def sample(self, sample: Sample) -> None:
        """Start the sampling that was deferred."""
        self.is_deferred = False
        self.sampling = _call(sample, self.plan)

    def result(self, executor: str) -> ModelRunnerOutput:
        """Wait for the result.

        Args:
            executor: names the executor in messages.

        Raises:
            PluginFaultError: there is no result.
            BaseException: the error of the forward pass, or of sampling.
        """
        output = result_of(self.forward, executor, "execute_model")
        if output is None and self.sampling is not None:
            output = result_of(self.sampling, executor, "sample_tokens")
        if output is None:
            raise no_result(self.plan, executor)
        return output


class BatchQueue:
    """The in-flight batches, in `batches` from oldest to newest; their number is limited."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.batches: deque[Batch] = deque()

    @property
    def can_start_another(self) -> bool:
        """Whether another batch can be started before the oldest one is done."""
        full = len(self.batches) >= self._depth
        return not full and not self.batches[0].done and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether another batch can be started after the newest one.

        It is not deferred, lost or failed: workers may not know the requests of its plan.
        """
        if not self.batches:
            return True
        newest = self.batches[-1]
        return not (newest.is_deferred or newest.is_lost or newest.has_failed)

    @property
    def deferred(self) -> Batch | None:
        """The newest batch, if its sampling is deferred."""
        newest = self.batches[-1] if self.batches else None
        return newest if newest is not None and newest.is_deferred else None

    def delays(self, plan: SchedulerOutput, names: Collection[str]) -> list[str]:
        """Return the requests, among `names`, of the batches in flight before a plan."""
        before = [batch.plan for batch in self.batches if batch.plan.step != plan.step]
        return [name for name in names if any(name in b.num_scheduled_tokens for b in before)]

    def has(self, plan: SchedulerOutput) -> bool:
        """Return whether a plan is under way."""
        return any(batch.plan is plan for batch in self.batches)

    def request_ids(self, plan: SchedulerOutput) -> list[str]:
        """Return the requests of a plan that is about to start, and of the batches in flight."""
        plans = [*(batch.plan for batch in self.batches), plan]
        return list({name: None for step in plans for name in step.num_scheduled_tokens})

    def push(self, batch: Batch) -> None:
        """Add the newest batch.

        Raises:
            RuntimeError: the queue is full.
        """
        if len(self.batches) >= self._depth:
            raise RuntimeError(f"{self._depth} batches are under way, the queue has no room")
        self.batches.append(batch)

    def pop(self) -> Batch:
        """Remove and return the oldest batch, which need not be done."""
        return self.batches.popleft()


def completed_future(output: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    """Return a future that is done."""
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future


def start_batch(
    plan: SchedulerOutput,
    execute: Callable[[SchedulerOutput], Future[ModelRunnerOutput | None]],
    sample: Sample | None,
) -> Batch:
    """Start a step. Errors are raised by the batch's `result`, so that results stay in order.

    Args:
        sample: starts sampling, if the plan has tokens; None defers it.
    """
    batch = Batch(plan, _call(execute, plan))
    if plan.total_num_scheduled_tokens:
        if sample is None:
            batch.is_deferred = True
        else:
            batch.sample(sample)
    return batch


def _call(call: Callable[[SchedulerOutput], Future[T]], plan: SchedulerOutput) -> Future[T]:
    try:
        return call(plan)
    except BaseException as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed
