"""Synthetic load with stated statistics: the same seed gives the same requests."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint.typed import Strict, convert

from .workload import TENANT, Segment, SimulatedRequest

_OWN_IDS = 1_000_000  # the first id of texts that are no hot prefix


class Lengths(Strict):
    """Numbers of tokens: lognormal, at least 1.

    Attributes:
        median: half of them are above it.
        sigma: standard deviation of their logarithm; 0 makes all equal.
    """

    median: Annotated[int, Meta(ge=1, le=10_000_000)]
    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.0

    def draw(self, chance: random.Random) -> int:
        """Return one of them."""
        if not self.sigma:
            return self.median
        return max(1, round(chance.lognormvariate(math.log(self.median), self.sigma)))


class SyntheticLoad(Strict):
    """Conversations that begin at random times (Poisson), with prefixes that many share.

    A first prompt is a hot prefix, if it has one, and a text of its own. A later turn's prompt is
    the one before with its answer and a further text of its own. It comes some time after the one
    before, whether or not that has its answer, so that the load does not depend on the fleet.

    The load is a piece of one that has gone on for ever: conversations are open when it begins, of
    which the load has the later turns alone, and others are open when it ends. So its rate is the
    stated one from the first second on, however long conversations last.

    Attributes:
        requests: number of requests.
        rate: requests per second, in the mean.
        prompt: length of a text of one's own.
        output: length of an answer.
        hot_prefixes: number of prefixes that conversations share.
        hot_tokens: length of each of them.
        hot_share: share of the conversations that begin with one.
        zipf: the i-th of them is chosen with a probability proportional to 1 / i ** zipf.
        turns: requests of a conversation, in the mean of a geometric distribution; as many requests
            there are for each conversation that begins.
        think_seconds: time between two turns, in the mean of an exponential distribution.
        sessions: whether requests of several turns name their conversation.
        tenants: number of tenants, named in the tag `tenant` of conversations; 0 for no tag.
        tenant_zipf: exponent of the share of the i-th tenant, as `zipf` of the i-th prefix.
        priorities: number of priorities, each conversation has one of them; 1 makes all equal.
        seed: seed of all draws.
    """

    requests: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 1000
    rate: Annotated[float, Meta(gt=0)] = 10.0
    prompt: Lengths = Lengths(median=512)
    output: Lengths = Lengths(median=64)
    hot_prefixes: Annotated[int, Meta(ge=0, lt=_OWN_IDS)] = 0
    hot_tokens: Annotated[int, Meta(ge=1)] = 1024
    hot_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    zipf: Annotated[float, Meta(ge=0)] = 1.0
    turns: Annotated[float, Meta(ge=1)] = 1.0
    think_seconds: Annotated[float, Meta(gt=0)] = 10.0
    sessions: bool = True
    tenants: Annotated[int, Meta(ge=0, le=100_000)] = 0
    tenant_zipf: Annotated[float, Meta(ge=0)] = 1.0
    priorities: Annotated[int, Meta(ge=1, le=1000)] = 1
    seed: int = 0

    def generate(self) -> Iterator[SimulatedRequest]:
        """Yield the requests in the order of their times; each is made when it is asked for.

        Raises:
            ConfigError: a field is out of range; names it.
        """
        checked = convert(self, SyntheticLoad, path="synthetic")
        return itertools.islice(checked._turns(), self.requests)

    def _turns(self) -> Iterator[SimulatedRequest]:
        conversations = _Conversations(self)
        later: list[tuple[float, int, SimulatedRequest]] = []  # turns, by time

        def sent(turn: SimulatedRequest) -> SimulatedRequest:
            if not turn.is_last:
                pause = conversations.chance.expovariate(1 / self.think_seconds)
                following = conversations.go_on(turn, turn.at + pause)
                heapq.heappush(later, (following.at, following.output.id, following))
            return turn

        for at, is_new in heapq.merge(conversations.beginnings(), conversations.open_ones()):
            while later and later[0][0] <= at:
                yield sent(heapq.heappop(later)[2])
            yield sent(conversations.begin(at) if is_new else conversations.take_up(at))


class _Conversations:
    """Draws the turns of conversations, and the times of first turns.

    Attributes:
        chance: source of all draws but tenants and priorities.
    """

    def __init__(self, load: SyntheticLoad) -> None:
        self._load = load
        self.chance = random.Random(load.seed)
        self._ids, self._started = itertools.count(_OWN_IDS), itertools.count()
        self._prefixes = _zipf_sums(load.hot_prefixes, load.zipf)
        self._owners = self._drawn_owners()

    def beginnings(self) -> Iterator[tuple[float, bool]]:
        at = 0.0
        while True:
            at += self.chance.expovariate(self._load.rate / self._load.turns)
            yield at, True

    def open_ones(self) -> Iterator[tuple[float, bool]]:
        """Yield when conversations that are open at time 0 go on, and False.

        Their number is that of a queue with a server for each, in equilibrium: Poisson. The time to
        the next turn has no memory, so that the times are those of a process whose rate falls
        exponentially; `passed` has the rate 1.
        """
        load = self._load
        if mean := load.rate * (1 - 1 / load.turns) * load.think_seconds:
            passed = self.chance.expovariate(1.0)
            while passed < mean:
                yield -load.think_seconds * math.log1p(-passed / mean), False
                passed += self.chance.expovariate(1.0)

    def begin(self, at: float) -> SimulatedRequest:
        load, chance = self._load, self.chance
        prefix: tuple[Segment, ...] = ()
        if self._prefixes and chance.random() < load.hot_share:
            prefix = (Segment(_draw(self._prefixes, chance), load.hot_tokens),)
        number = next(self._started)
        return SimulatedRequest(
            at=at,
            prompt=(*prefix, Segment(next(self._ids), load.prompt.draw(chance))),
            output=Segment(next(self._ids), load.output.draw(chance)),
            session=f"s{number}" if load.sessions and load.turns > 1 else None,
            is_last=self._is_last(),
            **next(self._owners),
        )

    def go_on(self, turn: SimulatedRequest, at: float) -> SimulatedRequest:
        load, chance = self._load, self.chance
        text = Segment(next(self._ids), load.prompt.draw(chance))
        return msgspec.structs.replace(
            turn,
            at=at,
            prompt=(*turn.prompt, turn.output, text),
            output=Segment(next(self._ids), load.output.draw(chance)),
            is_last=self._is_last(),
        )

    def take_up(self, at: float) -> SimulatedRequest:
        """Return the next turn of a conversation that was open at time 0.

        The turns that it has had are distributed as those of a whole conversation.
        """
        turn = self.begin(at)
        while not turn.is_last:
            turn = self.go_on(turn, at)
        return self.go_on(turn, at)

    def _is_last(self) -> bool:
        return self._load.turns == 1 or self.chance.random() < 1 / self._load.turns

    def _drawn_owners(self) -> Iterator[dict[str, Any]]:
        load = self._load
        chance = random.Random(f"{load.seed} tenants")  # so that these change nothing else
        sums = _zipf_sums(load.tenants, load.tenant_zipf)
        while True:
            tags = {TENANT: f"t{_draw(sums, chance)}"} if sums else {}
            yield {"tags": tags, "priority": chance.randrange(load.priorities)}


def _zipf_sums(count: int, exponent: float) -> list[float]:
    """Return the running sums of 1 / i ** exponent for i from 1 to count."""
    return list(itertools.accumulate(1 / (place + 1) ** exponent for place in range(count)))


def _draw(sums: list[float], chance: random.Random) -> int:
    """Return a place, with the probability of its part of the sums."""
    return min(bisect(sums, chance.random() * sums[-1]), len(sums) - 1)
