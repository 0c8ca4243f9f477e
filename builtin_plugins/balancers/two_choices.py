"""Two choices: the better of two engines at random, in a time that does not grow with them."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated

from hardpoint.plugins import BalancerContext, EngineCoreRequest, EngineView, LoadBalancer, Meta

from .load import LoadOptions

_rank = attrgetter("rank")


class TwoChoices(LoadBalancer):
    """Take the one of two engines drawn at random that has less load, or the session's engine.

    The load of an engine is

        pending_prompt_tokens + in_flight_tokens * in_flight

    A request of a session stays at the engine of the one before it as long as

        load(its engine) - min(tokens of that prompt, tokens of this one) <= load(the better one)

    for a conversation's prompt begins with the one before, which that engine has computed. With n
    engines and as many requests, the fullest engine has log(log(n)) / log(2) + O(1) of them; one
    choice at random gives log(n) / log(log(n)).

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE Transactions
    on Parallel and Distributed Systems 12(10), 2001.
    """

    contract = 1
    conformance_suite = "hardpoint.testing.checking.builtin_suites:TwoChoicesSuite"

    class Options(LoadOptions):
        """Weights of the load, and the size of the memory.

        Attributes:
            seed: seed of the draws.
            sessions: number of sessions with a remembered engine; the most recently used ones stay.
        """

        seed: int = 0
        sessions: Annotated[int, Meta(ge=0, le=10_000_000)] = 65_536

    options: Options

    def __init__(self, context: BalancerContext) -> None:
        super().__init__(context)
        self._per_request = self.options.in_flight_tokens
        self._draw = random.Random(self.options.seed).random
        self._sessions: dict[str, tuple[int, int]] = {}  # rank, length of the last prompt

    def choose(self, request: EngineCoreRequest, engines: Sequence[EngineView]) -> int:
        """Return the index of the engine: two random ones and the engine of the session compete."""
        num_engines, draw = len(engines), self._draw
        chosen, other = int(draw() * num_engines), int(draw() * (num_engines - 1))
        other += other >= chosen
        load, others_load = self._load(engines[chosen]), self._load(engines[other])
        if others_load < load:
            chosen, load = other, others_load
        if request.retention is None or not self.options.sessions:
            return chosen
        return self._of_session(request.retention.session, request, engines, chosen, load)

    def _load(self, engine: EngineView) -> int:
        return engine.pending_prompt_tokens + self._per_request * engine.in_flight

    def _of_session(
        self,
        session: str,
        request: EngineCoreRequest,
        engines: Sequence[EngineView],
        place: int,
        load: int,
    ) -> int:
        """Return the place of a session's engine, or else the given one; remember it."""
        length = len(request.prompt_token_ids)
        rank, known = self._sessions.pop(session, (-1, 0))
        last_index = _place_of(rank, engines)
        if (
            last_index is not None
            and self._load(engines[last_index]) - min(known, length) <= load
            and engines[last_index].has_session(request)
        ):
            place = last_index
        self._sessions[session] = (engines[place].rank, length)
        if len(self._sessions) > self.options.sessions:
            del self._sessions[next(iter(self._sessions))]
        return place


def _place_of(rank: int, engines: Sequence[EngineView]) -> int | None:
    if rank < 0:
        return None
    place = min(rank, len(engines) - 1)
    if engines[place].rank != rank:  # others are missing
        place = bisect_left(engines, rank, hi=place, key=_rank)
    return place if engines[place].rank == rank else None
