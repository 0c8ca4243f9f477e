"""A whole scheduler of one's own, as small as it can be: first come, first served, no preemption.

A request is admitted when the KV cache has room for all that it may become, so nobody ever has to
give way. That wastes memory and is easy to read; the default scheduler is the other way round. It
asks no policy, so it refuses any but `fcfs`; and needs no watermark. Choose it with
`scheduler.use = "tiny_scheduler:TinyScheduler"`.

It shows what every scheduler owes the engine: plans, outcomes, ends, and to refuse by name what it
cannot do. `hardpoint.testing.SchedulerSuite` checks that it does.
"""

from hardpoint.plugins import (
    CachedRequests,
    ConfigError,
    EngineCoreEvent,
    EngineCoreEventType,
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
        asked = {
            "asynchronous scheduling": limits.asynchronous,
            "drafts": limits.num_draft_tokens or limits.num_lookahead_tokens,
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "chunked_prefill = false": not limits.chunked_prefill,
            "a limit of adapters": limits.max_loras,
            "another policy than fcfs": context.policy.name != "fcfs",
            "a KV connector": context.connector,
            "an encoder cache": context.encoder_cache,
            "grammars": context.grammars,
        }
        for what, wanted in asked.items():
            if wanted:
                raise ConfigError(f"scheduler.use: {self.name!r} does not work with {what}")
        self.limits, self.cache = limits, context.kv_cache
        self.live = {}  # requests by id, in order of arrival
        self.planned = []  # those of the last plan, with their tokens
        self.steps = self.num_preempted = 0
        self.outputs = []  # of requests that ended while a step was planned
        self.untold = set()  # ended, and no plan told
        self.preempted = set()  # lost their blocks, and no plan told
        self.ended = {}  # by client, ids that ended since its last outputs

    def add_request(self, request):
        """Take a request whose whole length fits."""
        if request.params.repetition_detection is not None:
            raise RequestError(f"repetition_detection: {self.name!r} does not know it")
        live = Request(request, order=self.steps)
        most = self._longest(live)
        if live.num_tokens >= most:
            raise RequestError(f"prompt: expected less than {most} tokens, got {live.num_tokens}")
        if self.cache.blocks_needed(most) > self.cache.num_usable_blocks:
            raise RequestError(f"prompt: the KV cache never has room for {most} tokens")
        waiting = len(self.live) - self._num_running()
        if self.limits.max_waiting is not None and waiting >= self.limits.max_waiting:
            raise OverloadedError(f"overloaded: {waiting} requests wait; try again later")
        self.live[request.request_id] = live
        self._note(live, EngineCoreEventType.QUEUED)

    def schedule(self):
        """Give tokens to each request in turn; who cannot be admitted keeps others from it."""
        now, budget = self.context.clock(), self.limits.max_num_batched_tokens
        expired = [r for r in self.live.values() if r.deadline is not None and r.deadline <= now]
        self.outputs += [self._end(request, FinishReason.TIMEOUT) for request in expired]
        self.steps += 1
        self.planned, new, cached, full = [], [], [], False
        for request in self.live.values():
            if budget and request.status is RequestStatus.RUNNING:
                cached.append(request)
            elif budget and not full and self._admit(request, budget):
                new.append(request)
            else:
                full = True
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            self.cache.extend(request, count)
            self.planned.append((request, count))
            budget -= count
        plan = self._plan(new, cached)
        if self.context.record is not None:
            self._record(plan, now, [request.request_id for request in expired])
        return plan

    def update(self, plan, result):  # noqa: ARG002 - there is one plan at a time
        """Append what was sampled, and end whoever is done."""
        outputs, self.outputs = self.outputs, []
        for request, count in self.planned:
            name = request.request_id
            if self.live.get(name) is not request:
                continue  # it ended meanwhile
            start = request.num_computed_tokens
            request.num_computed_tokens += count
            if fault := result.faults.get(name):
                outputs.append(self._end(request, FinishReason.ERROR, fault.message, fault.plugin))
                continue
            logprobs = result.prompt_logprobs.get(name, [])
            fresh = logprobs[max(request.num_prompt_logprobs - (start + 1 if start else 0), 0) :]
            request.num_prompt_logprobs += len(fresh)
            if fresh or name in result.sampled_token_ids:
                outputs.append(self._take(request, result, fresh))
        return self._by_client(outputs)

    def plan_lost(self, plan):
        """Tell again what the plan told, and compute its requests anew."""
        self.untold |= plan.finished_request_ids
        self.preempted |= plan.preempted_request_ids & set(self.live)
        for request, _ in self.planned:
            if self.live.get(request.request_id) is request:
                self.cache.rewind(request, request.num_computed_tokens)
                self._preempt(request)

    def reset_prefix_cache(self, *, recompute_running=False):
        """Forget cached content; with `recompute_running`, compute everything anew."""
        self.cache.reset()
        for request in self.live.values():
            if recompute_running and request.status is RequestStatus.RUNNING:
                self._preempt(request)

    def finish_requests(self, request_ids, reason):
        """End requests from outside."""
        ids = list(self.live) if request_ids is None else request_ids
        return self._by_client([self._end(self.live[i], reason) for i in ids if i in self.live])

    def num_unfinished_requests(self):
        """Count what is live."""
        return len(self.live)

    def has_requests(self):
        """Whether a step has anything to do."""
        return bool(self.live or self.untold or self.outputs)

    def stats(self):
        """Count."""
        running = self._num_running()
        return SchedulerStats(
            num_running=running,
            num_waiting=len(self.live) - running,
            kv_cache_usage=1 - self.cache.num_free_blocks / self.cache.num_usable_blocks,
            prefix_cache=self.cache.stats(),
            num_preemptions=self.num_preempted,
        )

    def _longest(self, request):
        most = request.params.max_tokens or self.limits.max_model_len
        return min(request.num_prompt_tokens + most, self.limits.max_model_len)

    def _num_running(self):
        return sum(r.status is RequestStatus.RUNNING for r in self.live.values())

    def _admit(self, request, budget):
        """Give a request all the blocks that it may ever need, if there are so many."""
        if self._num_running() == self.limits.max_num_seqs:
            return False
        prefix = self.cache.lookup(request)
        count = min(request.num_tokens - prefix.num_tokens, budget)
        rest = self._longest(request) - prefix.num_tokens - count
        if not self.cache.admit(request, prefix, count, num_lookahead_tokens=rest):
            return False
        request.num_computed_tokens = prefix.num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = prefix.num_tokens
        request.status = RequestStatus.RUNNING
        self._note(request, EngineCoreEventType.SCHEDULED)
        return True

    def _preempt(self, request):
        self.cache.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self.num_preempted += 1
        self.preempted.add(request.request_id)
        self._note(request, EngineCoreEventType.PREEMPTED)

    def _plan(self, new, cached):
        told, self.untold = frozenset(self.untold), set()
        preempted, self.preempted = frozenset(self.preempted), set()
        tokens = {request.request_id: count for request, count in self.planned}
        return SchedulerOutput(
            step=self.steps,
            new_requests=[
                NewRequest(
                    source=request.source,
                    output_token_ids=tuple(request.output_token_ids),
                    block_ids=self.cache.block_ids(request),
                    num_computed_tokens=request.num_computed_tokens,
                    resumed=request.num_preemptions > 0,
                )
                for request in new
            ],
            cached_requests=CachedRequests(
                [request.request_id for request in cached],
                [request.num_computed_tokens for request in cached],
            ),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            preempted_request_ids=preempted,
            finished_request_ids=told,
        )

    def _record(self, plan, now, timed_out):
        running = self._num_running()
        self.context.record(
            StepRecord(
                step=plan.step,
                timestamp=now,
                scheduled=plan.num_scheduled_tokens,
                new=[n.source.request_id for n in plan.new_requests if not n.resumed],
                resumed=[n.source.request_id for n in plan.new_requests if n.resumed],
                preempted=dict.fromkeys(plan.preempted_request_ids, "its plan was lost"),
                finished=list(plan.finished_request_ids),
                timed_out=timed_out,
                waiting={},
                admission_stopped=None,
                num_running=running,
                num_waiting=len(self.live) - running,
                num_free_blocks=self.cache.num_free_blocks,
                token_budget=self.limits.max_num_batched_tokens,
            )
        )

    def _take(self, request, result, prompt_logprobs):
        """Make the output of a request that goes on or ends."""
        output = EngineCoreOutput(request_id=request.request_id)
        output.prompt_logprobs = prompt_logprobs or None
        output.events, request.events = request.events, []
        for token in result.sampled_token_ids.get(request.request_id, ()):
            if not request.output_token_ids:
                output.num_cached_tokens = request.num_cached_tokens
            request.append(token)
            output.new_token_ids = [token]
            output.logprobs = result.logprobs.get(request.request_id)
            if token in request.source.stop_token_ids:
                output.finish_reason = FinishReason.STOP
                output.stop_reason = token if token not in request.source.eos_token_ids else None
            elif request.num_tokens == self._longest(request):
                output.finish_reason = FinishReason.LENGTH
        if output.finished:
            self._leave(request)
        return request.source.client_index, output

    def _end(self, request, reason, error=None, plugin=None):
        self._leave(request)
        return request.source.client_index, EngineCoreOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            faulty_plugin=plugin,
            events=request.events,
        )

    def _leave(self, request):
        name = request.request_id
        del self.live[name]
        request.status = RequestStatus.FINISHED
        self.cache.free(request)
        self.untold.add(name)
        self.preempted.discard(name)
        self.ended.setdefault(request.source.client_index, set()).add(name)

    def _by_client(self, outputs):
        result = {}
        for client, output in outputs:
            result.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        if self.context.report_finished:
            for client, names in self.ended.items():
                result.setdefault(client, EngineCoreOutputs()).finished_requests = names
        self.ended = {}
        return result

    def _note(self, request, kind):
        if self.context.log_stats:
            request.events.append(EngineCoreEvent(kind, self.context.clock()))
