"""The step: schedule, execute, sample, update the scheduler."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from hardpoint.core.kv_cache import BlockManager
from hardpoint.errors import PluginFaultError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.host.boundary.guard import checked
from hardpoint.host.boundary.kv_cache import KVEventFanout
from hardpoint.host.boundary.parts.engine_halves import EngineHalves
from hardpoint.host.boundary.parts.states import States, states_of, states_of_parts
from hardpoint.host.boundary.policy import PolicySlot
from hardpoint.host.boundary.step_check import (
    ResultCheck,
    no_result,
    plan_defect,
    result_of,
    watched,
)
from hardpoint.host.registry.blame import is_fault, raise_unless_fault
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutputs,
    Executor,
    FinishReason,
    GrammarBitmask,
    HardpointError,
    ModelRunnerOutput,
    RequestFault,
    Scheduler,
    SchedulerOutput,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.requests.plan import SampledTokens
from hardpoint.plugins.requests.stats import SchedulerStats
from hardpoint.toolkit.requests.finishes import end_requests, limit_tokens
from hardpoint.toolkit.step_cost import StepCostFit, StepTimes

from .batch_queue import Batch, BatchQueue, completed_future, start_batch
from .pause import PauseController
from .step_log import StepLog, log_failure

_log = logging.getLogger("hardpoint")

Outputs = dict[int, EngineCoreOutputs]
"""By client index."""

Step = Callable[..., tuple[Outputs, bool]]
"""See `StepRunner.step`."""


@dataclass(frozen=True)
class EngineCoreParts:
    """The parts of an engine core.

    Attributes:
        scheduler_label: names the scheduler in the error about a wrong result.
        executor_label: the same of the executor; also if it fails outside of its calls.
        components: further components to close with the core.
        config: logged when a step fails.
        log_stats: whether outputs carry scheduler statistics.
        step_parts: the engine halves of step parts; the scheduler has their gates.
        generates: whether the model has logits of the next token.
        step_log: logs every step.
        step_cost: fits the time of a step; None if nothing uses it.
        step_times: measures steps for these two.
        num_waits: number of steps that waited for results, by name of the part that needs them.
        sleep_levels: levels that the workers support, in addition to 0.
        idle_method: method of workers that is called while nothing else is to do; None if they
            have no such method.
        activity: records the requests of each step.
        without_overlap: see `WorkerSpec`.
    """

    scheduler: Scheduler
    executor: Executor
    kv_cache: BlockManager
    policy: PolicySlot
    kv_events: KVEventFanout
    faults: StepFaults
    pause: PauseController
    scheduler_label: str = "the scheduler"
    executor_label: str = "the executor"
    components: Sequence[Component] = ()
    config: EngineConfig | None = None
    log_stats: bool = False
    step_parts: EngineHalves = field(default_factory=EngineHalves)
    generates: bool = True
    step_log: StepLog | None = None
    step_cost: StepCostFit | None = None
    step_times: StepTimes = field(default_factory=StepTimes)
    num_waits: Counter[str] = field(default_factory=Counter)
    sleep_levels: tuple[int, ...] = (1, 2)
    idle_method: str | None = None
    activity: Activity = field(default_factory=Activity)
    without_overlap: Sequence[str] = ()

    def states(self) -> States:
        """Return the states of the components of the engine's process."""
        component_states = states_of([self.scheduler, self.policy.policy, *self.components])
        return component_states | states_of_parts(self.step_parts.halves, "engine")

    def scheduler_stats(self) -> SchedulerStats:
        """Return the state of the scheduler, with the totals of step parts."""
        stats = checked(self.scheduler.stats(), Scheduler, "stats", self.scheduler_label)
        self.step_parts.add_stats(stats)
        if self.step_cost is not None:
            stats.step_cost_error = self.step_cost.current().error
        stats.num_waits_for_results = dict(self.num_waits)
        stats.num_without_overlap = dict.fromkeys(self.without_overlap, 1)
        return stats


class StepRunner:
    """Runs steps: one at a time, or several at once where the executor is a pipeline."""

    def __init__(self, parts: EngineCoreParts) -> None:
        self._parts = parts
        self._scheduler, self._executor = parts.scheduler, parts.executor
        if parts.config is not None and parts.config.debug.watch_plugins:
            self._scheduler = watched(parts.scheduler, "schedule", "update")
            self._executor = watched(parts.executor, "execute_model", "sample_tokens")
        self._activity = parts.activity
        self._step_parts = parts.step_parts
        self._step_parts.follow(parts.scheduler)
        self._times = parts.step_times if parts.step_log or parts.step_cost else None
        self._unsent: list[Outputs] = []
        self._check = ResultCheck(parts.executor_label, parts.scheduler)
        self._batches = BatchQueue(parts.executor.max_concurrent_batches)
        self._in_flight = self._batches.batches
        limits, config = parts.scheduler.context.limits, parts.config
        self._sampled: list[SampledTokens] | None = None  # not sent to the other ranks yet
        if config is not None and config.parallel.world_size > 1 and not limits.asynchronous:
            self._sampled = []
        self._takes_drafts = limits.num_draft_tokens > 0

    @property
    def step_fn(self) -> Step:
        """The variant of the step that fits the executor."""
        is_pipeline = self._executor.max_concurrent_batches > 1
        return self.step_with_batch_queue if is_pipeline else self.step

    def has_requests(self) -> bool:
        """Return whether a step has any work; paused requests are not counted."""
        return bool(self._unsent or self._in_flight or self._scheduler.has_requests())

    def has_batches_in_flight(self) -> bool:
        """Return whether the executor has batches that are not complete."""
        return bool(self._in_flight)

    def step(self, late_aborts: Callable[[], Sequence[str]] = tuple) -> tuple[Outputs, bool]:
        """Schedule, execute, sample, update the scheduler, publish. Does nothing without requests.

        Args:
            late_aborts: called once the results are in; returns the requests that were aborted
                during the step, which get none of its tokens.

        Returns:
            Outputs by client, and whether any token was computed.
        """
        if self._unsent or not self._scheduler.has_requests():
            return self._pop_unsent(), False
        plan = None
        try:
            plan = self._scheduler.schedule()  # assigned here, so that no interrupt loses it
            checked(plan, Scheduler, "schedule", self._parts.scheduler_label)
            forward = self._execute(plan)
            bitmask = self._step_parts.mask(plan)  # while the model runs
            result = self._sample(plan, forward, bitmask)
            outputs = self._update(plan, result, late_aborts)
        except BaseException as error:
            self._step_failed(plan, error)
            raise
        return self._publish(plan, outputs)

    def step_with_batch_queue(
        self, late_aborts: Callable[[], Sequence[str]] = tuple
    ) -> tuple[Outputs, bool]:
        """Run a step of an executor that is a pipeline: fill the pipeline before draining it.

        Waits for the oldest batch only if the queue is full, that batch is done already, no token
        could be scheduled, or the newest batch depends on it for sampling.
        """
        if self._unsent or not self.has_requests():
            return self._pop_unsent(), False
        started = False
        if self._can_plan and self._scheduler.has_requests():
            started = self._start_batch()
            if started and self._batches.can_start_another:
                return {}, True
        outputs, computed = self._finish_oldest(late_aborts)
        self._sample_deferred()
        return outputs, started or computed

    @property
    def _can_plan(self) -> bool:
        if not self._in_flight:
            return True
        if not self._batches.is_open:
            return False
        if self._takes_drafts and (waiting := self._step_parts.may_draft()):
            self._parts.num_waits[waiting] += 1
            return False
        return True

    def _start_batch(self) -> bool:
        plan = None
        try:
            plan = self._scheduler.schedule()
            checked(plan, Scheduler, "schedule", self._parts.scheduler_label)
            if (part := self._part_awaiting_results(plan)) is not None:
                self._parts.num_waits[part] += 1
            sample = self._start_sampling if part is None else None
            self._batches.push(start_batch(plan, self._execute, sample))
        except BaseException:
            if isinstance(plan, SchedulerOutput) and not self._batches.has(plan):
                self._batches.push(Batch.lost(plan))  # plans are updated in their order
            raise
        return plan.total_num_scheduled_tokens > 0

    def _finish_oldest(self, late_aborts: Callable[[], Sequence[str]]) -> tuple[Outputs, bool]:
        self._sample_deferred()
        batch = None
        try:
            batch = self._batches.pop()
            if batch.is_lost:
                self._drop_plan(batch.plan)
                return {}, False
            result = batch.result(self._parts.executor_label)
            outputs = self._update(batch.plan, result, late_aborts)
        except BaseException as error:
            self._step_failed(batch.plan if batch else None, error)
            raise
        return self._publish(batch.plan, outputs)

    def _sample_deferred(self) -> None:
        batch = self._batches.deferred
        if batch is None or self._part_awaiting_results(batch.plan):
            return
        batch.sample(self._start_sampling)

    def _execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        if self._times is not None:
            self._times.begins(plan)
        names = list(plan.num_scheduled_tokens)
        self._activity.begin_step(self._batches.request_ids(plan) if self._in_flight else names)
        if events := self._parts.kv_cache.take_events():
            self._parts.kv_events.publish(events)
        data = self._step_parts.begin(plan)
        if self._sampled is not None and not data and _is_empty(plan):
            return completed_future(ModelRunnerOutput())
        if self._sampled:
            plan = msgspec.structs.replace(plan, sampled=tuple(self._sampled))
        if data:
            plan = msgspec.structs.replace(plan, part_data=data)
        future = self._executor.execute_model(plan)
        if self._sampled:  # after an interrupt they are sent again, and workers pass them over
            self._sampled.clear()
        return checked(future, Executor, "execute_model", self._parts.executor_label)

    def _sample(
        self,
        plan: SchedulerOutput,
        forward: Future[ModelRunnerOutput | None],
        bitmask: GrammarBitmask | None,
    ) -> ModelRunnerOutput:
        label = self._parts.executor_label
        result = result_of(forward, label, "execute_model")
        if result is None and plan.total_num_scheduled_tokens:
            sampling = self._executor.sample_tokens(plan, bitmask)
            result = result_of(sampling, label, "sample_tokens")
        if result is None:
            raise no_result(plan, label)
        return result

    def _start_sampling(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._executor.sample_tokens(plan, self._step_parts.mask(plan))

    def _part_awaiting_results(self, plan: SchedulerOutput) -> str | None:
        needed_by = self._step_parts.needs_results(plan)
        delayed = self._batches.delays(plan, needed_by)
        return needed_by[delayed[0]] if delayed else None

    def _update(
        self,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,
        late_aborts: Callable[[], Sequence[str]],
    ) -> Outputs:
        if aborted := late_aborts():
            self.abort_later(aborted)
        self._check.check_type(plan, result)
        self._record(plan, result)
        if result.is_cache_uncertain:
            self._parts.kv_cache.reset()
        under_way = self._batches.request_ids(plan) if result.is_cache_uncertain else ()
        for request_id, fault in self._step_parts.result(plan, result, under_way).items():
            result.sampled_token_ids.pop(request_id, None)
            # The scheduler looks at faults of planned requests, but preempts those that hold an
            # invalid block before.
            if request_id in plan.num_scheduled_tokens and not result.invalid_block_ids:
                result.faults.setdefault(request_id, fault)
            else:
                self._end_request(request_id, fault)
        for request_id, fault in self._check.check(plan, result).items():
            self._parts.faults.note("executor", fault.message, consequence="its request ends")
            if request_id not in plan.num_scheduled_tokens:  # the scheduler looks at no others
                self._end_request(request_id, fault)
        if result.finishes:
            limit_tokens(result, self._scheduler)
        outputs = self._scheduler.update(plan, result)
        checked(outputs, Scheduler, "update", self._parts.scheduler_label)
        if result.observed_logprobs or result.finishes:
            end_requests(result, outputs, self._scheduler)
            _add_observed_logprobs(outputs, result)
        self._step_parts.publish(plan, outputs)
        self._step_parts.notify("updated", plan)
        return outputs

    def _record(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if result.waited_for:
            self._parts.num_waits[result.waited_for] += 1
        if self._sampled is not None and result.sampled_token_ids:
            self._sampled.append(SampledTokens(plan.step, dict(result.sampled_token_ids)))

    def halves_built(self) -> None:
        """Notify step parts of worker halves that were built; end requests that cannot go on."""
        for request_id, fault in self._step_parts.workers_started().items():
            self._end_request(request_id, fault)

    def _end_request(self, request_id: str, fault: RequestFault) -> None:
        ended = self._scheduler.finish_requests([request_id], FinishReason.ERROR)
        for output in (output for message in ended.values() for output in message.outputs):
            output.error = fault.message
        if ended:
            self._unsent.append(self._with_stats(ended))

    def _publish(self, plan: SchedulerOutput, outputs: Outputs) -> tuple[Outputs, bool]:
        executed = plan.total_num_scheduled_tokens > 0
        if not executed:
            self._step_parts.wait()
        if not self._in_flight:
            self._activity.end_step()
        self._parts.faults.check_slow()
        if self._times is not None:
            time = self._times.ends(plan)
            if self._parts.step_log is not None:
                self._parts.step_log.ends(plan, time.total)
            if self._parts.step_cost is not None:
                self._parts.step_cost.learn(plan, time.own * 1000)
        if executed and self._takes_drafts:
            self._scheduler.update_drafts(self._step_parts.drafts(plan))
        return self._with_stats(outputs), executed

    def _step_failed(self, plan: SchedulerOutput | None, error: BaseException) -> None:
        """Log a failed step, and return its plan to the scheduler as lost."""
        if not is_fault(error):  # else the record of the step shows which requests may be the cause
            self._activity.end_step()
        if not isinstance(plan, SchedulerOutput):
            return
        defect = None
        if is_fault(error):
            log_failure(error, plan, self._parts.config, self._scheduler.stats, self._parts.states)
            if not isinstance(error, HardpointError):  # which names what failed
                defect = plan_defect(plan, self._scheduler)
        try:
            self._drop_plan(plan)
        except BaseException as further:  # the caller raises `error`
            raise_unless_fault(further)
            _log.error("the scheduler cannot drop step %d", plan.step, exc_info=further)
        if defect is not None:
            label = self._parts.scheduler_label
            raise PluginFaultError(f"{label}: its plan of step {plan.step} {defect}") from error

    def _drop_plan(self, plan: SchedulerOutput) -> None:
        self._step_parts.notify("lost", plan)
        self._scheduler.plan_lost(plan)

    def abort_requests(self, request_ids: Iterable[str] | None) -> Outputs:
        """Abort requests; unknown ids are ignored, None is all of them.

        Returns:
            Their last outputs, one message per client, with the ids that ended.
        """
        outputs = self._scheduler.finish_requests(request_ids, FinishReason.ABORT)
        for message in outputs.values():
            ended = {output.request_id for output in message.outputs}
            if message.finished_requests:
                ended |= message.finished_requests
            message.finished_requests = ended
        return self._with_stats(outputs)

    def flush(self) -> list[Outputs]:
        """Complete all steps that are under way; return the outputs that are not sent yet."""
        self.settle()
        unsent, self._unsent = self._unsent, []
        return unsent

    def abort_later(self, request_ids: Sequence[str] | None) -> None:
        """Abort requests, None is all of them; one of the next steps returns their outputs."""
        if outputs := self.abort_requests(request_ids):
            self._unsent.append(outputs)

    def settle(self) -> None:
        """Complete all steps that are under way; each of the next steps returns outputs of one."""
        while self._in_flight:
            outputs, _ = self._finish_oldest(tuple)
            self._unsent.append(outputs)

    def _with_stats(self, outputs: Outputs) -> Outputs:
        if outputs and self._parts.log_stats:
            stats = self._parts.scheduler_stats()
            for message in outputs.values():
                message.scheduler_stats = stats
        return outputs

    def _pop_unsent(self) -> Outputs:
        return self._unsent.pop(0) if self._unsent else {}


def _add_observed_logprobs(outputs: Outputs, result: ModelRunnerOutput) -> None:
    for output in (output for message in outputs.values() for output in message.outputs):
        observed = result.observed_logprobs.get(output.request_id)
        if observed and output.new_token_ids:
            output.observed_logprobs = observed[: len(output.new_token_ids)]


def _is_empty(plan: SchedulerOutput) -> bool:
    return not (
        plan.total_num_scheduled_tokens
        or plan.finished_request_ids
        or plan.preempted_request_ids
        or plan.freed_encoder_inputs
    )
