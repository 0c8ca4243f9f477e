"""The engine core: moves requests through scheduler and executor, one step at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins import (
    Component,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    Executor,
    FinishReason,
    GrammarBitmask,
    Grammars,
    HardpointError,
    LoRARequest,
    Manifest,
    ModelRunnerOutput,
    PluginMeter,
    PluginSet,
    Request,
    RequestError,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    StepFault,
    WaitReason,
)

from .batch_queue import Batch, BatchQueue, start_batch, with_drafts
from .failure_report import log_failure
from .kv_cache import BlockManager
from .kv_events import KVEventFanout
from .pausing import Pausing, Surroundings
from .policy_slot import PolicySlot
from .step_faults import StepFaults
from .step_log import StepLog
from .wire import PauseMode
from .worker_calls import WorkerCalls

__all__ = ["EngineCore", "EngineCoreParts", "Outputs"]

_log = logging.getLogger("hardpoint")

Outputs = dict[int, EngineCoreOutputs]
"""By client index."""


@dataclass(frozen=True)
class EngineCoreParts:
    """What an engine core is made of.

    Attributes:
        components: closed with the core, beside those that are named here.
        config: for the log, when a step fails.
        log_stats: whether outputs say how the scheduler stands.
        grammars: of structured output, the same that the scheduler has.
        step_log: is told of every step.
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


class EngineCore:
    """Scheduler and executor, and the step that joins them.

    One thread at a time; what may be called from others says so.
    """

    def __init__(self, parts: EngineCoreParts) -> None:
        """Take over the parts; `close` closes them."""
        self._parts = parts
        self._scheduler = parts.scheduler
        self._executor = parts.executor
        self._unsent: list[Outputs] = []
        self._batches = BatchQueue(parts.executor.max_concurrent_batches)
        if parts.executor.max_concurrent_batches > 1:
            self.step = self.step_with_batch_queue  # type: ignore[method-assign]
        limits = parts.scheduler.context.limits
        self._takes_drafts = limits.num_draft_tokens > 0 and not limits.asynchronous
        self._workers = WorkerCalls(parts.executor)
        self._pausing = Pausing(
            Surroundings(parts.scheduler, parts.executor, lambda: self._abort(None), self._settle)
        )

    # Requests

    def add_request(
        self, request: EngineCoreRequest, block_hashes: list[bytes] | None = None
    ) -> None:
        """Queue a request.

        Args:
            request: checked.
            block_hashes: what `hash_prompt` gave for it; None has them computed when it is its
                turn.

        Raises:
            RequestError: it could never run, its id is that of a live request, or too many wait.
        """
        if self._live_request(request.request_id) is not None:
            raise RequestError(f"request_id: {request.request_id!r} is the id of a live request")
        self._scheduler.add_request(request)
        if block_hashes and (live := self._live_request(request.request_id)) is not None:
            self._parts.kv_cache.take_hashes(live, block_hashes)
        if request.kv_transfer_params is not None and self._scheduler.context.connector is None:
            _log.warning(
                "request %s has kv_transfer_params, which are ignored: this engine has no KV "
                "connector, and computes all of it",
                request.request_id,
            )

    def client_of(self, request_id: str) -> int | None:
        """Return which client a live request is of; None if no live request has that id."""
        live = self._live_request(request_id)
        return None if live is None else live.source.client_index

    def hash_prompt(self, request: EngineCoreRequest) -> list[bytes]:
        """Compute what the prefix cache finds a prompt by, before its turn. Safe in any thread."""
        return self._parts.kv_cache.hash_prompt(request)

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

    def has_requests(self) -> bool:
        """Whether a step has anything to do; what a pause holds is nothing to do."""
        return bool(self._unsent or len(self._batches) or self._scheduler.has_requests())

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return self._scheduler.num_unfinished_requests()

    # The step

    def step(self, late_aborts: Callable[[], Sequence[str]] = tuple) -> tuple[Outputs, bool]:
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
            if result is None:
                result = self._executor.sample_tokens(plan, bitmask).result()
            self._abort(late_aborts())
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
            self._abort(late_aborts())
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
        if batch.plan.draft_token_ids:
            batch.plan = with_drafts(batch.plan, self._executor.take_draft_token_ids())
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

    # Standing still

    def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> Future[None]:
        """Stop giving tokens. New requests wait until `resume`.

        Args:
            mode: what becomes of the requests that are there: "abort" ends them, "wait" lets
                those that have begun finish, "keep" leaves them as they are until `resume`.
            clear_cache: forget what is cached once the engine stands still; requests that were
                kept are computed anew, with the same result.

        Returns:
            Done when nothing is left to do; at once where no loop steps the engine.
        """
        return self._pausing.pause(mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Go on after a pause."""
        self._pausing.resume()

    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._pausing.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = PauseMode.ABORT) -> Future[None]:
        """Pause, then give memory back.

        Args:
            level: 0 only pauses and keeps caches; 1 gives the KV cache back and moves weights to
                CPU memory; 2 gives back both.
            mode: as for `pause`.

        Returns:
            Done when the memory is given back.
        """
        return self._pausing.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Have memory again, and go on when all of it is there.

        Args:
            tags: of "weights", "kv_cache" and "scheduling"; None is all of them.
        """
        self._pausing.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether memory was given back and is not there again."""
        return self._pausing.is_sleeping

    # Caches

    def reset_prefix_cache(self, recompute_running: bool = False) -> None:
        """Forget cached content; with `recompute_running`, compute anew what runs."""
        self._scheduler.reset_prefix_cache(recompute_running=recompute_running)
        if count := self.num_unfinished_requests():
            _log.warning("the prefix cache was reset while %d requests are unfinished", count)

    def reset_encoder_cache(self) -> None:
        """Forget embeddings of images and the like.

        Raises:
            HardpointError: there are none.
        """
        raise HardpointError("there is no encoder cache: no worker encodes images or sounds")

    def reset_mm_cache(self) -> None:
        """Forget processed images and the like.

        Raises:
            HardpointError: there are none.
        """
        raise HardpointError("there is no multimodal cache: requests bring no images or sounds")

    # Workers

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: list[Any] | None = None
    ) -> list[Any]:
        """Call a declared method of every worker; return the results in rank order."""
        return self._workers.call(method, args or [], timeout)

    def start_profile(self) -> None:
        """Begin to record what the workers do."""
        self._executor.collective_rpc("start_profile")

    def stop_profile(self) -> list[str]:
        """Return the files that the workers' profiles were written to."""
        return self._executor.collective_rpc("stop_profile")

    def add_lora(self, lora: LoRARequest) -> bool:
        """Load an adapter; return whether every worker did."""
        return self._workers.add_lora(lora)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; return whether every worker had it."""
        return self._workers.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that every worker has."""
        return self._workers.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter, whatever others come; return whether every worker had it."""
        return self._workers.pin_lora(lora_id)

    def supported_tasks(self) -> list[str]:
        """Return what the model can do: models here generate, and none pools."""
        return ["generate"]

    def plugin_meters(self) -> dict[str, PluginMeter]:
        """Return what each logits processor cost so far, by name, in the first worker."""
        meters: dict[str, PluginMeter] = self._executor.collective_rpc("plugin_meters")[0]
        return meters

    # Scheduling

    def why_waiting(self, request_ids: list[str]) -> list[WaitReason | None]:
        """Return per live request why it got no tokens in the last step; None if it got some."""
        return [self._scheduler.why_waiting(request_id) for request_id in request_ids]

    def set_policy(self, manifest: Manifest) -> None:
        """Take the scheduling policy of another generation of the manifest, or nothing of it."""
        self._parts.policy.replace(PluginSet(manifest), self._scheduler)

    def scheduler_stats(self) -> SchedulerStats:
        """Return how the scheduler stands."""
        return self._scheduler.stats()

    def step_faults(self) -> dict[str, StepFault]:
        """Return the decisions that plugins did not take, by plugin name."""
        return self._parts.faults.report()

    # For a loop that steps the core

    def enter_loop(self, on_failure: Callable[[BaseException], None]) -> None:
        """Take it that a loop steps the core, and says `went_idle` when nothing is left to do.

        Args:
            on_failure: called, in any thread, when the executor fails beside a step.
        """
        self._pausing.has_loop = True
        self._executor.on_failure(on_failure)

    def went_idle(self) -> None:
        """Complete what waited until nothing is left to do."""
        self._pausing.went_idle()

    def flush(self) -> list[Outputs]:
        """Take the results of all steps that are under way; return what clients were not told."""
        self._settle()
        unsent, self._unsent = self._unsent, []
        return unsent

    def leave_loop(self, words: str) -> None:
        """Fail what still waits for the loop to be idle."""
        self._pausing.give_up(words)

    def close(self) -> None:
        """Release workers, model and cache."""
        parts = self._parts
        self._pausing.give_up("the engine was closed")
        with contextlib.ExitStack() as stack:  # each is closed, whatever another one raises
            for component in parts.components:
                stack.callback(component.close)
            stack.callback(parts.kv_events.close)
            stack.callback(parts.policy.close)
            stack.callback(self._scheduler.close)
            stack.callback(self._executor.close)

    def _with_stats(self, outputs: Outputs) -> Outputs:
        """Tell each client how the scheduler stands, where anybody wants to know."""
        if outputs and self._parts.log_stats:
            stats = self._scheduler.stats()
            for each in outputs.values():
                each.scheduler_stats = stats
        return outputs

    def _live_request(self, request_id: str) -> Request | None:
        try:
            return self._scheduler.live_request(request_id)
        except NotImplementedError:  # it shows none, so nobody can tell
            return None

    def _take_unsent(self) -> Outputs:
        return self._unsent.pop(0) if self._unsent else {}

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        """End requests, None is all of them; the next step tells their clients."""
        nobody = request_ids is not None and not request_ids
        if not nobody and (outputs := self.abort_requests(request_ids)):
            self._unsent.append(outputs)

    def _settle(self) -> None:
        """Take the results of all steps that are under way; the next step tells them."""
        while len(self._batches):
            outputs, _ = self._finish_oldest(tuple)
            self._unsent.append(outputs)
