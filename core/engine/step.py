"""The step: a plan of the scheduler goes through the executor, and its results come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from hardpoint.core.faults import StepFaults
from hardpoint.core.kv_cache import BlockManager
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    Executor,
    FinishReason,
    GrammarBitmask,
    ModelRunnerOutput,
    Scheduler,
    SchedulerOutput,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.scheduler import Grammars

from .batch_queue import Batch, BatchQueue, no_result, start_batch, with_drafts
from .kv_events import KVEventFanout
from .policy import PolicySlot
from .step_log import StepLog, log_failure

_log = logging.getLogger("hardpoint")

Outputs = dict[int, EngineCoreOutputs]
"""By client index."""

Step = Callable[..., tuple[Outputs, bool]]
"""See `Steps.step_alone`."""


@dataclass(frozen=True)
class EngineCoreParts:
    """What an engine core is made of.

    Attributes:
        components: closed with the core, beside those that are named here.
        config: for the log, when a step fails.
        log_stats: whether outputs say how the scheduler stands.
        grammars: of structured output, the same that the scheduler has.
        step_log: is told of every step.
        sleep_levels: those that the workers can do, beside 0.
    """

    scheduler: Scheduler
    executor: Executor
    kv_cache: BlockManager
    policy: PolicySlot
    kv_events: KVEventFanout
    faults: StepFaults
    components: Sequence[Component] = ()
    config: EngineConfig | None = None
    log_stats: bool = False
    grammars: Grammars | None = None
    step_log: StepLog | None = None
    sleep_levels: tuple[int, ...] = (1, 2)


class Steps:
    """Takes steps: one at a time, or several under way at once where the executor is a pipeline."""

    def __init__(self, parts: EngineCoreParts) -> None:
        """The caller closes the parts."""
        self._parts = parts
        self._scheduler = parts.scheduler
        self._executor = parts.executor
        self._unsent: list[Outputs] = []
        self._batches = BatchQueue(parts.executor.max_concurrent_batches)
        limits = parts.scheduler.context.limits
        self._takes_drafts = limits.num_draft_tokens > 0 and not limits.asynchronous

    @property
    def step(self) -> Step:
        """The variant that this executor needs; to be asked once."""
        piped = self._executor.max_concurrent_batches > 1
        return self.step_with_batch_queue if piped else self.step_alone

    def has_requests(self) -> bool:
        """Whether a step has anything to do; what a pause holds is nothing to do."""
        return bool(self._unsent or len(self._batches) or self._scheduler.has_requests())

    def step_alone(self, late_aborts: Callable[[], Sequence[str]] = tuple) -> tuple[Outputs, bool]:
        """Schedule, execute, sample, update. Without requests, does nothing.

        Args:
            late_aborts: asked once the results are in; these requests get no tokens of this step.

        Returns:
            Outputs by client, and whether any token was computed.
        """
        if self._unsent or not self._scheduler.has_requests():
            return self._take_unsent(), False
        plan = None
        try:
            plan = self._scheduler.schedule()
            forward = self._execute(plan)
            bitmask = self._bitmask(plan)
            result = forward.result()
            if result is None and plan.total_num_scheduled_tokens:
                result = self._executor.sample_tokens(plan, bitmask).result()
            if result is None:
                raise no_result(plan)
            self.abort(late_aborts())
            outputs = self._scheduler.update(plan, result)
        except BaseException as error:
            self._not_carried_out(plan, error)
            raise
        return self._carried_out(plan, outputs)

    def step_with_batch_queue(
        self, late_aborts: Callable[[], Sequence[str]] = tuple
    ) -> tuple[Outputs, bool]:
        """The step of an executor that is a pipeline: filling it comes before draining it.

        It waits for the oldest batch only if the queue is full, if that batch is done already, if
        no token could be scheduled, or if the newest one cannot be sampled before.
        """
        if self._unsent or not self.has_requests():
            return self._take_unsent(), False
        started = False
        if self._batches.is_open and self._scheduler.has_requests():
            started = self._start_batch()
            if started and self._batches.has_time:
                return {}, True
        outputs, computed = self._finish_oldest(late_aborts)
        self._sample_deferred()
        return outputs, started or computed

    def _start_batch(self) -> bool:
        """Plan and start a batch; return whether it computes anything."""
        plan = None
        try:
            plan = self._scheduler.schedule()
            sample = None if self._batches.delays(plan) else self._sample
            self._batches.push(start_batch(plan, self._execute, sample))
        except BaseException:
            if plan is not None and not self._batches.has(plan):
                self._batches.push(Batch.lost(plan))  # plans come back in their order
            raise
        return plan.total_num_scheduled_tokens > 0

    def _finish_oldest(self, late_aborts: Callable[[], Sequence[str]]) -> tuple[Outputs, bool]:
        self._sample_deferred()
        batch = None
        try:
            batch = self._batches.pop()
            if batch.is_lost:
                self._scheduler.plan_lost(batch.plan)
                return {}, False
            result = batch.result()
            self.abort(late_aborts())
            outputs = self._scheduler.update(batch.plan, result)
        except BaseException as error:
            self._not_carried_out(batch.plan if batch else None, error)
            raise
        return self._carried_out(batch.plan, outputs)

    def _sample_deferred(self) -> None:
        """Sample the batch that waits for that, once nothing it depends on is under way."""
        batch = self._batches.deferred
        if batch is None or self._batches.delays(batch.plan):
            return
        try:
            if batch.plan.draft_token_ids:
                batch.plan = with_drafts(batch.plan, self._executor.take_draft_token_ids())
        except Exception as error:  # is told when it is this batch's turn
            batch.fail(error)
        else:
            batch.sample(self._sample)

    def _execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        if self._parts.step_log is not None:
            self._parts.step_log.begins(plan)
        self._parts.kv_events.publish(self._parts.kv_cache.take_events())
        return self._executor.execute_model(plan)

    def _sample(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._executor.sample_tokens(plan, self._bitmask(plan))

    def _bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return which tokens grammars allow; for whoever is in no grammar it costs nothing."""
        grammars = self._parts.grammars
        if grammars is None or not plan.structured_request_ids:
            return None
        return grammars.bitmask(plan)

    def _carried_out(self, plan: SchedulerOutput, outputs: Outputs) -> tuple[Outputs, bool]:
        """Do what follows a step; return its outputs and whether it computed anything."""
        executed = plan.total_num_scheduled_tokens > 0
        if self._parts.step_log is not None:
            self._parts.step_log.ends(plan)
        if executed and self._takes_drafts:
            drafts = self._executor.take_draft_token_ids()
            if drafts is not None:
                self._scheduler.update_drafts(drafts.by_request())
        return self._with_stats(outputs), executed

    def _not_carried_out(self, plan: SchedulerOutput | None, error: BaseException) -> None:
        """Tell log and scheduler if a plan's results do not come, or were not taken."""
        if plan is None:
            return
        if isinstance(error, Exception):
            log_failure(error, plan, self._parts.config, self._scheduler.stats)
        try:
            self._scheduler.plan_lost(plan)
        except Exception as further:  # `error` is what is to be told
            _log.error("the scheduler cannot give up step %d", plan.step, exc_info=further)

    def abort_requests(self, request_ids: Iterable[str] | None) -> Outputs:
        """End requests; unknown ids are ignored, None is all of them.

        Returns:
            Their last outputs, one message per client, with the set of ids that ended.
        """
        outputs = self._scheduler.finish_requests(request_ids, FinishReason.ABORT)
        for each in outputs.values():
            ended = {output.request_id for output in each.outputs}
            each.finished_requests = ended | (each.finished_requests or set())
        return self._with_stats(outputs)

    def flush(self) -> list[Outputs]:
        """Take the results of all steps that are under way; return what clients were not told."""
        self.settle()
        unsent, self._unsent = self._unsent, []
        return unsent

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End requests, None is all of them; the next step tells their clients."""
        nobody = request_ids is not None and not request_ids
        if not nobody and (outputs := self.abort_requests(request_ids)):
            self._unsent.append(outputs)

    def abort_all(self) -> None:
        """End every request; the next step tells their clients."""
        self.abort(None)

    def settle(self) -> None:
        """Take the results of all steps that are under way; the next step tells them."""
        while len(self._batches):
            outputs, _ = self._finish_oldest(tuple)
            self._unsent.append(outputs)

    def _with_stats(self, outputs: Outputs) -> Outputs:
        """Tell each client how the scheduler stands, where anybody wants to know."""
        if outputs and self._parts.log_stats:
            stats = self._scheduler.stats()
            for each in outputs.values():
                each.scheduler_stats = stats
        return outputs

    def _take_unsent(self) -> Outputs:
        return self._unsent.pop(0) if self._unsent else {}
