"""The default scheduler: the conductor of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from hardpoint import plugins
from hardpoint.plugins import (
    ConfigError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Meta,
    ModelRunnerOutput,
    OverloadedError,
    PauseState,
    Request,
    RequestError,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulerStats,
    SchedulingPolicy,
    WaitReason,
)

from . import reasons
from .admission import AdmissionOptions, admit_waiting, unblock
from .encoder import check_features
from .live import LiveRequest
from .outcome import DraftCounts, take_results
from .pausing import admit_begun, holds, is_busy
from .planning import make_plan, make_record
from .recovery import lose_plan
from .running import schedule_running
from .step import PlannedStep, Step
from .tracker import Books
from .transfer import take_transfers
from .waiting_queue import WaitingQueue


class DefaultScheduler(Scheduler):
    """Gives running requests their tokens first, then admits waiting ones by policy."""

    contract = 1
    context: SchedulerContext

    class Options(plugins.Options):
        """How far a waiting request may be passed by those behind it.

        Attributes:
            max_overtaken: steps in which others may be admitted before a request that lacks
                budget or an adapter's slot; after so many, nobody behind it is.
            max_set_aside: most requests that one step looks at and sets aside.
        """

        max_overtaken: Annotated[int, Meta(ge=0)] = 64
        max_set_aside: Annotated[int, Meta(ge=1)] = 256

    def __init__(self, context: SchedulerContext) -> None:
        """Start empty.

        Raises:
            ConfigError: the cache holds nothing, or a connector cannot move its groups.
        """
        super().__init__(context)
        _check(context)
        self._limits = context.limits
        self._options = AdmissionOptions(
            context.options.max_overtaken, context.options.max_set_aside
        )
        self._books = Books(context)
        self._planned: dict[int, PlannedStep] = {}
        self._drafts = DraftCounts()
        self._pause = PauseState.UNPAUSED
        self._arrived = 0
        self._steps = 0
        self._last_step = self._new_step()
        self._seen = 0  # requests that had arrived when the last step was planned

    def add_request(self, request: EngineCoreRequest) -> None:
        """Put a new request into the waiting queue.

        Raises:
            RequestError: it could never run.
            OverloadedError: as many wait as may.
        """
        books, limits = self._books, self._limits
        waiting = len(books.waiting) + len(books.blocked)
        if limits.max_waiting is not None and waiting >= limits.max_waiting:
            raise OverloadedError(
                f"overloaded: {waiting} requests wait, which is the most that may "
                "(scheduler.max_waiting); try again later"
            )
        if request.request_id in books.lingering:
            raise RequestError(
                f"request_id: {request.request_id!r} ended, but its KV blocks are still being "
                "moved; expected another id"
            )
        live = LiveRequest(request, self._arrived, limits.max_model_len)
        self._check_fits(live)
        if live.features:
            check_features(books, live)
        books.add(live)
        self._arrived += 1

    def schedule(self) -> SchedulerOutput:
        """Plan a step: running requests first, then waiting ones while budget and blocks last."""
        books = self._books
        step = self._new_step()
        for request in books.expired(step.now):
            step.timed_out.append(request.request_id)
            books.end(request, FinishReason.TIMEOUT)
        unblock(books, step)
        if self._pause is not PauseState.PAUSED_ALL:
            schedule_running(books, step)
        if books.keeps_accounts:
            for request_id, running in step.running.items():
                books.policy.scheduled(running, step.tokens[request_id])
        if self._pause is PauseState.UNPAUSED:
            if step.stopped is None:
                admit_waiting(books, step, self._options)
        elif self._pause is PauseState.PAUSED_NEW:
            admit_begun(books, step)
        else:
            step.stopped = reasons.paused()
        plan = make_plan(books, step)
        self._advance(step, plan)
        self._last_step, self._seen = step, self._arrived
        if self.context.record is not None:
            self.context.record(make_record(books, step, plan))
        return plan

    def update(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append what was sampled and end the requests that are done."""
        books, now = self._books, self.context.clock()
        planned = self._planned[plan.step]
        if result.invalid_block_ids or result.kv_loaded or result.kv_saved:
            take_transfers(books, result, list(self._planned.values()), now)
        outputs = take_results(books, planned, result, self._drafts)
        del self._planned[plan.step]  # not before: who interrupts this gives the plan up after it
        if books.ended:
            outputs = books.ended + outputs
            books.ended = []
        return books.by_client(outputs, now)

    def plan_lost(self, plan: SchedulerOutput) -> None:
        """Tell again what the plan told, and compute its requests anew."""
        lost = self._planned.pop(plan.step, None)
        if lost is None:  # all its results were taken
            return
        later = list(self._planned.values())
        lose_plan(self._books, lost, later, self.context.clock())

    def finish_requests(
        self, request_ids: Iterable[str] | None, reason: FinishReason
    ) -> dict[int, EngineCoreOutputs]:
        """End requests from outside."""
        books = self._books
        ids = list(books.requests) if request_ids is None else request_ids
        outputs: list[tuple[int, EngineCoreOutput]] = []
        for request_id in ids:
            request = books.requests.get(request_id)
            if request is not None:
                outputs.append((request.client_index, books.last_output(request, reason)))
        return books.by_client(outputs, self.context.clock())

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return len(self._books.requests)

    def has_requests(self) -> bool:
        """Whether a step has anything to do."""
        books = self._books
        if self._pause is not PauseState.UNPAUSED:
            return is_busy(books, self._pause)
        return bool(books.requests or books.untold or books.ended or books.lingering)

    def stats(self) -> SchedulerStats:
        """Return how it stands."""
        books = self._books
        usable = books.cache.num_usable_blocks
        return SchedulerStats(
            num_running=len(books.running),
            num_waiting=len(books.waiting) + len(books.blocked),
            kv_cache_usage=1 - books.cache.num_free_blocks / usable,
            prefix_cache=books.cache.stats(),
            num_preemptions=books.num_preemptions,
            num_drafts=self._drafts.verified,
            num_accepted_drafts=self._drafts.accepted,
        )

    def live_request(self, request_id: str) -> Request | None:
        """Return a live request, for reading."""
        return self._books.requests.get(request_id)

    def why_waiting(self, request_id: str) -> WaitReason | None:
        """Return why a live request got no tokens in the last step; None if it got some."""
        books, step = self._books, self._last_step
        request = books.requests.get(request_id)
        if request is None:
            raise RequestError(f"request_id: {request_id!r} is not a live request")
        if holds(books, self._pause, request):
            return reasons.paused()
        if request_id in step.tokens:
            return None
        if reason := step.waiting.get(request_id):
            return reason
        if request.order >= self._seen or request_id in books.blocked:
            return reasons.not_seen()
        if request_id in books.running and step.budget <= 0:
            known = request.num_tokens + request.num_output_placeholders
            return reasons.no_budget(known - request.num_computed_tokens, 0)
        ahead = books.waiting.ahead_of(request) if request in books.waiting else 0
        return reasons.behind(ahead) if ahead else step.stopped or reasons.not_seen()

    def update_drafts(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Take drafts for requests whose known tokens are all computed but the last."""
        for request_id, drafts in draft_token_ids.items():
            request = self._books.running.get(request_id)
            if request is not None and request.num_tokens - request.num_computed_tokens == 1:
                request.draft_token_ids = list(drafts[: self._limits.num_draft_tokens])

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Put another policy in the place of the one there is, and those who wait in its order."""
        books = self._books
        waiting = WaitingQueue(policy)
        for request in sorted(books.requests.values(), key=lambda request: request.order):
            policy.added(request)
            if request in books.waiting:
                waiting.push(request)
        books.waiting = waiting
        books.set_policy(policy)

    def set_pause(self, state: PauseState) -> None:
        """Let only some requests have tokens from the next plan on, or all of them again."""
        self._pause = state

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Forget cached content; with `recompute_running`, preempt what runs."""
        books = self._books
        books.cache.reset()
        if recompute_running:
            for request in reversed(list(books.running.values())):
                books.preempt(request, self.context.clock())
            for request in list(books.loaded.values()):
                books.rewind(request)
            for request in books.blocked.values():
                if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
                    request.no_loading = True  # what is on its way is of no use

    def _new_step(self) -> Step:
        self._steps += 1
        return Step(
            number=self._steps - 1,
            now=self.context.clock(),
            budget=self._limits.max_num_batched_tokens,
            encoder_budget=self._limits.max_encoder_tokens,
        )

    def _advance(self, step: Step, plan: SchedulerOutput) -> None:
        """Count the planned tokens as computed, so that the next step can be planned."""
        requests = [*step.running.values(), *step.admitted.values()]
        for request, tokens in zip(requests, step.tokens.values(), strict=True):
            request.num_computed_tokens += tokens
        if self._limits.asynchronous:
            for request in requests:
                known = request.num_tokens + request.num_output_placeholders
                if request.num_computed_tokens == known:
                    request.num_output_placeholders += 1
        preemptions = [request.num_preemptions for request in requests]
        self._planned[step.number] = PlannedStep(plan, requests, preemptions)

    def _check_fits(self, request: LiveRequest) -> None:
        """Refuse a prompt that no step could ever finish."""
        tokens, limits, cache = request.num_prompt_tokens, self._limits, self._books.cache
        if tokens >= limits.max_model_len:
            raise RequestError(
                f"prompt: expected at most {limits.max_model_len - 1} tokens (max_model_len "
                f"{limits.max_model_len} less one to generate), got {tokens}"
            )
        needed = self._books.blocks_needed(tokens + 1)
        if needed > cache.num_usable_blocks:
            raise RequestError(
                f"prompt: its {tokens} tokens and one to generate need {needed} KV blocks of "
                f"{cache.block_size} tokens, the cache has {cache.num_usable_blocks}"
            )


def _check(context: SchedulerContext) -> None:
    """Refuse what cannot work together."""
    cache = context.kv_cache
    if cache.num_usable_blocks < 1:
        raise ConfigError(
            f"kv_cache.num_blocks: expected at least one block that requests can hold, got "
            f"{cache.num_blocks} in all"
        )
    if context.connector is not None and len(cache.groups) > 1:
        raise ConfigError(
            f"kv_connector: it moves one KV cache group, the model has {len(cache.groups)}"
        )
