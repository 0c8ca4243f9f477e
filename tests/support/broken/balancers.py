"""Load balancers with one mistake each, and a right one."""

from __future__ import annotations

import random

from hardpoint.plugins import LoadBalancer
from support.samples import Sample, spend


class Fewest(Sample, LoadBalancer, contract=1):
    """Right: the fewest requests in flight, then the session's engine, then the next in turn."""

    def __init__(self, context):
        super().__init__(context)
        self.turn = 0

    def choose(self, request, engines):
        self.turn += 1
        return min(range(len(engines)), key=lambda place: self.cost(request, engines, place))

    def cost(self, request, engines, place):
        engine = engines[place]
        late = (place - self.turn) % len(engines)
        return engine.in_flight, not engine.has_session(request), late


class NoContract(Fewest, contract=None):
    pass


class ReturnsRanks(Fewest):
    def choose(self, request, engines):
        return engines[super().choose(request, engines)].rank


class ReturnsNothing(Fewest):
    def choose(self, request, engines):
        super().choose(request, engines)


class ReturnsEngines(Fewest):
    def choose(self, request, engines):
        return engines[super().choose(request, engines)]


class ReturnsBool(Fewest):
    def choose(self, request, engines):
        return engines[1].in_flight < engines[0].in_flight


class CountsBackwards(Fewest):
    def choose(self, request, engines):
        return super().choose(request, engines) - len(engines)


class NeedsTags(Fewest):
    def choose(self, request, engines):
        return hash(request.tags["shard"]) % len(engines)


class WritesRequest(Fewest):
    def choose(self, request, engines):
        place = super().choose(request, engines)
        request.data_parallel_rank = engines[place].rank
        return place


class CountsForItself(Fewest):
    def choose(self, request, engines):
        place = super().choose(request, engines)
        engines[place].in_flight += 1
        return place


class Sorts(Fewest):
    def choose(self, request, engines):
        engines.sort(key=lambda engine: engine.in_flight)
        return 0


class FillsTheFirst(Fewest):
    def choose(self, request, engines):
        has_room = (place for place, engine in enumerate(engines) if engine.in_flight < 40)
        return next(has_room, 0)


class LovesPrefixes(Fewest):
    uses_cached_prefixes = True

    def cost(self, request, engines, place):
        cached = engines[place].cached_prefix_tokens(request)
        return -cached, *super().cost(request, engines, place)


class UsesTwo(Fewest):
    def cost(self, request, engines, place):
        return place > 1, *super().cost(request, engines, place)


class TrustsStatistics(Fewest):
    def cost(self, request, engines, place):
        engine = engines[place]
        waiting = 4 * engine.num_waiting + engine.num_running
        return waiting, *super().cost(request, engines, place)


class TakesTurns(Fewest):
    def choose(self, request, engines):
        self.turn += 1
        return self.turn % len(engines)


class RemembersPlaces(Fewest):
    def __init__(self, context):
        super().__init__(context)
        self.places = {}

    def choose(self, request, engines):
        place = super().choose(request, engines)
        if request.retention is None:
            return place
        return min(self.places.setdefault(request.retention.session, place), len(engines) - 1)


class CountsOnce(Fewest):
    def choose(self, request, engines):
        self.turn += 1
        return self.turn % self.context.num_engines


class KnowsTheFirst(Fewest):
    known = None

    def choose(self, request, engines):
        self.known = self.known or {engine.rank for engine in engines}
        return super().choose(request, engines)

    def cost(self, request, engines, place):
        is_new = engines[place].rank not in self.known
        return is_new, *super().cost(request, engines, place)


class Draws(Fewest):
    def cost(self, request, engines, place):
        return engines[place].in_flight, random.random()


class SharesTurns(Fewest):
    turns = [0]

    def choose(self, request, engines):
        self.turns[0] += 1
        return self.turns[0] % len(engines)


class RemembersSessions(Fewest):
    def __init__(self, context):
        super().__init__(context)
        self.ranks = {}

    def choose(self, request, engines):
        place = super().choose(request, engines)
        if request.retention is not None:
            self.ranks[request.retention.session] = engines[place].rank
        return place


class Slow(Fewest):
    def cost(self, request, engines, place):
        spend(1e-6 * len(engines))
        return super().cost(request, engines, place)
