"""Scheduling and eviction policies with one typical mistake each."""

from __future__ import annotations

import random
import time

from hypothesis import strategies as st

from hardpoint import plugins
from hardpoint.plugins import EvictionPolicy, SchedulingPolicy
from support.samples import Sample, spend


class Fcfs(Sample, SchedulingPolicy, contract=1):
    """Correct: the order of arrival."""

    def key(self, request):
        return request.arrival_time


class PolicyWithoutContract(Fcfs, contract=None):
    """States no contract of its own."""


class MixedKeys(Fcfs):
    def key(self, request):
        return request.params.max_tokens


class NanKeys(Fcfs):
    def key(self, request):
        return float("nan") if request.priority else request.arrival_time


class KeysFromClock(Fcfs):
    def key(self, request):
        return time.perf_counter_ns()


class DeniesPriority(Fcfs):
    uses_priority = False

    def key(self, request):
        return request.priority, request.arrival_time


class RandomKeys(Fcfs):
    def key(self, request):
        return random.random()


class KeysByCalls(Fcfs):
    calls = 0

    def key(self, request):
        self.calls += 1
        return -self.calls


class KeyFails(Fcfs):
    def key(self, request):
        return request.tags["tenant"]


class ListsAsGroups(Fcfs):
    def group(self, request):
        return [request.priority]


class RandomGroupKeys(Fcfs):
    def group(self, request):
        return request.priority

    def group_key(self, group, now):
        return random.random()


class NoVictim(Fcfs):
    def victim(self, running, load):
        return None


class RandomVictim(Fcfs):
    def victim(self, running, load):
        return random.choice(running)


class PopsVictims(Fcfs):
    def victim(self, running, load):
        return running.pop()


class AdmitsNone(Fcfs):
    def admit(self, request, load):
        return "not today"


class AdmitsFalse(Fcfs):
    def admit(self, request, load):
        return None if load.num_running else False


class WritesRequest(Fcfs):
    def scheduled(self, request, tokens):
        request.priority -= 1


class Hoards(Fcfs):
    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def added(self, request):
        self.seen.append(request.request_id)


class SlowKeys(Fcfs):
    def key(self, request):
        spend(0.0005)
        return request.arrival_time


class ForgetsState(Fcfs):
    state_format = "tokens by priority"

    def __init__(self, context):
        super().__init__(context)
        self.had = {}

    def group(self, request):
        return request.priority

    def group_key(self, group, now):
        return self.had.get(group, 0)

    def scheduled(self, request, tokens):
        self.had[request.priority] = self.had.get(request.priority, 0) + tokens

    def export_state(self):
        return []


class ExportsItself(ForgetsState):
    def export_state(self):
        return self


class ImportFails(Fcfs):
    state_format = "nothing"

    def import_state(self, state):
        raise KeyError("had")


class Oldest(Sample, EvictionPolicy, contract=1):
    """Correct: in the order of release."""

    def __init__(self, context):
        super().__init__(context)
        self.order = {}

    def released(self, block_ids):
        for block in block_ids:
            self.order[block] = self.context.blocks.depth(block)

    def taken(self, block_ids):
        for block in block_ids:
            del self.order[block]

    def dropped(self, block_ids):
        for block in block_ids:
            del self.order[block]

    def evict(self, count):
        chosen = list(self.order)[:count]
        for block in chosen:
            del self.order[block]
        return chosen


class EvictionWithoutContract(Oldest, contract=None):
    """States no contract of its own."""


class EvictsTakenBlocks(Oldest):
    def taken(self, block_ids):
        pass

    def evict(self, count):
        chosen = list(self.order)[:count]
        for block in chosen:
            del self.order[block]
        return chosen


class EvictsDroppedBlocks(Oldest):
    def dropped(self, block_ids):
        pass


class EvictsTwice(Oldest):
    def evict(self, count):
        chosen = super().evict(count)
        return chosen[:-1] + chosen[:1]


class EvictsTooFew(Oldest):
    def evict(self, count):
        return super().evict(count)[:3]


class EvictsTooMany(Oldest):
    def evict(self, count):
        return super().evict(count + 1)


class RaisesOnDepth(Oldest):
    def released(self, block_ids):
        super().released(block_ids)
        if any(self.context.blocks.depth(block) > 3 for block in block_ids):
            raise IndexError("depth")


class EvictsNothing(Oldest):
    def evict(self, count):
        super().evict(count)


class KeepsOne(Oldest):
    def evict(self, count):
        if len(self.order) == count == 1:
            raise LookupError("the last one stays")
        return super().evict(count)


class RemembersAll(Oldest):
    def __init__(self, context):
        super().__init__(context)
        self.history = []

    def evict(self, count):
        chosen = super().evict(count)
        self.history += chosen
        return chosen


class RemembersHashes(Oldest):
    """A queue of ghosts without a bound."""

    def __init__(self, context):
        super().__init__(context)
        self.ghosts = {}

    def evict(self, count):
        chosen = super().evict(count)
        self.ghosts |= {self.context.blocks.hash(block): None for block in chosen}
        return chosen


class RemembersBlockIds(Oldest):
    """Evicts blocks first that were evicted before, remembered by number only."""

    def __init__(self, context):
        super().__init__(context)
        self.seen = set()

    def evict(self, count):
        chosen = sorted(self.order, key=lambda block: block not in self.seen)[:count]
        self.seen |= set(chosen)
        self.dropped(chosen)
        return chosen


class LowestBlockId(Oldest):
    def evict(self, count):
        chosen = sorted(self.order)[:count]
        self.dropped(chosen)
        return chosen


class AsksLate(Oldest):
    def evict(self, count):
        hits = self.context.history().hits
        chosen = sorted(self.order, key=hits)[:count]
        self.dropped(chosen)
        return chosen


class SortsAll(Oldest):
    def evict(self, count):
        spend(1e-7 * len(self.order))
        return super().evict(count)


class OneKindOnly(Fcfs):
    class Arguments(plugins.Arguments):
        kind: str = "batch"

    ARGUMENTS = st.builds(Arguments, kind=st.sampled_from(["chat", "batch"]))

    def key(self, request):
        return {"batch": 1}[request.arguments.kind]


class PrepareFails(OneKindOnly):
    @classmethod
    def prepare(cls, arguments, context):
        return arguments.kind + 1


class NeedsAnArgument(Fcfs):
    class Arguments(plugins.Arguments):
        kind: str
