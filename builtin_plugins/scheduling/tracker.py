"""The scheduler's books: who is where, and the moves between places."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from hardpoint.plugins import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Load,
    RequestStatus,
    SchedulerContext,
    SchedulingPolicy,
)

from .live import LiveRequest
from .step import Step
from .waiting_queue import WaitingQueue

LOAD, SAVE = "load", "save"


class Books:
    """Every live request is in exactly one of `running`, `waiting` and `blocked`.

    Attributes:
        requests: all live ones, by id.
        running: by id, in order of admission.
        waiting: may run when their turn comes.
        blocked: wait for a grammar or for remote KV, by id.
        loaded: those that wait and hold blocks which a connector filled, by id.
        lingering: ended requests whose blocks a connector still needs, by id, with what is not
            over: LOAD, SAVE or both.
        loras: adapters of running requests, by id, with the number of requests.
        ended: outputs of requests that ended while a step was planned.
        untold: ended requests that no plan has told of.
        preempted: requests that lost their blocks and that no plan has told of.
        unfreed: encoder inputs that were freed and that no plan has told of.
        keeps_accounts, holds_back: whether the policy wants to know what was scheduled, and
            whether it has a say in who is admitted. What it does not do costs nothing.
        ended_ids: by client, ids that ended since its last outputs.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Start empty."""
        self.context = context
        self.limits = context.limits
        self.cache = context.kv_cache
        self.set_policy(context.policy)
        self.requests: dict[str, LiveRequest] = {}
        self.running: dict[str, LiveRequest] = {}
        self.waiting = WaitingQueue(context.policy)
        self.blocked: dict[str, LiveRequest] = {}
        self.loaded: dict[str, LiveRequest] = {}
        self.lingering: dict[str, tuple[LiveRequest, set[str]]] = {}
        self.loras: Counter[int] = Counter()
        self.ended: list[tuple[int, EngineCoreOutput]] = []
        self.untold: set[str] = set()
        self.preempted: set[str] = set()
        self.unfreed: list[str] = []
        self.ended_ids: dict[int, set[str]] = {}
        self.num_preemptions = 0
        self._deadlines: list[tuple[float, int, str]] = []

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Decide by another policy from now on."""
        self.policy = policy
        self.keeps_accounts = _overrides(policy, "scheduled")
        self.holds_back = _overrides(policy, "admit")

    # Coming

    def add(self, request: LiveRequest) -> None:
        """Take a new request."""
        grammars = self.context.grammars
        self.policy.added(request)
        if grammars is not None and grammars.uses(request):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            self.blocked[request.request_id] = request
        else:
            self.waiting.push(request)
        self.requests[request.request_id] = request
        if (deadline := request.deadline) is not None:
            entry = (deadline, request.order, request.request_id)
            heapq.heappush(self._deadlines, entry)
        if self.context.log_stats:
            request.note(EngineCoreEventType.QUEUED, self.context.clock())

    def expired(self, now: float) -> Iterator[LiveRequest]:
        """Yield the live requests whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.order == order:
                yield request

    def is_overdue(self, now: float) -> bool:
        """Whether a deadline has passed that nobody was told of; perhaps of an ended request."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    # Between places

    def run(self, request: LiveRequest, step: Step) -> None:
        """Let a request run that left the queue or is about to."""
        request.status = RequestStatus.RUNNING
        self.loaded.pop(request.request_id, None)
        self.running[request.request_id] = request
        if request.lora is not None:
            self.loras[request.lora.id] += 1
        if self.context.log_stats:
            request.note(EngineCoreEventType.SCHEDULED, step.now)

    def wait(self, request: LiveRequest) -> None:
        """Put a request that was blocked into the queue."""
        del self.blocked[request.request_id]
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def preempt(self, request: LiveRequest, now: float) -> None:
        """Take a running request's blocks and put it back into the queue."""
        self._stop_running(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.add(request.request_id)
        self.rewind(request)
        self.policy.preempted(request)
        if self.context.log_stats:
            request.note(EngineCoreEventType.PREEMPTED, now)
        self.waiting.push(request)

    def discard_from(self, request: LiveRequest, num_tokens: int) -> None:
        """Let nobody find what a request's blocks hold from position `num_tokens` on."""
        first = num_tokens // self.cache.block_size
        tables = self.cache.block_ids(request)
        self.cache.discard(block for table in tables for block in table[first:])

    def rewind(self, request: LiveRequest) -> None:
        """Take everything from a request that it would have to compute anew."""
        self.cache.free(request)
        if self.context.encoder_cache is not None:
            self.context.encoder_cache.free(request)
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.draft_token_ids = []
        self.loaded.pop(request.request_id, None)

    def give_up_loaded(self, but: LiveRequest | None = None) -> bool:
        """Take the blocks of the last request that waits with loaded ones; it computes them anew.

        For when nobody else could go on: who waits is not preempted otherwise.

        Args:
            but: keeps its blocks.

        Returns:
            Whether there was one.
        """
        holders = [holder for holder in self.loaded.values() if holder is not but]
        if not holders:
            return False
        self.rewind(max(holders, key=lambda holder: holder.order))
        return True

    # Going

    def finish(self, request: LiveRequest, output: EngineCoreOutput) -> None:
        """End a request; `output` is its last and gets what is to be said at the end."""
        request_id = request.request_id
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KV
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        elif request_id in self.blocked:
            del self.blocked[request_id]
        else:
            self.waiting.remove(request)
            self.loaded.pop(request_id, None)
        del self.requests[request_id]
        self.untold.add(request_id)
        request.status = RequestStatus.FINISHED
        output.trace_headers = request.source.trace_headers
        self._let_go_of_blocks(request, output, loading=loading)
        if self.context.encoder_cache is not None:
            self.context.encoder_cache.free(request)
        if self.context.report_finished:
            self.ended_ids.setdefault(request.client_index, set()).add(request_id)
        self.policy.finished(request)  # may end the engine; all else is in order by then
        if len(self._deadlines) > 64 + 2 * len(self.requests):
            self._deadlines = [d for d in self._deadlines if d[2] in self.requests]
            heapq.heapify(self._deadlines)

    def last_output(
        self, request: LiveRequest, reason: FinishReason, error: str | None = None
    ) -> EngineCoreOutput:
        """End a request outside of `update`; return its last output."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            events=request.events,
        )
        self.finish(request, output)
        return output

    def end(self, request: LiveRequest, reason: FinishReason, error: str | None = None) -> None:
        """End a request while a step is planned; the next `update` tells."""
        self.ended.append((request.client_index, self.last_output(request, reason, error)))

    def end_if_too_long(self, request: LiveRequest) -> bool:
        """End a request that the whole cache cannot hold: it would be preempted for ever.

        Returns:
            Whether it was ended.
        """
        needed, usable = self.blocks_needed(request.num_tokens), self.cache.num_usable_blocks
        if needed <= usable:
            return False
        ahead = self.lookahead(request.num_tokens)
        self.end(
            request,
            FinishReason.ERROR,
            f"the KV cache is too small: {request.num_tokens} tokens"
            f"{f' and {ahead} of lookahead' if ahead else ''} need {needed} blocks of "
            f"{self.cache.block_size} tokens, the cache has {usable}",
        )
        return True

    def by_client(
        self, outputs: list[tuple[int, EngineCoreOutput]], now: float
    ) -> dict[int, EngineCoreOutputs]:
        """Return outputs by client index, with the ids that ended."""
        result: dict[int, EngineCoreOutputs] = {}
        for client, output in outputs:
            if client not in result:
                result[client] = EngineCoreOutputs(timestamp=now)
            result[client].outputs.append(output)
        for client, ids in self.ended_ids.items():
            if client not in result:
                result[client] = EngineCoreOutputs(timestamp=now)
            result[client].finished_requests = ids
        self.ended_ids = {}
        return result

    # Asking

    def load(self, step: Step) -> Load:
        """Return how full the engine is."""
        return Load(
            now=step.now,
            num_running=len(self.running),
            max_num_seqs=self.limits.max_num_seqs,
            num_waiting=len(self.waiting) + len(self.blocked),
            token_budget=step.budget,
            num_free_blocks=self.cache.num_free_blocks,
            num_blocks=self.cache.num_usable_blocks,
        )

    def lookahead(self, num_tokens: int) -> int:
        """Return for how many tokens more than these blocks are had: none beyond the longest."""
        return min(self.limits.num_lookahead_tokens, self.limits.max_model_len - num_tokens)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many blocks a request of so many tokens needs, lookahead included."""
        return self.cache.blocks_needed(num_tokens + self.lookahead(num_tokens))

    def _stop_running(self, request: LiveRequest) -> None:
        del self.running[request.request_id]
        if request.lora is not None:
            self.loras[request.lora.id] -= 1
            if not self.loras[request.lora.id]:
                del self.loras[request.lora.id]

    def _let_go_of_blocks(
        self, request: LiveRequest, output: EngineCoreOutput, *, loading: bool
    ) -> None:
        """Free the blocks, unless a connector still reads or writes them."""
        saving = False
        connector = self.context.connector
        if connector is not None:
            saving, params = connector.request_finished(request, self.cache.block_ids(request))
            if params is not None:
                output.kv_transfer_params = dict(params)
        going_on = {what for what, is_so in ((LOAD, loading), (SAVE, saving)) if is_so}
        if going_on:
            self.lingering[request.request_id] = (request, going_on)
        else:
            self.cache.free(request)


def _overrides(policy: SchedulingPolicy, method: str) -> bool:
    own = getattr(getattr(policy, method), "__func__", None)
    return own is not getattr(SchedulingPolicy, method)
