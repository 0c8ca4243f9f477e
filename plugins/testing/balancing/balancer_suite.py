"""The conformance suite for load balancers; the built-in ones pass it too."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import BalancerContext, EngineCoreRequest, LoadBalancer
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import GeneralComponentSuite, LiveComponentSuite
from hardpoint.testing.declared import declared_result
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.pace import cpu_cost
from hardpoint.testing.scripted import ScriptedClock
from hardpoint.testing.snapshots import snapshot, without_growth
from hardpoint.testing.suite import Rule, Violation, checks

from .engines import ScriptedEngine, ScriptedEngines, scripted_request

INDEX = Rule(
    "index: choose returns an index of `engines`, whichever there are",
    "return the place in `engines`, not the engine's rank, and ask len(engines) in each call",
)
READS_ONLY = Rule(
    "reads only: a balancer changes neither the request nor the engines",
    "work on copies: they are the client's",
)
STARVES = Rule(
    "starves: of different prompts, no engine gets less than a quarter of its share",
    "let the load decide where nothing speaks for an engine, and take turns between equal ones",
)
PINS = Rule(
    "pins: requests with one prefix leave no engine with more than twice its share of the load",
    "weigh the tokens of a cached prefix against in_flight and pending_prompt_tokens",
)
STALE = Rule(
    "stale: while statistics do not change, no engine gets more than twice its share, and 16",
    "take in_flight into the load, which is exact; the statistics of an engine may be old",
)
AFFINITY = Rule(
    "affinity: while all engines have the same load, the requests of a session stay together",
    "ask cached_prefix_tokens or has_session before you take turns; remember ranks, not places",
)
CHANGES = Rule(
    "changes: engines that go and come are no fault, and new ones get at least a quarter of theirs",
    "keep nothing of `engines` between calls but ranks",
)
REPEATABLE = Rule(
    "repeatable: two instances with the same options choose the same in the same calls",
    "draw from a generator of the instance with a seed, not from random, time or hash()",
)
INSTANCES = Rule(
    "instances: the choices of one balancer do not depend on another",
    "keep state in self, not in the class or the module",
)

_PREFIX = 1024  # tokens
_BURST = 128  # requests
_IN_TURN = 200  # decisions between two readings of a clock


class LoadBalancerSuite(GeneralComponentSuite, LiveComponentSuite):
    """Base class of a test class, which sets `balancer`, and `options` if it has some.

    Attributes:
        balancer: the class under test.
        keeps_sessions: whether the requests of a session stay at an engine.
        budget_us: maximum microseconds of a decision among `budget_engines`; None does not measure.
        budget_engines: number of engines of that measurement.
    """

    kind = "balancers"
    balancer: ClassVar[type[LoadBalancer]]
    keeps_sessions: ClassVar[bool] = True
    budget_us: ClassVar[float | None] = 100.0
    budget_engines: ClassVar[int] = 64

    def fields(self, user: str) -> Mapping[str, Any]:
        """Return the fields of a user's requests; override it for a balancer that reads others."""
        return {"tags": {"tenant": user}}

    def _component(self) -> type[Component]:
        return self.balancer

    def _make(self, num_engines: int = 4) -> LoadBalancer:
        balancer: LoadBalancer = self._build(
            BalancerContext, num_engines=num_engines, clock=ScriptedClock()
        )
        return balancer

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        balancer = self._make()

        def use(number: int) -> None:
            engines, name = ScriptedEngines(), f"{number}"
            self._send(balancer, engines, name, f"u{name}", _prompt(number), f"s{name}")
            engines.end(name)

        yield InUse(balancer, use)

    def test_index(self) -> None:
        """For any requests and engines with any load, it returns an index of the engines."""

        def check(ranks: list[int], steps: list[tuple[int, int, int | None]]) -> None:
            engines, balancer = ScriptedEngines(ranks), self._make(len(ranks))
            for number, (user, length, ended) in enumerate(steps):
                session = f"s{user}" if user % 2 else None
                prompt = range(100 * (user // 2), 100 * (user // 2) + length)
                self._send(balancer, engines, f"r{number}", f"u{user}", prompt, session)
                if ended is not None:
                    engines.compute(ended)
                    engines.report()

        ranks = st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True)
        step = st.tuples(st.integers(0, 7), st.integers(1, 90), st.none() | st.integers(1, 99))
        self._search(
            INDEX.text,
            100,
            check,
            ranks=ranks,
            steps=st.lists(step, min_size=1, max_size=20),
        )

    @checks(READS_ONLY)
    def test_reads_only(self) -> None:
        """It changes neither a request nor the list of engines nor one of them."""
        engines, balancer = ScriptedEngines(), self._make()
        for number in range(8):
            request = self._request(f"r{number}", f"u{number % 3}", range(40), f"s{number % 3}")
            views, before = list(engines.views), snapshot(request)
            states = [_state(engine) for engine in views]
            place = self._choose(balancer, views, request)
            if snapshot(request) != before:
                raise READS_ONLY.violation("choose changed the request")
            if views != engines.views:
                raise READS_ONLY.violation("choose changed the sequence of engines")
            for engine, state in zip(views, states, strict=True):
                if _state(engine) != state:
                    raise READS_ONLY.violation(
                        f"choose changed engine {engine.rank}: {_state(engine)}, before {state}"
                    )
            engines.send(request, views[place].rank)

    @checks(STARVES)
    def test_starves(self) -> None:
        """Different prompts of different users, 16 in flight: each of four engines gets some."""
        engines, balancer = ScriptedEngines(), self._make()
        chosen = self._stream(balancer, engines, 256)
        self._check_shares(STARVES, chosen, engines, "requests with different prompts")

    @checks(PINS, lambda _suite: itertools.product((1, _BURST), (True, False)))
    def test_pins(self, users: int, soon: bool) -> None:
        """A burst with a prefix of 1024 tokens that one engine has cached: of one user, or of as
        many as there are requests. If prompts are computed at once, no engine has more than twice
        its share of the requests in flight, and 16 more; if none is computed, of the pending prompt
        tokens, and one prompt more.
        """
        engines, balancer = ScriptedEngines(), self._make()
        engines.send(self._request("first", "u0", range(_PREFIX)), 0)
        engines.compute()
        engines.end("first")
        for number in range(_BURST):
            prompt = [*range(_PREFIX), *range(64 * number + _PREFIX, 64 * number + _PREFIX + 64)]
            self._send(balancer, engines, f"r{number}", f"u{number % users}", prompt)
            if soon:
                engines.compute()
        if soon:
            self._check_burst(PINS, engines, "requests with one prefix")
            return
        total = sum(engine.pending_prompt_tokens for engine in engines.views)
        share = total / len(engines.views)
        for engine in engines.views:
            if (tokens := engine.pending_prompt_tokens) > 2 * share + _PREFIX + 64:
                raise PINS.violation(
                    f"of {total} prompt tokens to compute after a common prefix, {tokens} are at "
                    f"engine {engine.rank}, its share is {share:.0f}"
                )

    @checks(STALE)
    def test_stale(self) -> None:
        """One engine is idle by its last statistics, the others are not; none of them change."""
        engines, balancer = ScriptedEngines(), self._make()
        for engine in engines.views[1:]:
            engine.num_waiting, engine.num_running, engine.kv_cache_usage = 4, 16, 0.5
        for number in range(_BURST):
            self._send(balancer, engines, f"r{number}", f"u{number}", _prompt(number))
            engines.compute()
        self._check_burst(STALE, engines, "requests since the last statistics")

    @checks(AFFINITY, lambda _suite: ((0,), (2,)))
    def test_affinity(self, others: int) -> None:
        """Sessions go on in turn at engines that all have the same number of other requests, and
        stay where they began, also when another engine goes.
        """
        if not self.keeps_sessions:
            pytest.skip("keeps_sessions is False")
        engines, balancer = ScriptedEngines([1, 2, 3, 5]), self._make()
        for engine in engines.views:
            for number in range(others):
                engines.send(self._request(f"o{engine.rank}{number}", "other", [7]), engine.rank)
        engines.compute()
        homes: dict[int, int] = {}
        for turn in range(6):
            if turn == 4:
                engines.lose(1)
                homes = {session: rank for session, rank in homes.items() if rank != 1}
            for session in (turn % 2, 2, 3, 4, 5, 6, 1 - turn % 2):
                prompt = [session, *range(100 * session, 100 * session + 40 + 20 * turn)]
                name, user = f"s{session}", f"u{session}"
                engine = self._send(balancer, engines, f"t{turn}{session}", user, prompt, name)
                engines.compute()
                engines.end(f"t{turn}{session}")
                if homes.setdefault(session, engine.rank) != engine.rank:
                    raise AFFINITY.violation(
                        f"turn {turn + 1} of session {name!r} was sent to engine {engine.rank}; "
                        f"engine {homes[session]} has its prefix, and the same load"
                    )

    @checks(CHANGES)
    def test_changes(self) -> None:
        """Engines are removed and added, at any position of the list."""
        engines, balancer = ScriptedEngines([1, 2, 3, 4]), self._make()
        self._stream(balancer, engines, 32)
        engines.lose(2)
        chosen = self._stream(balancer, engines, 192)
        self._check_shares(CHANGES, chosen, engines, "requests after engine 2 had gone")
        for rank in (0, 7):
            engines.start(rank)
        chosen = self._stream(balancer, engines, 320)
        self._check_shares(CHANGES, chosen, engines, "requests after engines 0 and 7 had come")

    @checks(REPEATABLE)
    def test_repeatable(self) -> None:
        """A second instance chooses the same as the first."""
        first, second = (list(self._played(self._make())) for _ in range(2))
        if first != second:
            raise REPEATABLE.violation(_difference(first, second, "by a new instance"))

    @checks(INSTANCES)
    def test_instances(self) -> None:
        """Two instances with interleaved calls choose the same engines."""
        alone = list(self._played(self._make()))
        first, other = self._played(self._make()), self._played(self._make(), 3)
        together = []
        for rank in first:
            together.append(rank)
            next(other, None)
        if alone != together:
            raise INSTANCES.violation(_difference(alone, together, "next to another instance"))

    @checks("memory: nothing grows with the number of requests, users and sessions")
    def test_memory(self) -> None:
        """Nothing grows with the number of requests, of users and of sessions."""
        engines, balancer = ScriptedEngines(), self._make()
        fix = "bound the memory of past requests by an option; set it low in the suite's `options`"
        for wave in without_growth(balancer, 60, "the balancer: while 240 requests ended", fix):
            for number in range(4 * wave, 4 * wave + 4):
                prompt, name = _prompt(number), f"{number}"
                self._send(balancer, engines, name, f"u{name}", prompt, f"s{name}")
                engines.end(name)

    def test_speed(self) -> None:
        """A decision among `budget_engines` stays within the budget."""
        if self.budget_us is None:
            pytest.skip("budget_us is None")
        self._run_checks("speed: a decision costs no more than its budget", self._check_speed)

    def _check_speed(self) -> None:
        count, budget = self.budget_engines, self.budget_us or 0.0
        engines, balancer = ScriptedEngines(count), self._make(count)
        requests = []
        for number in range(2 * count):
            request = self._request(f"r{number}", f"u{number}", range(256), f"s{number}")
            requests.append(request)
            engines.send(request, number % count)
        for engine in engines.views[::2]:
            engine.in_flight += 1
        cycle = requests[:8]

        def work() -> None:
            for number in range(_IN_TURN):
                balancer.choose(cycle[number % len(cycle)], engines.views)

        cost = cpu_cost(work, budget * _IN_TURN / 1e6) * 1e6 / _IN_TURN
        if cost > budget:
            raise Violation(
                f"a decision among {count} engines cost {cost:.1f} microseconds, the budget is "
                f"{budget:g}",
                "look at a few engines rather than at all; or set budget_us and budget_engines",
            )

    def _request(
        self, name: str, user: str, prompt: Iterable[int], session: str | None = None
    ) -> EngineCoreRequest:
        return scripted_request(name, prompt, session=session, **self.fields(user))

    def _choose(
        self,
        balancer: LoadBalancer,
        views: Sequence[ScriptedEngine],
        request: EngineCoreRequest,
    ) -> int:
        chosen = balancer.choose(request, views)
        call_args = (request.request_id, [engine.rank for engine in views])
        place: int = declared_result(INDEX, LoadBalancer, "choose", chosen, call_args)
        return place

    def _send(
        self,
        balancer: LoadBalancer,
        engines: ScriptedEngines,
        name: str,
        user: str,
        prompt: Iterable[int],
        session: str | None = None,
    ) -> ScriptedEngine:
        request = self._request(name, user, prompt, session)
        place = self._choose(balancer, list(engines.views), request)
        return engines.send(request, engines.views[place].rank)

    def _stream(self, balancer: LoadBalancer, engines: ScriptedEngines, count: int) -> Counter[int]:
        """Send different prompts, at most 16 in flight; count them by rank."""
        chosen: Counter[int] = Counter()
        sent: list[str] = []
        for number in range(count):
            name = f"{count}-{number}"
            engine = self._send(balancer, engines, name, f"u{name}", _prompt(number, count))
            chosen[engine.rank] += 1
            sent.append(name)
            engines.compute(64)
            if len(sent) > 16:
                engines.end(sent.pop(0))
        for name in sent:
            engines.end(name)
        engines.report()
        return chosen

    def _played(self, balancer: LoadBalancer, step: int = 1) -> Iterator[int]:
        engines = ScriptedEngines()
        for number in range(0, 64 * step, step):
            name, user = f"r{number}", f"{number % 5}"
            prompt = [number % 7, *_prompt(number)]
            yield self._send(balancer, engines, name, user, prompt, f"s{user}").rank
            engines.compute(32)
            if number % 3 == 0:
                engines.end(name)

    def _check_shares(
        self, rule: Rule, chosen: Counter[int], engines: ScriptedEngines, kind_text: str
    ) -> None:
        share = chosen.total() / len(engines.views)
        for engine in engines.views:
            if (got := chosen[engine.rank]) < share / 4:
                raise rule.violation(
                    f"of {chosen.total()} {kind_text}, engine {engine.rank} got {got}, its share "
                    f"is {share:.0f}"
                )

    def _check_burst(self, rule: Rule, engines: ScriptedEngines, kind_text: str) -> None:
        """Check that no engine has more than twice its share, and 16."""
        share = _BURST / len(engines.views)
        for engine in engines.views:
            if engine.in_flight > 2 * share + 16:
                raise rule.violation(
                    f"of {_BURST} {kind_text}, {engine.in_flight} are at engine {engine.rank}, its "
                    f"share is {share:.0f}"
                )


def _prompt(number: int, first: int = 0) -> list[int]:
    """Return a prompt that begins like no other one, of 16 to 215 tokens."""
    return [10_000 * first + number] * (16 + 37 * number % 200)


def _state(engine: ScriptedEngine) -> dict[str, Any]:
    return {
        name: set(value) if isinstance(value, set) else value
        for name, value in vars(engine).items()
        if not name.startswith("_")
    }


def _difference(first: Sequence[int], other: Sequence[int], label: str) -> str:
    number = next(i for i, pair in enumerate(zip(first, other, strict=True)) if pair[0] != pair[1])
    return f"request {number} was sent to engine {first[number]}, {label} to {other[number]}"
