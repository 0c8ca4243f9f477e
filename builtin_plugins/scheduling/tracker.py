"""The state of all live requests, and their transitions between queues."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

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

from .live_request import SchedulerRequest
from .waiting_queue import WaitingQueue

OutputsByClient = defaultdict[int, list[EngineCoreOutput]]
"""Outputs of requests, by the index of the client that sent them."""

_LOOKUPS = ("requests", "queried_tokens", "hit_tokens")
"""Figures of the cache about lookups."""

LOAD, SAVE = "load", "save"
"""Transfers of the blocks of a request."""


class RequestTracker:
    """All live requests; each is in one of `running`, `waiting`, `blocked` and `loading`.

    Attributes:
        requests: all live requests, by id.
        running: by id, in order of admission.
        waiting: ready to be admitted.
        blocked: held back by a gate of a step part, by id.
        loading: waiting for blocks that are filled between steps, by id.
        loaded: waiting requests that hold blocks which were filled, by id.
        pending_free: finished requests with blocks still read or written, by id, each with
            its unfinished transfers (LOAD, SAVE or both).
        all_fit: whether the cache has room for every request of at most `max_model_len` tokens.
        finished_outputs: last outputs of requests that ended during planning.
        unreported_finished: ids of finished requests that no plan has reported.
        unreported_preempted: ids of preempted requests that no plan has reported.
        unreported_freed_inputs: freed encoder inputs that no plan has reported.
        leaders: requests with members, by the id of each member.
        finished_ids: ids that finished since the last outputs, by client index.
        policy_hooks: names of the optional methods that the policy implements; others of these are
            not called.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context
        self.limits = context.limits
        self.cache = context.kv_cache
        self.set_policy(context.policy)
        self.requests: dict[str, SchedulerRequest] = {}
        self.running: dict[str, SchedulerRequest] = {}
        self.waiting = WaitingQueue(context.policy)
        self.blocked: dict[str, SchedulerRequest] = {}
        self.loading: dict[str, SchedulerRequest] = {}
        self.loaded: dict[str, SchedulerRequest] = {}
        self.pending_free: dict[str, tuple[SchedulerRequest, set[str]]] = {}
        self.finished_outputs: OutputsByClient = defaultdict(list)
        self.unreported_finished: set[str] = set()
        self.unreported_preempted: set[str] = set()
        self.unreported_freed_inputs: list[str] = []
        self.finished_ids: dict[int, set[str]] = {}
        self.leaders: dict[str, SchedulerRequest] = {}
        self.num_rows = 0  # of workers: running requests and their members
        self.num_preemptions = 0
        self._uncounted: Counter[str] = Counter()  # lookups that admitted nothing, by figure
        self._deadlines: list[tuple[float, int, str]] = []
        self._num_prompt_tokens = 0  # of all live requests
        longest = self.blocks_needed(self.limits.max_model_len)
        self.all_fit = longest <= self.cache.num_usable_blocks

    def set_policy(self, policy: SchedulingPolicy) -> None:
        """Use another policy from now on."""
        self.policy = policy
        self.policy_hooks = policy.overridden

    # Arrival and deadlines

    def add(self, request: SchedulerRequest) -> None:
        """Add a new request to `waiting`, or to `blocked` while a step part may hold it back."""
        gates = self.context.gates
        if "added" in self.policy_hooks:
            self.policy.added(request)
        if gates is not None and any(map(gates.holds, (request, *request.members))):
            self.blocked[request.request_id] = request
        else:
            self.waiting.push(request)
        self.requests[request.request_id] = request
        for member in request.members:
            self.leaders[member.request_id] = request
        self._num_prompt_tokens += request.num_group_prompt_tokens
        if (deadline := request.deadline) is not None:
            entry = (deadline, request.order, request.request_id)
            heapq.heappush(self._deadlines, entry)
        if self.context.log_stats:
            request.record_event(EngineCoreEventType.QUEUED, self.context.clock())

    def pop_expired(self, now: float) -> Iterator[SchedulerRequest]:
        """Yield the live requests after their deadline, each once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.order == order:
                yield request

    def has_expired(self, now: float) -> bool:
        """Return whether a deadline has passed that was not popped, of a live request or not."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    # Transitions

    def start_running(self, request: SchedulerRequest, now: float) -> None:
        """Move a request into `running`; the caller removes it from the queue."""
        self.loaded.pop(request.request_id, None)
        self.running[request.request_id] = request
        for item in (request, *request.members):
            item.status = RequestStatus.RUNNING
            self.num_rows += 1
            if self.context.gates is not None:
                self.context.gates.acquire(item)
        if self.context.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, now)

    def enqueue(self, request: SchedulerRequest) -> None:
        """Move a request from `blocked` or `loading` into `waiting`."""
        if self.blocked.pop(request.request_id, None) is None:
            del self.loading[request.request_id]
        self.waiting.push(request)

    def preempt(self, request: SchedulerRequest, now: float) -> None:
        """Free a running request's blocks and move it into `waiting`."""
        self._remove_running(request)
        for item in (request, *request.members):
            item.status = RequestStatus.PREEMPTED
            item.num_preemptions += 1
            self.unreported_preempted.add(item.request_id)
        self.num_preemptions += 1
        self.reset_progress(request)
        if "preempted" in self.policy_hooks:
            self.policy.preempted(request)
        if self.context.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, now)
        self.waiting.push(request)

    def uncache_from(self, request: SchedulerRequest, num_tokens: int) -> None:
        """Remove a request's blocks from position `num_tokens` on from the prefix cache."""
        first = num_tokens // self.cache.block_size
        tables = self.cache.block_ids(request)
        self.cache.discard(block for table in tables for block in table[first:])

    def reset_progress(self, request: SchedulerRequest) -> None:
        """Free a request's blocks and drop all computed state; it is computed again."""
        for item in (request, *request.members):
            self.cache.free(item)
            if self.context.encoder_cache is not None:
                self.context.encoder_cache.free(item)
            item.num_computed_tokens = item.num_output_placeholders = 0
            item.draft_token_ids = []
            item.num_sent_blocks = 0
        self.loaded.pop(request.request_id, None)

    def reset_last_loaded(self, keep: SchedulerRequest | None = None) -> bool:
        """Free the blocks of the newest waiting request that holds loaded ones.

        For when no other request can go on: waiting requests are never preempted otherwise.

        Args:
            keep: a request that keeps its blocks.

        Returns:
            Whether a request lost its blocks.
        """
        holders = [holder for holder in self.loaded.values() if holder is not keep]
        if not holders:
            return False
        self.reset_progress(max(holders, key=lambda holder: holder.order))
        return True

    # Finishing

    def finish(self, request: SchedulerRequest, output: EngineCoreOutput) -> None:
        """Finish a request; complete `output`, its last one."""
        request_id = request.request_id
        loading = self.loading.pop(request_id, None) is not None
        if request.status is RequestStatus.RUNNING:
            self._remove_running(request)
        elif request_id in self.blocked:
            del self.blocked[request_id]
        elif not loading:
            self.waiting.remove(request)
            self.loaded.pop(request_id, None)
        del self.requests[request_id]
        self._num_prompt_tokens -= request.num_group_prompt_tokens
        for item in (request, *request.members):
            self.unreported_finished.add(item.request_id)
            item.status = RequestStatus.FINISHED
        for member in request.members:
            del self.leaders[member.request_id]
            self.cache.free(member)
        output.trace_headers = request.source.trace_headers
        self._free_blocks(request, output, loading=loading)
        if self.context.encoder_cache is not None:
            self.context.encoder_cache.free(request)
        if self.context.report_finished:
            self.finished_ids.setdefault(request.client_index, set()).add(request_id)
        if "finished" in self.policy_hooks:
            self.policy.finished(request)  # may raise; the rest of the state is consistent by then
        request.view = None  # they refer to each other
        if len(self._deadlines) > 64 + 2 * len(self.requests):
            self._deadlines = [d for d in self._deadlines if d[2] in self.requests]
            heapq.heapify(self._deadlines)

    def finish_now(
        self,
        request: SchedulerRequest,
        reason: FinishReason,
        error: str | None = None,
        stop_reason: dict[str, Any] | None = None,
    ) -> EngineCoreOutput:
        """Finish a request without new tokens; return its last output."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            events=request.events,
        )
        self.finish(request, output)
        return output

    def finish_in_planning(
        self,
        request: SchedulerRequest,
        reason: FinishReason,
        error: str | None = None,
        stop_reason: dict[str, Any] | None = None,
    ) -> None:
        """Finish a request while a step is planned; the next `update` returns its output."""
        output = self.finish_now(request, reason, error, stop_reason)
        self.finished_outputs[request.client_index].append(output)

    def finish_if_too_long(self, request: SchedulerRequest) -> bool:
        """Finish a request that the whole cache cannot hold; return whether it was one."""
        if self.all_fit and not request.members:
            return False
        # It would be preempted for ever.
        needed, usable = self.blocks_of(request), self.cache.num_usable_blocks
        if needed <= usable:
            return False
        lookahead = self.num_lookahead(request.num_tokens)
        self.finish_in_planning(
            request,
            FinishReason.ERROR,
            f"the KV cache is too small: {sum(item.num_tokens for item in request.group)} tokens"
            f"{' of the request and its members' if request.members else ''}"
            f"{f' and {lookahead} of lookahead' if lookahead else ''} need {needed} blocks of "
            f"{self.cache.block_size} tokens, the cache has {usable}",
        )
        return True

    def for_clients(self, outputs: OutputsByClient, now: float) -> dict[int, EngineCoreOutputs]:
        """Return outputs and finished ids by client index."""
        result = {
            client: EngineCoreOutputs(outputs=client_outputs, timestamp=now)
            for client, client_outputs in outputs.items()
        }
        for client, ids in self.finished_ids.items():
            if client not in result:
                result[client] = EngineCoreOutputs(timestamp=now)
            result[client].finished_requests = ids
        self.finished_ids = {}
        return result

    # Queries

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait or are blocked."""
        return len(self.waiting) + len(self.blocked) + len(self.loading)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens of prompts that are not computed yet."""
        ready = sum(
            min(item.num_computed_tokens, item.num_prompt_tokens)
            for request in self.running.values()
            for item in request.group
        )
        return self._num_prompt_tokens - ready

    def discount(self, before: Any) -> None:
        """Leave the lookups since `before`, statistics of the cache, out of `cache_stats`."""
        after = self.cache.stats()
        for name in _LOOKUPS:
            self._uncounted[name] += getattr(after, name) - getattr(before, name)

    def cache_stats(self) -> Any:
        """Return the statistics of the cache, with lookups of admitted requests alone."""
        stats = self.cache.stats()
        counts = {name: getattr(stats, name) - self._uncounted[name] for name in _LOOKUPS}
        return msgspec.structs.replace(stats, **counts)

    def load(self, now: float, token_budget: int) -> Load:
        """Return the engine's load, as policies see it."""
        return Load(
            now=now,
            num_running=len(self.running),
            max_num_seqs=self.limits.max_num_seqs,
            num_waiting=len(self.waiting) + len(self.blocked) + len(self.loading),
            token_budget=token_budget,
            num_free_blocks=self.cache.num_free_blocks,
            num_blocks=self.cache.num_usable_blocks,
        )

    def num_lookahead(self, num_tokens: int) -> int:
        """Return the number of lookahead tokens after `num_tokens`, within `max_model_len`."""
        return min(self.limits.num_lookahead_tokens, self.limits.max_model_len - num_tokens)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens and their lookahead."""
        return self.cache.blocks_needed(num_tokens + self.num_lookahead(num_tokens))

    def blocks_of(self, request: SchedulerRequest) -> int:
        """Return the number of blocks for the known tokens of a request and of its members."""
        return sum(self.blocks_needed(item.num_tokens) for item in request.group)

    def _remove_running(self, request: SchedulerRequest) -> None:
        del self.running[request.request_id]
        for item in (request, *request.members):
            self.num_rows -= 1
            if self.context.gates is not None:
                self.context.gates.release(item)

    def _free_blocks(
        self, request: SchedulerRequest, output: EngineCoreOutput, *, loading: bool
    ) -> None:
        """Free the blocks, or keep them in `pending_free` while a step part moves them."""
        transfers = self.context.transfers
        if transfers is None:
            self.cache.free(request)
            return
        saving, params = transfers.request_finished(request, self.cache.block_ids(request))
        if params is not None:
            output.kv_transfer_params = dict(params)
        unfinished = {name for name, active in ((LOAD, loading), (SAVE, saving)) if active}
        if unfinished:
            self.pending_free[request.request_id] = (request, unfinished)
        else:
            self.cache.free(request)
