"""Components of contract 1 in its first form, of kinds that have contract 2 now."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

from hardpoint.plugins import (
    CachedBlock,
    CachedRequests,
    ConfigError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EvictionPolicy,
    Executor,
    FinishReason,
    NewRequest,
    ReasoningContext,
    ReasoningMarkers,
    ReasoningParser,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    hookimpl,
)

SEEN: list[tuple[str, object]] = []
"""Calls of `Deepest`, and the contexts of `Thoughts`."""

COMMANDS: list[object] = []
"""Commands that `Peeking` adds."""


class Peeking:
    contract = 1

    @hookimpl
    def cli_commands(self):
        return COMMANDS


class Deepest(EvictionPolicy):
    """Evicts the deepest block; takes blocks, and has no `dropped`."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.blocks: OrderedDict[int, CachedBlock] = OrderedDict()

    def released(self, blocks):
        assert all(isinstance(block, CachedBlock) for block in blocks)
        SEEN.append(("released", [block.depth for block in blocks]))
        self.blocks.update((block.block_id, block) for block in blocks)

    def taken(self, block_ids):
        SEEN.append(("taken", len(block_ids)))
        for block_id in block_ids:
            del self.blocks[block_id]

    def evict(self, count):
        deepest = sorted(self.blocks, key=lambda block_id: -self.blocks[block_id].depth)[:count]
        for block_id in deepest:
            del self.blocks[block_id]
        return deepest


class Plain(Executor):
    """Makes its worker in `start`, returns one of its figures, and closes it unasked."""

    contract = 1

    def start(self):
        self.only = self.context.create_worker(0)
        return self.only.load_model()

    def initialize_cache(self, num_blocks):
        self.only.initialize_cache(num_blocks)

    def execute_model(self, plan):
        return done(self.only.execute_model(plan))

    def sample_tokens(self, plan, bitmask=None):
        return done(self.only.sample_tokens(plan, bitmask))

    def collective_rpc(self, method, args=(), timeout=None):
        return [getattr(self.only, method)(*args)]

    def close(self):
        self.only.close()


class Unready(Plain):
    """Does not come to make its worker."""

    contract = 1

    def start(self):
        raise ConfigError("no machine is free")


def done(value):
    future: Future[object] = Future()
    future.set_result(value)
    return future


class Thoughts(ReasoningParser):
    """Takes all before the last `=>` as reasoning."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        assert type(context) is ReasoningContext
        self.arrow = list(context.tokenizer.encode("=>", add_special_tokens=False))

    def markers(self):
        return ReasoningMarkers((), self.arrow)

    def split(self, text):
        reasoning, arrow, content = text.rpartition("=>")
        return (reasoning if arrow else None), content


class OneByOne(Scheduler):
    """Runs one request at a time, and refuses grammars."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        if context.grammars is not None:
            raise ConfigError(f"scheduler.use: {self.name} has no use for grammars")
        self.queue: list[Request] = []
        self.gone: set[str] = set()
        self.step = 0

    def add_request(self, request):
        self.queue.append(Request(request))

    def schedule(self):
        self.step += 1
        gone, self.gone = frozenset(self.gone), set()
        if not self.queue:
            return SchedulerOutput(step=self.step, finished_request_ids=gone)
        first, cache = self.queue[0], self.context.kv_cache
        new, cached, name = [], CachedRequests(), first.request_id
        count = first.num_tokens - first.num_computed_tokens
        if first.status is not RequestStatus.RUNNING:
            prefix = cache.lookup(first)
            first.num_computed_tokens = prefix.num_tokens
            first.num_cached_tokens = max(first.num_cached_tokens, prefix.num_tokens)
            count = first.num_tokens - prefix.num_tokens
            assert cache.admit(first, prefix, count)
            new = [NewRequest(first.source, (), cache.block_ids(first), prefix.num_tokens)]
            first.status = RequestStatus.RUNNING
        else:
            more = cache.extend(first, count)
            added = {name: more} if any(more) else {}
            cached = CachedRequests([name], [first.num_computed_tokens], added)
        return SchedulerOutput(
            step=self.step,
            new_requests=new,
            cached_requests=cached,
            num_scheduled_tokens={name: count},
            total_num_scheduled_tokens=count,
            num_common_prefix_blocks=cache.num_common_prefix_blocks([first]),
            finished_request_ids=gone,
        )

    def update(self, plan, result):
        if not plan.num_scheduled_tokens:
            return {}
        first = self.queue[0]
        first.num_computed_tokens = first.num_tokens
        (token,) = result.sampled_token_ids[first.request_id]
        first.append(token)
        output = EngineCoreOutput(request_id=first.request_id, new_token_ids=[token])
        if len(first.output_token_ids) == first.params.max_tokens:
            self.end(first)
            output.finish_reason = FinishReason.LENGTH
        return {first.source.client_index: EngineCoreOutputs(outputs=[output])}

    def end(self, request):
        self.queue.remove(request)
        self.context.kv_cache.free(request)
        self.gone.add(request.request_id)

    def plan_lost(self, plan):
        raise AssertionError("no plan is lost")

    def finish_requests(self, request_ids, reason):
        for request in list(self.queue):
            if request_ids is None or request.request_id in request_ids:
                self.end(request)
        return {}

    def num_unfinished_requests(self):
        return len(self.queue)

    def has_requests(self):
        return bool(self.queue or self.gone)

    def stats(self):
        return SchedulerStats(num_running=len(self.queue))
