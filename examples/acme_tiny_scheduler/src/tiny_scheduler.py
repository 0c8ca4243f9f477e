"""A minimal scheduler: first come, first served, without preemption for memory.

A request is admitted when the KV cache has room for its maximum length, so no request is ever
preempted for blocks. That wastes memory and is easy to read; the default scheduler is the opposite.
It asks no policy, so it rejects all but `fcfs`, and ignores the watermark. Select it with
`scheduler.use = "tiny_scheduler:TinyScheduler"`.

It shows the duties of every scheduler: plans, results, finished requests, and errors for features
that it does not support. `hardpoint.testing.SchedulerSuite` checks them.
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
    """Runs requests in order of arrival, with blocks for their maximum length."""

    contract = 2

    def __init__(self, context):
        """Create a scheduler without requests.

        Raises:
            ConfigError: a feature is configured that it does not support.
        """
        super().__init__(context)
        limits = context.limits
        unsupported = {
            "asynchronous scheduling": limits.asynchronous,
            "drafts": limits.num_draft_tokens or limits.num_lookahead_tokens,
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "chunked_prefill = false": not limits.chunked_prefill,
            "another policy than fcfs": context.policy.name != "fcfs",
            "a KV connector": context.transfers,
            "an encoder cache": context.encoder_cache,
            "a model with states": context.kv_cache.num_free_states is not None,
        }
        for feature, configured in unsupported.items():
            if configured:
                raise ConfigError(f"scheduler.use: {self.name!r} does not work with {feature}")
        self.limits, self.cache = limits, context.kv_cache
        self.live = {}  # requests by id, in order of arrival
        self.planned = []  # (request, tokens) of the last plan
        self.steps = self.num_preempted = 0
        self.outputs = []  # of requests that finished while a step was planned
        self.unreported_finished = set()  # ids that no plan has reported
        self.unreported_preempted = set()  # ids that no plan has reported
        self.finished_ids = {}  # ids finished since the last outputs, by client

    def add_request(self, request):
        """Add a request if its maximum length fits."""
        if request.params.repetition_detection is not None:
            raise RequestError(f"repetition_detection: {self.name!r} does not support it")
        live = Request(request, order=self.steps)
        if self.context.gates is not None and self.context.gates.holds(live):
            raise RequestError(f"structured: {self.name!r} does not support it")
        limit = self._max_length(live)
        if live.num_tokens >= limit:
            raise RequestError(f"prompt: expected less than {limit} tokens, got {live.num_tokens}")
        if self.cache.blocks_needed(limit) > self.cache.num_usable_blocks:
            raise RequestError(f"prompt: the KV cache never has room for {limit} tokens")
        waiting = len(self.live) - self._num_running()
        limit = None if request.is_admitted else self.limits.max_waiting
        if limit is not None and waiting >= limit:
            raise OverloadedError(f"overloaded: {waiting} requests wait; try again later")
        self.live[request.request_id] = live
        self._record_event(live, EngineCoreEventType.QUEUED)

    def schedule(self):
        """Schedule tokens in order of arrival; an inadmissible request blocks later ones."""
        now, budget = self.context.clock(), self.limits.max_num_batched_tokens
        expired = [r for r in self.live.values() if r.deadline is not None and r.deadline <= now]
        self.outputs += [self._finish(request, FinishReason.TIMEOUT) for request in expired]
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
            self._send_record(plan, now, [request.request_id for request in expired])
        return plan

    def update(self, plan, result):  # noqa: ARG002 - there is one plan at a time
        """Append sampled tokens, and finish requests."""
        outputs, self.outputs = self.outputs, []
        for request, count in self.planned:
            name = request.request_id
            if self.live.get(name) is not request:
                continue  # it finished while the model ran
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
        return self._group_by_client(outputs)

    def plan_lost(self, plan):
        """Report the plan's changes again, and preempt its requests."""
        self.unreported_finished |= plan.finished_request_ids
        self.unreported_preempted |= plan.preempted_request_ids & set(self.live)
        for request, _ in self.planned:
            if self.live.get(request.request_id) is request:
                self.cache.rewind(request, request.num_computed_tokens)
                self._preempt(request)

    def reset_prefix_cache(self, *, recompute_running=False):
        """Forget cached content; with `recompute_running`, preempt the running requests."""
        self.cache.reset()
        for request in self.live.values():
            if recompute_running and request.status is RequestStatus.RUNNING:
                self._preempt(request)

    def finish_requests(self, request_ids, reason):
        """Finish requests; None means all."""
        ids = list(self.live) if request_ids is None else request_ids
        outputs = [self._finish(self.live[i], reason) for i in ids if i in self.live]
        return self._group_by_client(outputs)

    def num_unfinished_requests(self):
        """Return the number of live requests."""
        return len(self.live)

    def has_requests(self):
        """Return whether a step has anything to do."""
        return bool(self.live or self.unreported_finished or self.outputs)

    def stats(self):
        """Return queue lengths, cache usage and counters."""
        running = self._num_running()
        return SchedulerStats(
            num_running=running,
            num_waiting=len(self.live) - running,
            kv_cache_usage=1 - self.cache.num_free_blocks / self.cache.num_usable_blocks,
            prefix_cache=self.cache.stats(),
            num_preemptions=self.num_preempted,
        )

    def _max_length(self, request):
        num_outputs = request.params.max_tokens or self.limits.max_model_len
        return min(request.num_prompt_tokens + num_outputs, self.limits.max_model_len)

    def _num_running(self):
        return sum(r.status is RequestStatus.RUNNING for r in self.live.values())

    def _admit(self, request, budget):
        """Allocate blocks for the maximum length of a request; return whether there were enough."""
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
        self._record_event(request, EngineCoreEventType.SCHEDULED)
        return True

    def _preempt(self, request):
        self.cache.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self.num_preempted += 1
        self.unreported_preempted.add(request.request_id)
        self._record_event(request, EngineCoreEventType.PREEMPTED)

    def _plan(self, new, cached):
        finished, self.unreported_finished = frozenset(self.unreported_finished), set()
        preempted, self.unreported_preempted = frozenset(self.unreported_preempted), set()
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
            finished_request_ids=finished,
        )

    def _send_record(self, plan, now, timed_out):
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

    def _output(self, request, result, prompt_logprobs):
        """Append a request's sampled token and return its output."""
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
        self.unreported_finished.add(name)
        self.unreported_preempted.discard(name)
        self.finished_ids.setdefault(request.source.client_index, set()).add(name)

    def _group_by_client(self, outputs):
        result = {}
        for client, output in outputs:
            result.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        if self.context.report_finished:
            for client, names in self.finished_ids.items():
                result.setdefault(client, EngineCoreOutputs()).finished_requests = names
        self.finished_ids = {}
        return result

    def _record_event(self, request, kind):
        if self.context.log_stats:
            request.events.append(EngineCoreEvent(kind, self.context.clock()))
