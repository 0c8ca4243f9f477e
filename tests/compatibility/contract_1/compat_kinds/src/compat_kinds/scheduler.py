"""A scheduler: in the policy's order, with blocks for the maximum length of a request."""

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


class CompatScheduler(Scheduler):
    """Preempts no request for memory; waits for grammars."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        limits = context.limits
        unsupported = {
            "asynchronous": limits.asynchronous,
            "drafts": limits.num_draft_tokens or limits.num_lookahead_tokens,
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "chunked_prefill": not limits.chunked_prefill,
            "max_loras": limits.max_loras,
            "kv_connector": context.connector is not None,
            "encoder_cache": context.encoder_cache is not None,
        }
        if found := [name for name, configured in unsupported.items() if configured]:
            raise ConfigError(f"scheduler.use: {self.name!r} does not work with {found[0]}")
        self.limits, self.cache = limits, context.kv_cache
        self.live = {}
        self.planned = []
        self.step = self.num_preempted = 0
        self.outputs = []  # (client, output) of requests that ended while a step was planned
        self.finished, self.preempted = set(), set()  # ids that no plan has reported
        self.finished_ids = {}

    def add_request(self, request):
        if request.params.repetition_detection is not None:
            raise RequestError(f"repetition_detection: {self.name!r} does not support it")
        live = Request(request, order=self.step)
        limit = self._max_length(live)
        if live.num_tokens >= limit:
            raise RequestError(f"prompt: expected less than {limit} tokens, got {live.num_tokens}")
        if self.cache.blocks_needed(limit) > self.cache.num_usable_blocks:
            raise RequestError(f"prompt: the KV cache never has room for {limit} tokens")
        waiting = len(self.live) - self._num_running()
        if self.limits.max_waiting is not None and waiting >= self.limits.max_waiting:
            raise OverloadedError(f"overloaded: {waiting} requests wait; try again later")
        self.live[request.request_id] = live
        self.context.policy.added(live)
        self._event(live, EngineCoreEventType.QUEUED)

    def schedule(self):
        now, budget = self.context.clock(), self.limits.max_num_batched_tokens
        self.step += 1
        self.planned, new, cached = [], [], []
        expired = [r for r in self.live.values() if r.deadline is not None and r.deadline <= now]
        self.outputs += [self._finish(request, FinishReason.TIMEOUT) for request in expired]
        running = [r for r in self.live.values() if r.status is RequestStatus.RUNNING]
        waiting = [r for r in self.live.values() if r.status is not RequestStatus.RUNNING]
        full = False
        for request in running + sorted(waiting, key=self.context.policy.key):
            if not budget:
                break
            if request.status is RequestStatus.RUNNING:
                cached.append(request)
            elif full or not self._is_ready(request):
                continue
            elif self._admit(request, budget):
                new.append(request)
            else:
                full = True
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            self.cache.extend(request, count)
            self.planned.append((request, count))
            budget -= count
        plan = self._plan(new, cached)
        for request, count in self.planned:
            self.context.policy.scheduled(request, count)
        if self.context.record is not None:
            self._record(plan, now, expired)
        return plan

    def update(self, plan, result):
        assert plan.step == self.step
        outputs, self.outputs = self.outputs, []
        for request, count in self.planned:
            name = request.request_id
            if self.live.get(name) is not request:
                continue
            start = request.num_computed_tokens
            request.num_computed_tokens += count
            if fault := result.faults.get(name):
                reason = FinishReason.ERROR
                outputs.append(self._finish(request, reason, fault.message, fault.plugin))
                continue
            logprobs = result.prompt_logprobs.get(name, [])
            new = logprobs[max(request.num_prompt_logprobs - (start + 1 if start else 0), 0) :]
            request.num_prompt_logprobs += len(new)
            if new or name in result.sampled_token_ids:
                outputs.append(self._output(request, result, new))
        return self._by_client(outputs)

    def plan_lost(self, plan):
        self.finished |= plan.finished_request_ids
        self.preempted |= plan.preempted_request_ids & set(self.live)
        for request, _ in self.planned:
            if self.live.get(request.request_id) is request:
                self.cache.rewind(request, request.num_computed_tokens)
                self._preempt(request)

    def finish_requests(self, request_ids, reason):
        ids = list(self.live) if request_ids is None else request_ids
        return self._by_client([self._finish(self.live[i], reason) for i in ids if i in self.live])

    def num_unfinished_requests(self):
        return len(self.live)

    def has_requests(self):
        return bool(self.live or self.finished or self.outputs)

    def stats(self):
        running = self._num_running()
        return SchedulerStats(
            num_running=running,
            num_waiting=len(self.live) - running,
            kv_cache_usage=1 - self.cache.num_free_blocks / self.cache.num_usable_blocks,
            prefix_cache=self.cache.stats(),
            num_preemptions=self.num_preempted,
        )

    def live_request(self, request_id):
        return self.live.get(request_id)

    def live_requests(self):
        return self.live.values()

    def reset_prefix_cache(self, *, recompute_running=False):
        self.cache.reset()
        for request in self.live.values():
            if recompute_running and request.status is RequestStatus.RUNNING:
                self._preempt(request)

    def _uses_grammar(self, request):
        return self.context.grammars is not None and self.context.grammars.uses(request)

    def _is_ready(self, request):
        """Return whether a request's grammar is ready; end the request if it cannot be compiled."""
        try:
            return not self._uses_grammar(request) or self.context.grammars.ready(request)
        except RequestError as error:
            self.outputs.append(self._finish(request, FinishReason.ERROR, str(error)))
            return False

    def _max_length(self, request):
        num_outputs = request.params.max_tokens or self.limits.max_model_len
        return min(request.num_prompt_tokens + num_outputs, self.limits.max_model_len)

    def _num_running(self):
        return sum(r.status is RequestStatus.RUNNING for r in self.live.values())

    def _admit(self, request, budget):
        if self._num_running() == self.limits.max_num_seqs:
            return False
        prefix = self.cache.lookup(request)
        count = min(request.num_tokens - prefix.num_tokens, budget)
        rest = self._max_length(request) - prefix.num_tokens - count
        if not self.cache.admit(request, prefix, count, num_lookahead_tokens=rest):
            return False
        request.num_computed_tokens = prefix.num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = prefix.num_tokens
        request.status = RequestStatus.RUNNING
        self._event(request, EngineCoreEventType.SCHEDULED)
        return True

    def _preempt(self, request):
        self.cache.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self.num_preempted += 1
        self.preempted.add(request.request_id)
        self.context.policy.preempted(request)
        self._event(request, EngineCoreEventType.PREEMPTED)

    def _plan(self, new, cached):
        finished, self.finished = frozenset(self.finished), set()
        preempted, self.preempted = frozenset(self.preempted), set()
        tokens = {request.request_id: count for request, count in self.planned}
        return SchedulerOutput(
            step=self.step,
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
            structured_request_ids={
                request.request_id: index
                for index, (request, _) in enumerate(self.planned)
                if self._uses_grammar(request)
            },
            preempted_request_ids=preempted,
            finished_request_ids=finished,
        )

    def _record(self, plan, now, expired):
        running = self._num_running()
        new = [n.source.request_id for n in plan.new_requests if not n.resumed]
        self.context.record(
            StepRecord(
                step=plan.step,
                timestamp=now,
                scheduled=plan.num_scheduled_tokens,
                new=new,
                resumed=[n.source.request_id for n in plan.new_requests if n.resumed],
                preempted=dict.fromkeys(plan.preempted_request_ids, "its plan was lost"),
                finished=list(plan.finished_request_ids),
                timed_out=[request.request_id for request in expired],
                waiting={},
                num_running=running,
                num_waiting=len(self.live) - running,
                num_free_blocks=self.cache.num_free_blocks,
                token_budget=self.limits.max_num_batched_tokens,
            )
        )

    def _output(self, request, result, prompt_logprobs):
        output = EngineCoreOutput(request_id=request.request_id)
        output.prompt_logprobs = prompt_logprobs or None
        output.events, request.events = request.events, []
        for token in result.sampled_token_ids.get(request.request_id, ()):
            if not request.output_token_ids:
                output.num_cached_tokens = request.num_cached_tokens
            request.append(token)
            output.new_token_ids = [token]
            output.logprobs = result.logprobs.get(request.request_id)
            enough = len(request.output_token_ids) > request.params.min_tokens
            if enough and token in request.source.stop_token_ids:
                output.finish_reason = FinishReason.STOP
                output.stop_reason = token if token not in request.source.eos_token_ids else None
            elif request.num_tokens == self._max_length(request):
                output.finish_reason = FinishReason.LENGTH
        if output.finished:
            self._remove(request)
        return request.source.client_index, output

    def _finish(self, request, reason, error=None, plugin=None):
        self._remove(request)
        return request.source.client_index, EngineCoreOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            faulty_plugin=plugin,
            events=request.events,
        )

    def _remove(self, request):
        name = request.request_id
        del self.live[name]
        request.status = RequestStatus.FINISHED
        self.cache.free(request)
        self.context.policy.finished(request)
        self.finished.add(name)
        self.preempted.discard(name)
        self.finished_ids.setdefault(request.source.client_index, set()).add(name)

    def _by_client(self, outputs):
        result = {}
        for client, output in outputs:
            result.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        if self.context.report_finished:
            for client, names in self.finished_ids.items():
                result.setdefault(client, EngineCoreOutputs()).finished_requests = names
        self.finished_ids = {}
        return result

    def _event(self, request, kind):
        if self.context.log_stats:
            request.events.append(EngineCoreEvent(kind, self.context.clock()))
