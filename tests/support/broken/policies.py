"""Scheduling and eviction policies with one typical mistake each."""

from __future__ import annotations

import random
import time

from hypothesis import strategies as st

from hardpoint import plugins
from hardpoint.plugins import EvictionPolicy, SchedulingPolicy


class Fcfs(SchedulingPolicy):
    """Correct: the order of arrival."""

    contract = 1

    def key(self, request):
        return request.arrival_time


class PolicyWithoutContract(Fcfs):
    """States no contract of its own."""


class MixedKeys(Fcfs):
    contract = 1

    def key(self, request):
        return request.params.max_tokens


class NanKeys(Fcfs):
    contract = 1

    def key(self, request):
        return float("nan") if request.priority else request.arrival_time


class KeysFromClock(Fcfs):
    contract = 1

    def key(self, request):
        return time.perf_counter_ns()


class DeniesPriority(Fcfs):
    contract = 1
    uses_priority = False

    def key(self, request):
        return request.priority, request.arrival_time


class RandomKeys(Fcfs):
    contract = 1

    def key(self, request):
        return random.random()


class KeysByCalls(Fcfs):
    contract = 1
    calls = 0

    def key(self, request):
        self.calls += 1
        return -self.calls


class KeyFails(Fcfs):
    contract = 1

    def key(self, request):
        return request.tags["tenant"]


class ListsAsGroups(Fcfs):
    contract = 1

    def group(self, request):
        return [request.priority]


class RandomGroupKeys(Fcfs):
    contract = 1

    def group(self, request):
        return request.priority

    def group_key(self, group, now):
        return random.random()


class NoVictim(Fcfs):
    contract = 1

    def victim(self, running, load):
        return None


class RandomVictim(Fcfs):
    contract = 1

    def victim(self, running, load):
        return random.choice(running)


class PopsVictims(Fcfs):
    contract = 1

    def victim(self, running, load):
        return running.pop()


class AdmitsNone(Fcfs):
    contract = 1

    def admit(self, request, load):
        return "not today"


class AdmitsFalse(Fcfs):
    contract = 1

    def admit(self, request, load):
        return None if load.num_running else False


class WritesRequest(Fcfs):
    contract = 1

    def scheduled(self, request, tokens):
        request.priority -= 1


class Hoards(Fcfs):
    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def added(self, request):
        self.seen.append(request.request_id)


class SlowKeys(Fcfs):
    contract = 1

    def key(self, request):
        return sum(range(40_000)) * 0 + request.arrival_time


class ForgetsState(Fcfs):
    contract = 1
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
    contract = 1

    def export_state(self):
        return self


class ImportFails(Fcfs):
    contract = 1
    state_format = "nothing"

    def import_state(self, state):
        raise KeyError("had")


class Oldest(EvictionPolicy):
    """Correct: in the order of release."""

    contract = 1

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


class EvictionWithoutContract(Oldest):
    """States no contract of its own."""


class EvictsTakenBlocks(Oldest):
    contract = 1

    def taken(self, block_ids):
        pass

    def evict(self, count):
        chosen = list(self.order)[:count]
        for block in chosen:
            del self.order[block]
        return chosen


class EvictsDroppedBlocks(Oldest):
    contract = 1

    def dropped(self, block_ids):
        pass


class EvictsTwice(Oldest):
    contract = 1

    def evict(self, count):
        chosen = super().evict(count)
        return chosen[:-1] + chosen[:1]


class EvictsTooFew(Oldest):
    contract = 1

    def evict(self, count):
        return super().evict(count)[:3]


class EvictsTooMany(Oldest):
    contract = 1

    def evict(self, count):
        return super().evict(count + 1)


class RaisesOnDepth(Oldest):
    contract = 1

    def released(self, block_ids):
        super().released(block_ids)
        if any(self.context.blocks.depth(block) > 3 for block in block_ids):
            raise IndexError("depth")


class EvictsNothing(Oldest):
    contract = 1

    def evict(self, count):
        super().evict(count)


class KeepsOne(Oldest):
    contract = 1

    def evict(self, count):
        if len(self.order) == count == 1:
            raise LookupError("the last one stays")
        return super().evict(count)


class RemembersAll(Oldest):
    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.history = []

    def evict(self, count):
        chosen = super().evict(count)
        self.history += chosen
        return chosen


class RemembersHashes(Oldest):
    """A queue of ghosts without a bound."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.ghosts = {}

    def evict(self, count):
        chosen = super().evict(count)
        self.ghosts |= {self.context.blocks.hash(block): None for block in chosen}
        return chosen


class RemembersBlockIds(Oldest):
    """Evicts those first that were evicted before, of which it knows no more than the number."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.seen = set()

    def evict(self, count):
        chosen = sorted(self.order, key=lambda block: block not in self.seen)[:count]
        self.seen |= set(chosen)
        self.dropped(chosen)
        return chosen


class LowestBlockId(Oldest):
    contract = 1

    def evict(self, count):
        chosen = sorted(self.order)[:count]
        self.dropped(chosen)
        return chosen


class AsksLate(Oldest):
    contract = 1

    def evict(self, count):
        hits = self.context.history().hits
        chosen = sorted(self.order, key=hits)[:count]
        self.dropped(chosen)
        return chosen


class SortsAll(Oldest):
    contract = 1

    def evict(self, count):
        chosen = sorted(self.order, key=lambda block: -self.order[block])[:count]
        self.taken(chosen)
        return chosen


class OneKindOnly(Fcfs):
    contract = 1

    class Arguments(plugins.Arguments):
        kind: str = "batch"

    ARGUMENTS = st.builds(Arguments, kind=st.sampled_from(["chat", "batch"]))

    def key(self, request):
        return {"batch": 1}[request.arguments.kind]


class PrepareFails(OneKindOnly):
    contract = 1

    @classmethod
    def prepare(cls, arguments, context):
        return arguments.kind + 1


class NeedsAnArgument(Fcfs):
    contract = 1

    class Arguments(plugins.Arguments):
        kind: str
