"""Steps that are under way at once, for executors that work as a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput
from hardpoint.plugins.plan import NO_DRAFT, DraftTokenIds

T = TypeVar("T")

Sample = Callable[[SchedulerOutput], Future[ModelRunnerOutput]]


@dataclass
class Batch:
    """A step that was started.

    Attributes:
        forward: of the model; a result of None means that sampling has it.
        sampling: None where nothing is sampled, or not yet.
        is_deferred: whether sampling is still to be asked for.
        is_lost: whether nobody computes it.
    """

    plan: SchedulerOutput
    forward: Future[ModelRunnerOutput | None]
    sampling: Future[ModelRunnerOutput] | None = None
    is_deferred: bool = False
    is_lost: bool = False

    @classmethod
    def lost(cls, plan: SchedulerOutput) -> Batch:
        """Return what stands for a plan that an interrupt kept from being started."""
        nothing: Future[ModelRunnerOutput | None] = Future()
        nothing.set_result(None)
        return cls(plan, nothing, is_lost=True)

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.forward.done() and (self.sampling is None or self.sampling.done())

    def sample(self, sample: Sample) -> None:
        """Ask for sampling, which was deferred."""
        self.is_deferred = False
        self.sampling = _called(sample, self.plan)

    def fail(self, error: Exception) -> None:
        """Take it that it cannot be sampled."""
        self.is_deferred = False
        self.sampling = Future()
        self.sampling.set_exception(error)

    def result(self) -> ModelRunnerOutput:
        """Wait for the outcome.

        Raises:
            BaseException: the forward pass's own error, or else that of sampling.
        """
        output = self.forward.result()
        if output is None and self.sampling is not None:
            output = self.sampling.result()
        if output is None:
            raise no_result(self.plan)
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
        full = len(self._batches) >= self._depth
        return not full and not self._batches[0].done and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether the newest batch lets another one be started behind it.

        One that is still to be sampled does not, and neither does one that nobody computes.
        """
        return not self._batches or not (self._batches[-1].is_deferred or self._batches[-1].is_lost)

    @property
    def deferred(self) -> Batch | None:
        """The newest batch, if it is still to be sampled."""
        newest = self._batches[-1] if self._batches else None
        return newest if newest is not None and newest.is_deferred else None

    def delays(self, plan: SchedulerOutput) -> bool:
        """Whether what a plan's grammars must have seen is to come from batches before it.

        Those are tokens of the requests that a grammar constrains, and drafts that follow them.
        """
        names = plan.structured_request_ids
        return bool(names) and any(
            name in batch.plan.num_scheduled_tokens
            for batch in self._batches
            if batch.plan.step != plan.step
            for name in names
        )

    def has(self, plan: SchedulerOutput) -> bool:
        """Whether a plan is under way."""
        return any(batch.plan is plan for batch in self._batches)

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


def no_result(plan: SchedulerOutput) -> RuntimeError:
    """Return what to raise when an executor gave None where it must not."""
    return RuntimeError(f"the executor gave no result for step {plan.step}")


def start_batch(
    plan: SchedulerOutput,
    execute: Callable[[SchedulerOutput], Future[ModelRunnerOutput | None]],
    sample: Sample | None,
) -> Batch:
    """Start a step. What fails here fails when the step's turn comes: results stay in order.

    Args:
        sample: not called where the plan has no tokens; None defers it.
    """
    batch = Batch(plan, _called(execute, plan))
    if plan.total_num_scheduled_tokens:
        if sample is None:
            batch.is_deferred = True
        else:
            batch.sample(sample)
    return batch


def with_drafts(plan: SchedulerOutput, drafts: DraftTokenIds | None) -> SchedulerOutput:
    """Return a plan with drafts in the places that it has for them.

    There are as many places as before; those for which there is no draft hold NO_DRAFT.

    Raises:
        RuntimeError: the executor has no drafts, though the plan is to verify some.
    """
    if drafts is None:
        raise RuntimeError(
            f"step {plan.step} is to verify drafts of {', '.join(plan.draft_token_ids)}, "
            "but the executor has none"
        )
    known = drafts.by_request()
    filled = {}
    for name, places in plan.draft_token_ids.items():
        found = list(known.get(name, ()))[: len(places)]
        filled[name] = found + [NO_DRAFT] * (len(places) - len(found))
    return msgspec.structs.replace(plan, draft_token_ids=filled)


def _called(call: Callable[[SchedulerOutput], Future[T]], plan: SchedulerOutput) -> Future[T]:
    try:
        return call(plan)
    except BaseException as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed
