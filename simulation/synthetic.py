"""Synthetic load with stated statistics: the same seed gives the same requests."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterator
from typing import Annotated, Any

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

    Attributes:
        requests: number of requests.
        rate: requests per second, in the mean.
        prompt: length of a text of one's own.
        output: length of an answer.
        hot_prefixes: number of prefixes that conversations share.
        hot_tokens: length of each of them.
        hot_share: share of the conversations that begin with one.
        zipf: the i-th of them is chosen with a probability proportional to 1 / i ** zipf.
        turns: requests of a conversation, in the mean of a geometric distribution.
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
        """Yield requests without end."""
        chance, own = random.Random(self.seed), itertools.count(_OWN_IDS)
        sums = _zipf_sums(self.hot_prefixes, self.zipf)
        owners = self._owners()
        later: list[tuple[float, int, SimulatedRequest]] = []  # turns, by time
        started, at = 0, 0.0
        while True:
            at += chance.expovariate(self.rate / self.turns)
            while later and later[0][0] <= at:
                turn = heapq.heappop(later)[2]
                self._plan_next(chance, own, turn, later)
                yield turn
            prefix: tuple[Segment, ...] = ()
            if sums and chance.random() < self.hot_share:
                prefix = (Segment(_draw(sums, chance), self.hot_tokens),)
            first = SimulatedRequest(
                at=at,
                prompt=(*prefix, Segment(next(own), self.prompt.draw(chance))),
                output=Segment(next(own), self.output.draw(chance)),
                session=f"s{started}" if self.sessions and self.turns > 1 else None,
                **next(owners),
            )
            started += 1
            self._plan_next(chance, own, first, later)
            yield first

    def _owners(self) -> Iterator[dict[str, Any]]:
        """Yield tags and priority of each conversation."""
        chance = random.Random(f"{self.seed} tenants")  # so that these change nothing else
        sums = _zipf_sums(self.tenants, self.tenant_zipf)
        while True:
            tags = {TENANT: f"t{_draw(sums, chance)}"} if sums else {}
            yield {"tags": tags, "priority": chance.randrange(self.priorities)}

    def _plan_next(
        self,
        chance: random.Random,
        own: Iterator[int],
        turn: SimulatedRequest,
        later: list[tuple[float, int, SimulatedRequest]],
    ) -> None:
        """Add the turn after one to `later`, if there is one."""
        if self.turns == 1 or chance.random() < 1 / self.turns:
            return
        text = Segment(next(own), self.prompt.draw(chance))
        following = SimulatedRequest(
            at=turn.at + chance.expovariate(1 / self.think_seconds),
            prompt=(*turn.prompt, turn.output, text),
            output=Segment(next(own), self.output.draw(chance)),
            session=turn.session,
            tags=turn.tags,
            priority=turn.priority,
        )
        heapq.heappush(later, (following.at, text.id, following))


def _zipf_sums(count: int, exponent: float) -> list[float]:
    """Return the running sums of 1 / i ** exponent for i from 1 to count."""
    return list(itertools.accumulate(1 / (place + 1) ** exponent for place in range(count)))


def _draw(sums: list[float], chance: random.Random) -> int:
    """Return a place, with the probability of its part of the sums."""
    return min(bisect(sums, chance.random() * sums[-1]), len(sums) - 1)
