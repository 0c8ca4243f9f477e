"""The default scheduler: one token budget, running requests first, preemption when blocks run out.

There is no prefill and no decode phase. A request has tokens that are known and tokens that are
computed; each step hands out a budget so that the second catch up with the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hardpoint.plugins import (
    CachedRequest,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    NewRequest,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulingPolicy,
)

from .repetition import repeats

__all__ = ["DefaultScheduler"]


class DefaultScheduler(Scheduler):
    """Gives running requests their tokens first, then admits waiting ones by policy."""

    contract = 1
    context: SchedulerContext

    def __init__(self, context: SchedulerContext) -> None:
        """Start empty."""
        super().__init__(context)
        self._limits = context.limits
        self._cache = context.kv_cache
        self._requests: dict[str, Request] = {}
        self._waiting = _WaitingQueue(context.policy)
        self._running: list[Request] = []
        self._untold: set[str] = set()  # finished since the last plan
        self._telling: set[str] = set()  # told by a plan that is not confirmed

    def add_request(self, request: EngineCoreRequest) -> None:
        """Put a new request into the waiting queue."""
        live = Request(request)
        self._waiting.push(live)  # first: a policy that fails leaves nothing behind
        self._requests[request.request_id] = live

    def schedule(self) -> SchedulerOutput:
        """Plan a step: running requests first, then waiting ones while budget and blocks last."""
        step = _Step(budget=self._limits.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        # Until a plan is confirmed by `update`, what it told may not have arrived.
        self._telling |= self._untold
        self._untold = set()
        plan = step.plan(frozenset(self._telling))
        for request, tokens in step.scheduled.values():
            request.num_computed_tokens += tokens
        return plan

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append what was sampled and end the requests that are done."""
        self._telling = set()
        outputs = []
        for request_id, tokens in plan.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:  # aborted while the model ran
                continue
            output = self._update_request(request, tokens, result)
            if output is not None:
                outputs.append(output)
        return outputs

    def finish_requests(
        self, request_ids: Iterable[str], reason: FinishReason
    ) -> list[EngineCoreOutput]:
        """End requests from outside."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)
                outputs.append(EngineCoreOutput(request_id=request_id, finish_reason=reason))
        return outputs

    def num_unfinished_requests(self) -> int:
        """Return the number of live requests."""
        return len(self._requests)

    def has_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._requests or self._untold)

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self._running) and step.budget > 0:
            request = self._running[index]
            tokens = min(request.num_tokens - request.num_computed_tokens, step.budget)
            victims = len(step.preempted)
            blocks = self._allocate(request, tokens, step)
            if blocks is None:  # it gave way itself
                break
            step.take(request, tokens, CachedRequest(request.request_id, blocks))
            if len(step.preempted) > victims:  # some may have stood before this one
                index = self._running.index(request)
            index += 1

    def _allocate(self, request: Request, tokens: int, step: _Step) -> list[int] | None:
        """Find blocks, preempting others if need be; None if the request itself had to go."""
        while (blocks := self._cache.allocate(request, tokens)) is None:
            victim = self.context.policy.victim(tuple(self._running))
            self._preempt(victim, step)
            if victim is request:
                return None
        return blocks

    def _preempt(self, victim: Request, step: _Step) -> None:
        step.withdraw(victim)
        self._running.remove(victim)
        self._cache.free(victim)
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.PREEMPTED
        step.preempted.append(victim.request_id)
        self._waiting.push(victim)

    def _admit_waiting(self, step: _Step) -> None:
        while step.budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                break
            tokens = min(request.num_tokens, step.budget)
            if self._cache.allocate(request, tokens) is None:
                break
            self._waiting.pop()
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            step.take(
                request,
                tokens,
                NewRequest(
                    source=request.source,
                    output_token_ids=tuple(request.output_token_ids),
                    block_ids=self._cache.block_ids(request),
                    num_computed_tokens=0,
                ),
            )

    def _update_request(
        self, request: Request, tokens: int, result: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        request_id = request.request_id
        if fault := result.faults.get(request_id):
            self._finish(request)
            return EngineCoreOutput(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                error=fault.message,
                faulty_plugin=fault.plugin,
            )
        accepted: list[int] = []
        output = EngineCoreOutput(request_id=request_id, new_token_ids=accepted)
        for token in result.sampled_token_ids.get(request_id, ()):
            request.output_token_ids.append(token)
            accepted.append(token)
            if self._stops(request, token, output):
                self._finish(request)
                break
        if logprobs := result.logprobs.get(request_id):
            output.logprobs = logprobs[: len(accepted)]
        if prompt_logprobs := result.prompt_logprobs.get(request_id):
            computed_before = request.num_computed_tokens - tokens
            first = computed_before + 1 if computed_before else 0
            fresh = prompt_logprobs[max(request.num_prompt_logprobs - first, 0) :]
            request.num_prompt_logprobs += len(fresh)
            output.prompt_logprobs = fresh or None
        return output if accepted or output.prompt_logprobs else None

    def _stops(self, request: Request, token: int, output: EngineCoreOutput) -> bool:
        """Whether this token ends the request; if so, writes why."""
        source, params = request.source, request.params
        if token in source.eos_token_ids:
            output.finish_reason = FinishReason.STOP
        elif token in params.stop_token_ids:
            output.finish_reason, output.stop_reason = FinishReason.STOP, token
        elif params.repetition_detection is not None and repeats(
            request.output_token_ids, params.repetition_detection
        ):  # before the length: a larger one would not have helped
            output.finish_reason = FinishReason.REPETITION
        elif (
            len(request.output_token_ids) == params.max_tokens
            or request.num_tokens >= self._limits.max_model_len
        ):
            output.finish_reason = FinishReason.LENGTH
        return output.finished

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        self._waiting.forget(request, waiting=request.status is not RequestStatus.RUNNING)
        self._cache.free(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        self._untold.add(request.request_id)


@dataclass
class _Step:
    """A step while it is being planned."""

    budget: int
    scheduled: dict[str, tuple[Request, int]] = field(default_factory=dict)
    entries: dict[str, NewRequest | CachedRequest] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def take(self, request: Request, tokens: int, entry: NewRequest | CachedRequest) -> None:
        self.budget -= tokens
        self.scheduled[request.request_id] = (request, tokens)
        self.entries[request.request_id] = entry

    def withdraw(self, request: Request) -> None:
        """Undo `take`, if it happened."""
        _, tokens = self.scheduled.pop(request.request_id, (request, 0))
        self.entries.pop(request.request_id, None)
        self.budget += tokens

    def plan(self, finished: frozenset[str]) -> SchedulerOutput:
        entries = self.entries.values()
        tokens = {request_id: count for request_id, (_, count) in self.scheduled.items()}
        return SchedulerOutput(
            new_requests=[e for e in entries if isinstance(e, NewRequest)],
            cached_requests=[e for e in entries if isinstance(e, CachedRequest)],
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            preempted_request_ids=frozenset(self.preempted),
            finished_request_ids=finished,
        )


class _WaitingQueue:
    """Waiting requests by the policy's key; equal keys in order of first entry."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Any, int, Request]] = []
        self._order: dict[str, int] = {}
        self._entered = 0
        self._gone: set[int] = set()

    def push(self, request: Request) -> None:
        key = self._policy.key(request)
        order = self._order.get(request.request_id, self._entered)
        heapq.heappush(self._heap, (key, order, request))
        if self._order.setdefault(request.request_id, order) == self._entered:
            self._entered += 1

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1] in self._gone:
            self._gone.remove(heapq.heappop(self._heap)[1])
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def forget(self, request: Request, *, waiting: bool) -> None:
        """Drop what is kept of a request; `waiting` tells whether it stands in the queue."""
        order = self._order.pop(request.request_id)
        if waiting:
            self._gone.add(order)
