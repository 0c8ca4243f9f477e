"""A whole scheduler of one's own, as small as it can be: first come, first served, no preemption.

A request is admitted when the KV cache has room for all that it may become, so that nobody ever
has to give way. That wastes memory, and is easy to read; the default scheduler is the other way
round. Choose it with `scheduler.use = "tiny_scheduler:TinyScheduler"`.

It shows what every scheduler owes the engine: the plan, the outcome, the ends, and to refuse by
name what it cannot do. `hardpoint.testing.SchedulerSuite` checks that it does.
"""

import itertools

from hardpoint.plugins import (
    CachedRequests,
    ConfigError,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    NewRequest,
    OverloadedError,
    Request,
    RequestError,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    StepRecord,
    WaitingFor,
    WaitReason,
)


class TinyScheduler(Scheduler):
    """Requests run in the order in which they came, each with all the blocks that it may need."""

    contract = 1

    def __init__(self, context):
        """Refuse what it does not do.

        Raises:
            ConfigError: naming it.
        """
        super().__init__(context)
        limits = context.limits
        for what, wanted in {
            "asynchronous": limits.asynchronous,
            "num_draft_tokens": limits.num_draft_tokens,
            "num_lookahead_tokens": limits.num_lookahead_tokens,
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "max_loras": limits.max_loras,
            "chunked_prefill = false": not limits.chunked_prefill,
            "a KV connector": context.connector,
            "an encoder cache": context.encoder_cache,
            "grammars": context.grammars,
            "kv_cache.watermark": context.watermark,
        }.items():
            if wanted:
                raise ConfigError(f"scheduler.use: {self.name!r} does not work with {what}")
        self._limits, self._cache = limits, context.kv_cache
        self._live = {}  # by id, in order of arrival
        self._ended = set()  # not told yet
        self._outputs = []  # of requests that ended while a step was planned
        self._reported = {}  # by client, ids that ended since its last outputs
        self._again = set()  # lost their plan: to be sent anew
        self._serial = itertools.count()
        self._steps = itertools.count(1)
        self._plan = SchedulerOutput()

    def add_request(self, request):
        """Take a request that fits."""
        params, live = request.params, Request(request, next(self._serial))
        if params.repetition_detection is not None:
            raise RequestError(f"repetition_detection: {self.name!r} does not know it")
        most = live.num_prompt_tokens + (params.max_tokens or self._limits.max_model_len)
        most = min(most, self._limits.max_model_len)
        if live.num_prompt_tokens >= most:
            raise RequestError(f"prompt: expected less than {most} tokens")
        if self._cache.blocks_needed(most) > self._cache.num_usable_blocks:
            raise RequestError(f"prompt: the KV cache never has room for {most} tokens")
        waiting = sum(r.status is RequestStatus.WAITING for r in self._live.values())
        if self._limits.max_waiting is not None and waiting >= self._limits.max_waiting:
            raise OverloadedError(f"overloaded: {waiting} requests wait")
        self._live[request.request_id] = live
        self.context.policy.added(live)

    def schedule(self):
        """Give each request its tokens, first those that came first."""
        now, budget = self.context.clock(), self._limits.max_num_batched_tokens
        expired = [r for r in self._live.values() if r.deadline is not None and r.deadline <= now]
        for request in expired:
            self._outputs.append(self._end(request, FinishReason.TIMEOUT))
        new, cached, counts, tokens = [], [], [], {}
        for name, request in self._live.items():
            if budget and (request.status is RequestStatus.RUNNING or self._admit(request)):
                count = min(request.num_tokens - request.num_computed_tokens, budget)
                if name in self._again or request.status is RequestStatus.WAITING:
                    new.append(self._in_full(request))
                else:
                    cached.append(name)
                    counts.append(request.num_computed_tokens)
                request.status = RequestStatus.RUNNING
                tokens[name] = count
                budget -= count
                self.context.policy.scheduled(request, count)
        told, self._ended = frozenset(self._ended), set()
        self._plan = SchedulerOutput(
            step=next(self._steps),
            new_requests=new,
            cached_requests=CachedRequests(cached, counts),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            finished_request_ids=told,
        )
        self._record(now, [request.request_id for request in expired])
        return self._plan

    def update(self, plan, result):
        """Append what was sampled, and end whoever is done."""
        outputs, self._outputs = self._outputs, []
        for name, count in plan.num_scheduled_tokens.items():
            request = self._live.get(name)
            if request is None or name not in self._of(plan, request):
                continue
            request.num_computed_tokens += count
            if fault := result.faults.get(name):
                outputs.append(self._end(request, FinishReason.ERROR, fault.message, fault.plugin))
            elif name in result.sampled_token_ids or name in result.prompt_logprobs:
                outputs.append(self._take(request, plan, result))
        return self._by_client([pair for pair in outputs if pair])

    def plan_lost(self, plan):
        """Tell again what the plan told, and send its requests again."""
        self._ended |= plan.finished_request_ids
        for name in plan.num_scheduled_tokens:
            if name in self._live:
                self._cache.rewind(self._live[name], self._live[name].num_computed_tokens)
                self._again.add(name)

    def finish_requests(self, request_ids, reason):
        """End requests from outside."""
        ids = list(self._live) if request_ids is None else request_ids
        return self._by_client([self._end(self._live[i], reason) for i in ids if i in self._live])

    def num_unfinished_requests(self):
        """Count what is live."""
        return len(self._live)

    def has_requests(self):
        """Whether a step has anything to do."""
        return bool(self._live or self._ended or self._outputs)
