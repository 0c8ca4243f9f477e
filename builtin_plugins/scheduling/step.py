"""A step: its state while it is planned, the plan built from it, and plans in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from hardpoint.plugins import (
    CachedRequests,
    Finish,
    NewRequest,
    RequestStatus,
    SchedulerOutput,
    SchedulingPolicy,
    StepRecord,
    WaitReason,
)

from .live_request import SchedulerRequest
from .prompt_time import PromptTime
from .tracker import RequestTracker

if TYPE_CHECKING:
    from hardpoint.plugins.requests.plan import BlockIds


class StepState(msgspec.Struct):
    """A step while it is planned.

    Attributes:
        number: serial number.
        now: time in seconds on the engine's clock, read once per step.
        budget: tokens left.
        encoder_budget: encoder tokens left.
        max_requests: number of requests that it may schedule; None is no limit.
        later: running prompts with a turn after the requests that generate; None: now.
        prompt_time: the time left for prompts; None is no limit.
        tokens: scheduled tokens by request id, running requests first.
        running: running requests that get tokens, by id.
        admitted: requests admitted in this step, by id.
        new_requests: the plan's entries of the admitted requests.
        new_blocks: new blocks of running requests, by id.
        released_columns: columns that leave block tables before the step, by request id.
        drafts: draft tokens to verify, by request id.
        encoder_inputs: indices of the features to encode, by request id.
        encoding: ids of the requests that use a feature encoded in this step, by its identifier.
        preempted: cause of the preemption, by request id.
        timed_out: ids of the requests past their deadline.
        waiting: reasons of the requests that were considered and got no tokens, by id.
        admission_stopped: why no further request was admitted.
        finishes: requests that the policy ends with the result of the step, by id.
    """

    number: int
    now: float
    budget: int
    encoder_budget: int
    max_requests: int | None = None
    later: list[SchedulerRequest] | None = None
    prompt_time: PromptTime | None = None
    tokens: dict[str, int] = {}
    running: dict[str, SchedulerRequest] = {}
    admitted: dict[str, SchedulerRequest] = {}
    new_requests: list[NewRequest] = []
    new_blocks: dict[str, BlockIds] = {}
    released_columns: dict[str, Sequence[tuple[int, int]]] = {}
    drafts: dict[str, list[int]] = {}
    encoder_inputs: dict[str, Sequence[int]] = {}
    encoding: dict[str, set[str]] = {}
    preempted: dict[str, str] = {}
    timed_out: list[str] = []
    waiting: dict[str, WaitReason] = {}
    admission_stopped: WaitReason | None = None
    finishes: dict[str, Finish] = {}

    def assign(self, request: SchedulerRequest, tokens: int) -> None:
        """Give tokens to a request."""
        self.tokens[request.request_id] = tokens
        self.budget -= tokens
        if self.prompt_time is not None:
            self.prompt_time.spend(request.num_computed_tokens, tokens)

    def release_blocks(self, request: SchedulerRequest, position: int) -> None:
        """Let blocks leave the tables of a request that goes on with the token at a position."""
        if request.releases is not None and (columns := request.releases.starting_at(position)):
            self.released_columns[request.request_id] = columns

    def notify(self, policy: SchedulingPolicy, request: SchedulerRequest, tokens: int) -> None:
        """Notify the policy of the tokens of a request; it may end the request."""
        if (finish := policy.scheduled(request, tokens)) is not None:
            self.finishes[request.request_id] = finish.of(policy.name)

    def withdraw(self, request: SchedulerRequest) -> list[int]:
        """Undo everything that the step scheduled for a request.

        Returns:
            Indices of its features that no request needs encoded in this step any more.
        """
        request_id = request.request_id
        if request_id not in self.tokens:
            return []
        if self.running.pop(request_id, None) is None:  # a member that was to begin
            del self.admitted[request_id]
            self.new_requests = [n for n in self.new_requests if n.source is not request.source]
            request.num_sent_blocks = 0
        elif blocks := self.new_blocks.pop(request_id, None):
            request.num_sent_blocks -= len(blocks[0])
        self.budget += self.tokens.pop(request_id)
        self.released_columns.pop(request_id, None)
        self.drafts.pop(request_id, None)
        unused = []
        for index in self.encoder_inputs.pop(request_id, ()):
            feature = request.features[index]
            users = self.encoding.get(feature.identifier, set())
            users.discard(request_id)
            if not users and self.encoding.pop(feature.identifier, None) is not None:
                self.encoder_budget += feature.length
                unused.append(index)
        return unused

    def cached_requests(self) -> CachedRequests:
        """Return the plan's entry of the running requests."""
        running = self.running.values()
        return CachedRequests(
            list(self.running),
            [r.num_computed_tokens for r in running],
            self.new_blocks,
            self.released_columns,
        )


class PlannedStep(msgspec.Struct):
    """A plan without results yet.

    Attributes:
        requests: the requests that get tokens, in the plan's order.
        preemptions: `num_preemptions` of each request when it was planned; results of a request
            that was preempted since are void.
        may_load: whether a step part may load tokens in the step.
        finishes: requests that the policy ends with the result, by id.
    """

    plan: SchedulerOutput
    requests: list[SchedulerRequest]
    preemptions: list[int]
    may_load: bool = False
    finishes: dict[str, Finish] = {}

    def certain_before(self) -> dict[str, int]:
        """Return how many tokens of each request were computed before, if the plan is lost."""
        computed = self.plan.num_computed_tokens()
        if self.may_load:
            # How many tokens of a new request the plan was to load is not known here.
            computed |= {new.source.request_id: 0 for new in self.plan.new_requests}
        return computed

    def still_running(self) -> list[SchedulerRequest]:
        """Return the requests that were neither finished nor preempted since the step's plan."""
        return [
            request
            for request, count in zip(self.requests, self.preemptions, strict=True)
            if request.status is RequestStatus.RUNNING and request.num_preemptions == count
        ]

    def is_intact(self) -> bool:
        """Return whether all its requests are still running."""
        return len(self.still_running()) == len(self.requests)


def make_plan(tracker: RequestTracker, step: StepState) -> SchedulerOutput:
    """Return the plan of a step for the workers; the tracker's unreported changes move into it."""
    finished = frozenset(tracker.unreported_finished)
    preempted = frozenset(tracker.unreported_preempted)
    tracker.unreported_finished.clear()
    tracker.unreported_preempted.clear()
    return SchedulerOutput(
        step=step.number,
        new_requests=step.new_requests,
        cached_requests=step.cached_requests(),
        num_scheduled_tokens=step.tokens,
        total_num_scheduled_tokens=tracker.limits.max_num_batched_tokens - step.budget,
        draft_token_ids=step.drafts,
        encoder_inputs=step.encoder_inputs,
        freed_encoder_inputs=_pop_freed_inputs(tracker),
        preempted_request_ids=preempted,
        finished_request_ids=finished,
    )


def make_record(tracker: RequestTracker, step: StepState, plan: SchedulerOutput) -> StepRecord:
    """Return the record of a step's decisions."""
    return StepRecord(
        step=step.number,
        timestamp=step.now,
        scheduled=plan.num_scheduled_tokens,
        new=[new.source.request_id for new in plan.new_requests if not new.resumed],
        resumed=[new.source.request_id for new in plan.new_requests if new.resumed],
        preempted=step.preempted,
        finished=sorted(plan.finished_request_ids),
        timed_out=step.timed_out,
        waiting=step.waiting,
        admission_stopped=step.admission_stopped,
        num_running=len(tracker.running),
        num_waiting=tracker.num_waiting,
        num_free_blocks=tracker.cache.num_free_blocks,
        token_budget=tracker.limits.max_num_batched_tokens,
    )


def _pop_freed_inputs(tracker: RequestTracker) -> Sequence[str]:
    freed, tracker.unreported_freed_inputs = tracker.unreported_freed_inputs, []
    cache = tracker.context.encoder_cache
    return [*freed, *cache.take_freed()] if cache is not None else freed
