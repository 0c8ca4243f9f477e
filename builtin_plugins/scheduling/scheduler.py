"""The default scheduler: plans steps and processes their results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.errors import PromptTooLongError, QueueFullError
from hardpoint.plugins import (
    ConfigError,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Meta,
    ModelRunnerOutput,
    OverloadedError,
    PauseState,
    Request,
    RequestError,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulerStats,
    SchedulingPolicy,
    WaitReason,
)

from . import wait_reasons
from .admission import AdmissionOptions, admit_waiting, has_started, poll_blocked
from .encoder import check_features
from .group import check_group
from .live_request import SchedulerRequest
from .prompt_time import PrefillMeter
from .results import DraftCounts, add_finishes, lose_plan, process_results
from .running import schedule_running
from .step import PlannedStep, StepState, make_plan, make_record
from .tracker import OutputsByClient, RequestTracker
from .transfers import process_transfers
from .waiting_queue import WaitingQueue


class DefaultScheduler(Scheduler):
    """Schedules running requests first, then admits waiting ones in the policy's order."""

    contract = 2
    limits_waiting_tokens = keeps_groups = releases_blocks = True
    context: SchedulerContext

    class Options(plugins.Options):
        """Limits of overtaking, and of the time that prompts add to a step.

        Attributes:
            max_overtaken: maximum number of steps that admit later requests before a request that
                lacks budget or an adapter slot; after that, it blocks later requests.
            max_set_aside: maximum number of requests that a step sets aside.
            max_slowdown: with `scheduler.step_milliseconds`, maximum time of a step with prompts,
                as a multiple of a step without prompts. The factor grows by this value for each
                second that a prompt has waited.
        """

        max_overtaken: Annotated[int, Meta(ge=0)] = 64
        max_set_aside: Annotated[int, Meta(ge=1)] = 256
        max_slowdown: Annotated[float, Meta(ge=1)] = 2.5

    def __init__(self, context: SchedulerContext) -> None:
        """Create a scheduler without requests.

        Raises:
            ConfigError: the cache has no usable block, or a connector cannot move its groups.
        """
        super().__init__(context)
        _check_context(context)
        self._limits = context.limits
        self._options = AdmissionOptions(
            context.options.max_overtaken, context.options.max_set_aside
        )
        self._tracker = RequestTracker(context)
        self._planned: dict[int, PlannedStep] = {}
        self._drafts = DraftCounts()
        self._pause = PauseState.UNPAUSED
        self._prefill_rate = PrefillMeter()
        self._num_added = 0
        self._num_steps = 0
        self._last_step = self._new_step()  # number 0: that before the first plan
        self._num_added_at_last_step = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a new request to the waiting queue.

        Raises:
            RequestError: it could never run.
            OverloadedError: `max_waiting` requests wait, or prompts of `max_waiting_tokens`.
        """
        tracker, limits = self._tracker, self._limits
        live = SchedulerRequest(request, self._num_added, limits.max_model_len)
        if not request.is_admitted:
            self._check_waiting(live.num_group_prompt_tokens)
        if request.request_id in tracker.pending_free:
            raise RequestError(
                f"request_id: {request.request_id!r} ended, but its KV blocks are still being "
                "moved; expected another id"
            )
        for item in (live, *live.members):
            self._check_fits(item)
        if live.members:
            check_group(tracker, live)
        if live.features:
            check_features(tracker, live)
        tracker.add(live)
        self._num_added += 1

    def _check_waiting(self, num_tokens: int) -> None:
        limits, waiting = self._limits, self._tracker.num_waiting
        if limits.max_waiting is not None and waiting >= limits.max_waiting:
            raise OverloadedError(
                f"overloaded: {waiting} requests are waiting, the maximum "
                "(scheduler.max_waiting); try again later"
            )
        if limits.max_waiting_tokens is not None:
            self._check_waiting_tokens(num_tokens, limits.max_waiting_tokens)

    def _check_waiting_tokens(self, num_tokens: int, limit: int) -> None:
        """Refuse a prompt that would wait behind too many tokens.

        Raises:
            QueueFullError: it would.
        """
        waiting = self._tracker.num_waiting_tokens
        if not waiting:
            self._prefill_rate.rest()
            return
        if (excess := waiting + num_tokens - limit) > 0:
            rate = self._prefill_rate.tokens_per_second
            seconds = 1 if rate is None else max(1, math.ceil(min(excess, waiting) / rate))
            raise QueueFullError.of(waiting, num_tokens, limit, seconds)

    def _record_prefill(self, step: StepState) -> None:
        """Measure how fast prompts are computed, before the step counts as computed."""
        requests = self._tracker.requests
        num_tokens = sum(
            max(min(number, request.num_prompt_tokens - request.num_computed_tokens), 0)
            for request_id, number in step.tokens.items()
            if (request := requests.get(request_id)) is not None
        )
        self._prefill_rate.record(step.now, num_tokens)

    def schedule(self) -> SchedulerOutput:
        """Plan a step: running requests first, then waiting ones while budget and blocks last."""
        tracker, step = self._tracker, self._new_step()
        for request in tracker.pop_expired(step.now):
            step.timed_out.append(request.request_id)
            tracker.finish_in_planning(request, FinishReason.TIMEOUT)
        poll_blocked(tracker, step, self._pause)
        step.max_requests = self._share()
        if tracker.running and self._pause is not PauseState.PAUSED_ALL:
            schedule_running(tracker, step, self.context.options.max_slowdown)
        if "scheduled" in tracker.policy_hooks:
            scheduled = (*step.running.values(), *step.admitted.values())
            for request in dict.fromkeys([item.leader or item for item in scheduled]):
                tokens = step.tokens.get(request.request_id, 0)  # members alone may have some
                step.notify(tracker.policy, request, tokens)
        admit_waiting(tracker, step, self._pause, self._options)
        if self._limits.max_waiting_tokens is not None:
            self._record_prefill(step)
        plan = make_plan(tracker, step)
        self._advance(step, plan)
        if self.context.record is not None:
            self.context.record(make_record(tracker, step, plan))
        return plan

    def update(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append sampled tokens and finish requests; return outputs by client index."""
        tracker, now = self._tracker, self.context.clock()
        planned = self._planned[plan.step]
        if planned.finishes:
            add_finishes(planned, result)
        if result.invalid_block_ids or result.kv_loaded or result.kv_saved:
            process_transfers(tracker, result, list(self._planned.values()), now)
        outputs = process_results(tracker, planned, result, self._drafts, now)
        del self._planned[plan.step]  # last: if this is interrupted, plan_lost() still finds it
        for client, ended in tracker.finished_outputs.items():
            outputs[client] = ended + outputs[client]
        tracker.finished_outputs.clear()
        return tracker.for_clients(outputs, now)

    def plan_lost(self, plan: SchedulerOutput) -> None:
        """Report the plan's changes again with the next plan, and recompute its requests."""
        lost = self._planned.pop(plan.step, None)
        if lost is None:  # all its results were processed
            return
        later = list(self._planned.values())
        lose_plan(self._tracker, lost, later, self.context.clock())

    def finish_requests(
        self, request_ids: Iterable[str] | None, reason: FinishReason
    ) -> dict[int, EngineCoreOutputs]:
        """Finish requests, or all of them (None); return their last outputs by client index."""
        tracker = self._tracker
        ids = list(tracker.requests) if request_ids is None else request_ids
        outputs: OutputsByClient = defaultdict(list)
        for request_id in ids:
            request = tracker.requests.get(request_id) or tracker.leaders.get(request_id)
            if request is not None:
                outputs[request.client_index].append(tracker.finish_now(request, reason))
        return tracker.for_clients(outputs, self.context.clock())

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return len(self._tracker.requests)

    def has_requests(self) -> bool:
        """Return whether a step has anything to do."""
        tracker = self._tracker
        if self._pause is PauseState.UNPAUSED and tracker.requests:
            return True
        if tracker.unreported_finished or tracker.finished_outputs or tracker.pending_free:
            return True
        return self._pause is not PauseState.UNPAUSED and self._has_work_while_paused()

    def stats(self) -> SchedulerStats:
        """Return queue lengths, cache usage and counters."""
        tracker = self._tracker
        usable = tracker.cache.num_usable_blocks
        accepted = self._drafts.accepted_by_position()
        return SchedulerStats(
            num_running=len(tracker.running),
            num_waiting=tracker.num_waiting,
            kv_cache_usage=1 - tracker.cache.num_free_blocks / usable,
            prefix_cache=tracker.cache_stats(),
            num_preemptions=tracker.num_preemptions,
            num_drafts=self._drafts.verified,
            num_accepted_drafts=sum(accepted),
            num_deferred=len(tracker.blocked) + len(tracker.loading),
            num_verified_drafts=self._drafts.by_accepted.total(),
            num_accepted_by_position=accepted,
        )

    def live_requests(self) -> Iterable[Request]:
        """Return all live requests."""
        return self._tracker.requests.values()

    def live_request(self, request_id: str) -> Request | None:
        """Return a live request, to be read only; None if there is none with this id."""
        if (request := self._tracker.requests.get(request_id)) is not None:
            return request
        leader = self._tracker.leaders.get(request_id)
        if leader is None:
            return None
        return next(item for item in leader.members if item.request_id == request_id)

    def why_waiting(self, request_id: str) -> WaitReason | None:
        """Return why a live request got no tokens in the last step; None if it got some.

        Raises:
            RequestError: the request is not live.
        """
        tracker, step = self._tracker, self._last_step
        request = tracker.requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id: {request_id!r} is not a live request")
        if self._is_paused(request):
            return wait_reasons.paused()
        if request_id in step.tokens:
            return None
        if reason := step.waiting.get(request_id):
            return reason
        held = request_id in tracker.blocked or request_id in tracker.loading
        if request.order >= self._num_added_at_last_step or held:
            return wait_reasons.not_planned_yet()
        if request_id in tracker.running and step.budget <= 0:
            known = request.num_tokens + request.num_output_placeholders
            return wait_reasons.no_budget(known - request.num_computed_tokens, 0)
        ahead = tracker.waiting.num_ahead(request) if request in tracker.waiting else 0
        if ahead:
            return wait_reasons.requests_ahead(ahead)
        return step.admission_stopped or wait_reasons.not_planned_yet()

    def update_drafts(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Set the drafts of running requests with all known tokens but the last computed."""
        for request_id, drafts in draft_token_ids.items():
            request = self._tracker.running.get(request_id)
            if request is not None and request.num_tokens - request.num_computed_tokens == 1:
                request.draft_token_ids = list(drafts[: self._limits.num_draft_tokens])

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Replace the scheduling policy, and reorder the waiting requests."""
        tracker = self._tracker
        waiting = WaitingQueue(policy)
        for request in sorted(tracker.requests.values(), key=lambda request: request.order):
            policy.added(request)
            if request in tracker.waiting:
                waiting.push(request)
        tracker.waiting = waiting
        tracker.set_policy(policy)

    def set_limits(self, limits: Any) -> None:
        """Use other limits from now on."""
        self._limits = self._tracker.limits = limits

    def set_pause(self, state: PauseState) -> None:
        """Set which requests get tokens from the next plan on."""
        self._pause = state

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Forget all cached content; with `recompute_running`, preempt the running requests."""
        tracker = self._tracker
        tracker.cache.reset()
        if recompute_running:
            for request in reversed(list(tracker.running.values())):
                tracker.preempt(request, self.context.clock())
            for request in list(tracker.loaded.values()):
                tracker.reset_progress(request)
            for request in tracker.loading.values():
                request.skip_transfer = True  # the loaded blocks are outdated

    def _new_step(self) -> StepState:
        self._num_steps += 1
        return StepState(
            number=self._num_steps - 1,
            now=self.context.clock(),
            budget=self._limits.max_num_batched_tokens,
            encoder_budget=self._limits.max_encoder_tokens,
        )

    def _share(self) -> int | None:
        tracker, limits = self._tracker, self._limits
        if limits.num_batches == 1:
            return None
        running = len(tracker.running)
        admissible = min(len(tracker.waiting), limits.max_num_seqs - running)
        return -(-(running + admissible) // limits.num_batches)

    def _advance(self, step: StepState, plan: SchedulerOutput) -> None:
        """Count the planned tokens as computed, so that the next step can be planned."""
        requests = [*step.running.values(), *step.admitted.values()]
        for request in requests:
            request.num_computed_tokens += step.tokens[request.request_id]
        if self._limits.asynchronous:
            for request in requests:
                known = request.num_tokens + request.num_output_placeholders
                if request.num_computed_tokens >= known:  # more with drafts
                    request.num_output_placeholders += 1
        if self._limits.num_batches > 1:
            for request in requests:
                request.last_step = step.number
        preemptions = [request.num_preemptions for request in requests]
        may_load = self.context.transfers is not None
        self._planned[step.number] = PlannedStep(
            plan, requests, preemptions, may_load, step.finishes
        )
        self._last_step, self._num_added_at_last_step = step, self._num_added

    def _is_paused(self, request: SchedulerRequest) -> bool:
        """Return whether a request gets no tokens because of a pause."""
        if self._pause is PauseState.PAUSED_NEW:
            running = request.request_id in self._tracker.running
            return not running and not has_started(self._tracker, request)
        return self._pause is PauseState.PAUSED_ALL

    def _has_work_while_paused(self) -> bool:
        tracker = self._tracker
        if tracker.has_expired(self.context.clock()):
            return True
        if tracker.loading:
            return True
        if self._pause is PauseState.PAUSED_NEW:
            return bool(tracker.running) or any(
                has_started(tracker, request) for request in tracker.waiting
            )
        return False

    def _check_fits(self, request: SchedulerRequest) -> None:
        tokens, limits, cache = request.num_prompt_tokens, self._limits, self._tracker.cache
        name = "members" if request.leader else "prompt"
        generated = int(request.source.pooling_params is None)
        if tokens + generated > limits.max_model_len:
            raise PromptTooLongError.of(tokens, limits.max_model_len, generates=bool(generated))
        if outputs := request.output_token_ids:
            _check_resumed(request, limits.max_model_len)
        if self._tracker.all_fit:
            return
        needed = self._tracker.blocks_needed(request.num_tokens + generated)
        if needed > cache.num_usable_blocks:
            known = f"{tokens} tokens{f' and {len(outputs)} outputs' if outputs else ''}"
            raise RequestError(
                f"{name}: its {known}{' and one to generate' if generated else ''} need "
                f"{needed} KV blocks of {cache.block_size} tokens, the cache has "
                f"{cache.num_usable_blocks}"
            )


def _check_resumed(request: SchedulerRequest, max_model_len: int) -> None:
    name, count = "resumed.output_token_ids", len(request.output_token_ids)
    if (room := max_model_len - request.num_prompt_tokens) <= count:
        raise RequestError(
            f"{name}: expected fewer than {room}, the room that the prompt leaves of max_model_len "
            f"{max_model_len}, got {count}"
        )
    if (index := request.repeats_before()) is not None:
        raise RequestError(
            f"{name}[{index}]: expected no token with which repetition_detection ends the request, "
            f"got {request.output_token_ids[index]}"
        )


def _check_context(context: SchedulerContext) -> None:
    cache = context.kv_cache
    if cache.num_usable_blocks < 1:
        raise ConfigError(
            f"kv_cache.num_blocks: expected at least one block that requests can hold, got "
            f"{cache.num_blocks} in all"
        )
    if context.transfers is not None and len(cache.groups) > 1:
        raise ConfigError(
            f"kv_connector: it moves one KV cache group, the model has {len(cache.groups)}"
        )
