"""Schedulers with one typical mistake each."""

from __future__ import annotations

import dataclasses

import msgspec

from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.plugins import (
    CachedRequests,
    EngineCoreOutputs,
    Request,
    RequestError,
)
from hardpoint.plugins.requests import LoRARequest
from support.samples import Sample

POET = LoRARequest("poet", 1)


class Override:
    """Forwards to another object, except for a few attributes of its own."""

    def __init__(self, inner, **attributes):
        self._inner = inner
        self.__dict__ |= attributes

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Default(Sample, DefaultScheduler, contract=1):
    """Correct."""


class WithLimits(Default):
    """Schedules with other limits than the given ones, which its records hide."""

    def __init__(self, context):
        limits, budget = context.limits, context.limits.max_num_batched_tokens

        def record(step_record):
            context.record(msgspec.structs.replace(step_record, token_budget=budget))

        limits = dataclasses.replace(limits, **self.wrong(limits))
        super().__init__(dataclasses.replace(context, limits=limits, record=record))


class NoContract(DefaultScheduler):
    """States no contract of its own."""


class OverBudget(WithLimits):
    def wrong(self, limits):
        return {"max_num_batched_tokens": limits.max_num_batched_tokens + 3}


class TooManyRun(WithLimits):
    def wrong(self, limits):
        return {"max_num_seqs": limits.max_num_seqs + 1}


class SplitsPrompts(WithLimits):
    def wrong(self, limits):
        return {"chunked_prefill": True, "long_prefill_token_threshold": 2}


class EncodesTooMuch(WithLimits):
    def wrong(self, limits):
        return {"max_encoder_tokens": 3 * limits.max_encoder_tokens}


class AcceptsTooMany(WithLimits):
    def wrong(self, limits):
        return {"max_waiting": None}


class AcceptsTooManyTokens(WithLimits):
    def wrong(self, limits):
        return {"max_waiting_tokens": None}


class AcceptsTooLong(WithLimits):
    def wrong(self, limits):
        return {"max_model_len": limits.max_model_len + 1}


class WithCache(Default):
    """Has a KV cache manager with overridden methods."""

    def __init__(self, context):
        self.cache = Override(context.kv_cache)
        super().__init__(dataclasses.replace(context, kv_cache=self.cache))
        self.change(context.kv_cache)


class LeaksOnAbort(WithCache):
    def change(self, cache):
        self.cache.free = lambda request: None if self.aborting else cache.free(request)

    aborting = False

    def finish_requests(self, request_ids, reason):
        self.aborting = True
        try:
            return super().finish_requests(request_ids, reason)
        finally:
            self.aborting = False


class FreesTwice(WithCache):
    def change(self, cache):
        pool = cache.inner.pool

        def free(request):
            blocks = [block for table in cache.block_ids(request) for block in table]
            cache.free(request)
            pool.empty += blocks[:1]

        self.cache.free = free


class MixesSalts(WithCache):
    def change(self, cache):
        def lookup(request):
            name = f"{request.request_id} without salt {request.num_tokens}"
            source = msgspec.structs.replace(request.source, cache_salt=None, request_id=name)
            plain = Request(source)
            for token in request.output_token_ids:
                plain.append(token)
            return cache.lookup(plain)

        self.cache.lookup = lookup


class MixesAdapters(WithCache):
    def change(self, cache):
        def lookup(request):
            name = f"{request.request_id} with another adapter {request.num_tokens}"
            other = LoRARequest("cook", 2) if request.source.lora == POET else POET
            source = msgspec.structs.replace(request.source, lora=other, request_id=name)
            plain = Request(source)
            for token in request.output_token_ids:
                plain.append(token)
            return cache.lookup(plain)

        self.cache.lookup = lookup


class Starves(WithCache):
    def change(self, cache):
        def admit(request, *args, **named):
            return request.order != 1 and cache.admit(request, *args, **named)

        self.cache.admit = admit


class LeavesPromptsNoTime(WithCache, contract=2):
    def change(self, cache):
        def admit(*args, **named):
            cost = self.context.step_cost().milliseconds(prompts=1, prompt_tokens=1)
            limit = self.context.limits.step_milliseconds
            return not 0 < limit < cost and cache.admit(*args, **named)

        self.cache.admit = admit


class ForgetsToRewind(WithCache):
    def change(self, cache):
        self.cache.rewind = lambda request, num_tokens: None
        self.cache.discard = lambda block_ids: None
        self.cache.reset = lambda: None


class ChangesPlans(Default):
    """Returns another plan than it scheduled."""

    def schedule(self):
        return msgspec.structs.replace(plan := super().schedule(), **self.wrong(plan))


class KeepsVictims(ChangesPlans):
    def wrong(self, plan):
        victims = [name for name in plan.preempted_request_ids if self.live_request(name)]
        victims = [name for name in victims if name not in plan.num_scheduled_tokens]
        cached = plan.cached_requests
        return {
            "cached_requests": CachedRequests(
                [*cached.request_ids, *victims],
                [*cached.num_computed_tokens, *[1] * len(victims)],
                cached.new_block_ids,
            ),
            "num_scheduled_tokens": plan.num_scheduled_tokens | dict.fromkeys(victims, 1),
            "total_num_scheduled_tokens": plan.total_num_scheduled_tokens + len(victims),
        }


class HidesVictims(ChangesPlans):
    def wrong(self, plan):
        return {"preempted_request_ids": frozenset()}


class RepeatsFinished(ChangesPlans):
    before = frozenset()

    def wrong(self, plan):
        ends = plan.finished_request_ids | self.before
        self.before = plan.finished_request_ids
        return {"finished_request_ids": ends}


class SkipsPositions(ChangesPlans):
    def wrong(self, plan):
        cached = plan.cached_requests
        computed = [tokens + (tokens > 5) for tokens in cached.num_computed_tokens]
        return {"cached_requests": msgspec.structs.replace(cached, num_computed_tokens=computed)}


class MisCounts(ChangesPlans):
    def wrong(self, plan):
        return {"total_num_scheduled_tokens": len(plan.num_scheduled_tokens)}


class SchedulesNothing(ChangesPlans):
    def wrong(self, plan):
        return {"num_scheduled_tokens": plan.num_scheduled_tokens | {"unknown": 0}}


class RepeatsDrafts(ChangesPlans):
    before = {}

    def wrong(self, plan):
        drafts = {
            name: self.before.get(name, drafts) for name, drafts in plan.draft_token_ids.items()
        }
        self.before = {**self.before, **plan.draft_token_ids}
        return {"draft_token_ids": drafts}


class HidesBlocks(ChangesPlans):
    def wrong(self, plan):
        cached = msgspec.structs.replace(plan.cached_requests, new_block_ids={})
        return {"cached_requests": cached}


class ChangesResults(Default):
    """Processes another result than the given one."""

    def update(self, plan, result):
        return super().update(plan, dataclasses.replace(result, **self.wrong(plan, result)))


class AcceptsAllDrafts(ChangesResults):
    def wrong(self, plan, result):
        sampled = {
            name: [*plan.draft_token_ids.get(name, ()), tokens[-1]]
            for name, tokens in result.sampled_token_ids.items()
        }
        return {"sampled_token_ids": sampled}


class TrustsFailedLoads(ChangesResults):
    def wrong(self, plan, result):
        return {"invalid_block_ids": frozenset()}


class DropsLateResults(ChangesResults):
    def wrong(self, plan, result):
        late = plan.step < self.newest
        return {"sampled_token_ids": {} if late else result.sampled_token_ids}

    def schedule(self):
        plan = super().schedule()
        self.newest = plan.step
        return plan


class ForgetsFaults(ChangesResults):
    def wrong(self, plan, result):
        return {"faults": {}}


class OneClient(Default):
    def update(self, plan, result):
        outputs = EngineCoreOutputs()
        for client_outputs in super().update(plan, result).values():
            outputs.outputs += client_outputs.outputs
            outputs.finished_requests = client_outputs.finished_requests
        return {0: outputs}


class RepeatsOutputs(Default):
    def update(self, plan, result):
        by_client = super().update(plan, result)
        for outputs in by_client.values():
            outputs.outputs += [output for output in outputs.outputs if output.finished]
        return by_client


class ForgetsBegun(Default):
    """Begins forks without the outputs that they come with."""

    def add_request(self, request):
        super().add_request(msgspec.structs.replace(request, resumed=None))


class SendsBegun(Default):
    """Sends the outputs that forks come with as new ones."""

    def add_request(self, request):
        super().add_request(request)
        self.begun = {**getattr(self, "begun", {}), request.request_id: request.resumed}

    def update(self, plan, result):
        by_client = super().update(plan, result)
        for outputs in by_client.values():
            for output in outputs.outputs:
                resumed = self.begun.pop(output.request_id, None)
                if resumed is not None and output.new_token_ids:
                    output.new_token_ids = [*resumed.output_token_ids, *output.new_token_ids]
        return by_client


class FrozenClock(Default):
    def __init__(self, context):
        super().__init__(dataclasses.replace(context, clock=lambda: 0.0))


class NeverWaits(Default):
    def why_waiting(self, request_id):
        super().why_waiting(request_id)


class KeepsNoRecord(Default):
    def __init__(self, context):
        super().__init__(dataclasses.replace(context, record=None))


class RecordsLate(Default):
    def __init__(self, context):
        self.record = context.record
        super().__init__(dataclasses.replace(context, record=self.note))

    last = None

    def note(self, record):
        self.record(self.last or record)
        self.last = record


class AbortNeedsToken(Default):
    def finish_requests(self, request_ids, reason):
        by_client = super().finish_requests(request_ids, reason)
        by_client[0].outputs[0].new_token_ids[0]
        return by_client


class ForgetsLostPlans(ChangesPlans):
    lost = frozenset()

    def plan_lost(self, plan):
        self.lost |= plan.finished_request_ids
        super().plan_lost(plan)

    def wrong(self, plan):
        return {"finished_request_ids": plan.finished_request_ids - self.lost}


class KeepsComputed(Default):
    def reset_prefix_cache(self, *, recompute_running=False):
        super().reset_prefix_cache()


class HidesAdded(Default):
    def set_policy(self, policy):
        super().set_policy(Override(policy, added=lambda request: None))


class IgnoresReady(Default):
    def __init__(self, context):
        gates = context.gates
        if gates is not None:
            gates = Override(gates, wait_reason=lambda request: None)
        super().__init__(dataclasses.replace(context, gates=gates))


class Picky(Default):
    def add_request(self, request):
        if request.params.max_tokens == 3:
            raise RequestError("max_tokens: expected anything but 3")
        super().add_request(request)


class MisCountsLive(Default):
    def num_unfinished_requests(self):
        return min(super().num_unfinished_requests(), 2)


class HidesReleases(Default):
    def schedule(self):
        plan = super().schedule()
        cached = msgspec.structs.replace(plan.cached_requests, released_columns={})
        return msgspec.structs.replace(plan, cached_requests=cached)


class Limitless(Default, contract=2):
    """Does not declare the limit of waiting tokens."""

    limits_waiting_tokens = False


class SplitsGroups(Default, contract=2):
    """Runs members as requests of their own."""

    def add_request(self, request):
        for members in request.members.values():
            for member in members:
                super().add_request(member)
        super().add_request(msgspec.structs.replace(request, members={}))


class ForgetsMembers(Default, contract=2):
    """Does not report the ends of members to workers."""

    def schedule(self):
        plan = super().schedule()
        ended = frozenset(name for name in plan.finished_request_ids if "/" not in name)
        return msgspec.structs.replace(plan, finished_request_ids=ended)


class WithoutReleases(Default, contract=2):
    """Does not declare that it ends steps at releases."""

    releases_blocks = False
