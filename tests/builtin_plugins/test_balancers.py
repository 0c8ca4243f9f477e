"""The built-in load balancers: their formulas, ties, sessions and options."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.builtin_plugins.balancers.least_cost import LeastCost
from hardpoint.builtin_plugins.balancers.round_robin import RoundRobin
from hardpoint.builtin_plugins.balancers.two_choices import TwoChoices
from hardpoint.errors import ConfigError
from hardpoint.host.registry.kinds import KINDS
from hardpoint.plugins import BalancerContext
from hardpoint.plugins.config.engine import ParallelConfig
from hardpoint.testing import ScriptedEngines, scripted_request
from hardpoint.typed import convert


def build(cls, **options):
    checked = convert(options, cls.Options, path="plugin.it")
    return cls(BalancerContext(name="it", options=checked, num_engines=4, clock=None))


def ask(length=20, name="r", session=None, first=0):
    return scripted_request(name, range(first, first + length), session=session)


def loaded(*loads, ranks=None):
    """Return engines with some requests in flight, and pending prompt tokens."""
    engines = ScriptedEngines(len(loads) if ranks is None else ranks)
    for engine, (in_flight, pending) in zip(engines.views, loads, strict=True):
        engine.in_flight, engine.pending_prompt_tokens = in_flight, pending
    return engines


def cached(engines, rank, length, first=0):
    engines.send(ask(length, "before", first=first), rank)
    engines.compute()
    engines.end("before")


def at_rank_7(balancer):
    """Return a balancer with a session "s" at the engine of rank 7."""
    engines = loaded(*[(9, 9999)] * 7, (0, 0))
    for number in range(100):
        if engines.choose(balancer, ask(30, f"a{number}", "s")).rank == 7:
            break
    assert engines.sessions == {"s": 7}
    return balancer


class TestLeastCost:
    def test_it_is_the_default(self):
        assert ParallelConfig().balancer == "least_cost"
        assert KINDS["balancers"].chosen_by == "parallel.balancer"

    def test_tokens_that_are_pending_and_requests_in_flight_are_of_one_unit(self):
        engines = loaded((2, 0), (1, 63), (0, 129))
        assert build(LeastCost).choose(ask(), engines.views) == 1
        assert build(LeastCost, in_flight_tokens=0).choose(ask(), engines.views) == 0
        assert build(LeastCost, in_flight_tokens=200).choose(ask(), engines.views) == 2

    def test_what_is_cached_counts_against_what_waits(self):
        engines = loaded((0, 47), (0, 0), (0, 0))
        cached(engines, 0, 48)
        assert build(LeastCost).choose(ask(60), engines.views) == 0
        engines.views[0].pending_prompt_tokens = 49
        assert build(LeastCost).choose(ask(60), engines.views) == 1

    def test_of_equal_costs_the_fewest_in_flight_then_the_session_then_turns(self):
        engines = loaded((1, 0), (0, 64), (0, 64), (0, 64))
        balancer = build(LeastCost)
        assert [balancer.choose(ask(), engines.views) for _ in range(5)] == [1, 1, 2, 3, 1]
        engines.sessions["s"] = 2
        assert {balancer.choose(ask(session="s"), engines.views) for _ in range(5)} == {2}
        engines.sessions["s"] = 0
        assert balancer.choose(ask(session="s"), engines.views) != 0

    @examples(200)
    @given(
        loads=st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 6).map(lambda n: 32 * n)),
            min_size=2,
            max_size=7,
        ),
        prefixes=st.lists(st.integers(0, 6), max_size=7),
        turns=st.integers(0, 6),
    )
    def test_it_is_the_minimum_of_its_formula(self, loads, prefixes, turns):
        engines, balancer, request = loaded(*loads), build(LeastCost), ask(100)
        for rank, blocks in enumerate(prefixes[: len(loads)]):
            cached(engines, rank, 16 * blocks or 1)
        for _ in range(turns):
            balancer.choose(ask(name="other", first=500), engines.views)

        def cost(place):
            engine = engines.views[place]
            num_cached = engine.cached_prefix_tokens(request)
            work = engine.pending_prompt_tokens + 64 * engine.in_flight - num_cached
            return work, engine.in_flight, (place - turns) % len(loads)

        assert balancer.choose(request, engines.views) == min(range(len(loads)), key=cost)

    def test_prefixes_are_looked_up_where_they_can_matter(self):
        engines = loaded((0, 100), (0, 0), (0, 21), (0, 20))
        ranks = []
        for engine in engines.views:
            engine.cached_prefix_tokens = lambda _, rank=engine.rank: ranks.append(rank) or 0
        assert build(LeastCost).choose(ask(20), engines.views) == 1
        assert ranks == [0, 1, 3]


class TestTwoChoices:
    def test_it_looks_at_two_engines(self):
        class Views(list):
            def __getitem__(self, place):
                views.add(place)
                return list.__getitem__(self, place)

            def __iter__(self):
                raise AssertionError("it looks at all of them")

        engines, balancer = ScriptedEngines(50), build(TwoChoices)
        for _ in range(100):
            views = set()
            assert balancer.choose(ask(), Views(engines.views)) in views
            assert len(views) == 2

    def test_the_better_of_both_is_taken(self):
        for place in range(2):
            engines = loaded((0, 64 * place), (0, 64 - 64 * place))
            assert {build(TwoChoices).choose(ask(), engines.views) for _ in range(8)} == {place}
            engines = loaded((place, 0), (1 - place, 0))
            assert {build(TwoChoices).choose(ask(), engines.views) for _ in range(8)} == {place}

    def test_the_fullest_engine_has_little_more_than_its_share(self):
        engines, balancer = ScriptedEngines(100), build(TwoChoices)
        for number in range(3200):
            engines.choose(balancer, ask(1, f"r{number}"))
        loads = [engine.in_flight for engine in engines.views]
        assert 28 <= min(loads) <= max(loads) <= 36  # one choice gives about 15 to 50

    def test_the_seed_decides(self):
        def draws(**options):
            engines, balancer = ScriptedEngines(9), build(TwoChoices, **options)
            return [balancer.choose(ask(), engines.views) for _ in range(50)]

        assert draws() == draws(seed=0) == draws() != draws(seed=1)

    @pytest.mark.parametrize(("pending", "stays"), [(30, True), (31, False)])
    def test_a_session_stays_while_it_saves_what_it_waits(self, pending, stays):
        """Its engine has the 30 tokens of the prompt before."""
        balancer = build(TwoChoices)
        engines = loaded((0, 0), (9, 9999))
        assert engines.choose(balancer, ask(30, "a", "s")).rank == 0
        engines = loaded((0, pending), (0, 0))
        engines.sessions["s"] = 0
        assert (balancer.choose(ask(40, "b", "s"), engines.views) == 0) is stays

    def test_a_session_that_goes_on_elsewhere_is_remembered_there(self):
        balancer = build(TwoChoices)
        engines = loaded((0, 0), (9, 9999))
        engines.choose(balancer, ask(30, "a", "s"))
        moved = loaded((9, 9999), (0, 0))
        moved.sessions["s"] = 0
        assert moved.choose(balancer, ask(40, "b", "s")).rank == 1
        after = loaded((0, 0), (0, 40))
        after.sessions["s"] = 1
        assert after.choose(balancer, ask(50, "c", "s")).rank == 1

    def test_the_client_knows_better_where_a_session_ran(self):
        """A request of it named its engine, and so was not asked about."""
        balancer = build(TwoChoices)
        engines = loaded((0, 0), (9, 9999))
        engines.choose(balancer, ask(30, "a", "s"))
        engines = loaded((0, 10), (0, 0))
        engines.sessions["s"] = 1
        assert balancer.choose(ask(40, "b", "s"), engines.views) == 1

    @pytest.mark.parametrize("ranks", [[3, 4, 7, 9], [0, 1, 3, 7], [7, 8], [5, 6, 7]])
    def test_its_engine_is_found_by_rank(self, ranks):
        balancer = at_rank_7(build(TwoChoices))
        others = loaded(*[(0, 0)] * len(ranks), ranks=ranks)
        others.sessions["s"] = 7
        for number in range(20):
            assert others.choose(balancer, ask(30, f"b{number}", "s")).rank == 7
            others.end(f"b{number}")

    @pytest.mark.parametrize("ranks", [[0, 1], [8, 9], [0, 9], [1, 2, 8]])
    def test_its_engine_is_gone(self, ranks):
        balancer = at_rank_7(build(TwoChoices))
        others = ScriptedEngines(ranks)
        home = others.choose(balancer, ask(30, "b0", "s")).rank
        assert home in ranks
        others.end("b0")
        assert others.choose(balancer, ask(30, "b1", "s")).rank == home

    def test_the_sessions_used_last_are_remembered(self):
        engines, balancer = ScriptedEngines(64), build(TwoChoices, sessions=2)
        first = {}
        for name in "abacabab":
            engines.sessions = dict(first)
            rank = engines.choose(balancer, ask(2, name, name)).rank
            engines.end(name)
            if name == "c":
                first.pop("b")  # the third one takes its place
            elif name == "b":
                first.pop("c", None)
            assert first.setdefault(name, rank) == rank

    def test_without_memory_sessions_are_as_any_request(self):
        engines, balancer = ScriptedEngines(64), build(TwoChoices, sessions=0)
        ranks = set()
        for number in range(20):
            ranks.add(engines.choose(balancer, ask(2, f"{number}", "s")).rank)
            engines.end(f"{number}")
        assert len(ranks) > 10


class TestRoundRobin:
    def test_each_in_turn_whatever_it_has_to_do(self):
        engines, balancer = loaded((9, 999), (0, 0), (5, 0)), build(RoundRobin)
        assert [balancer.choose(ask(), engines.views) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]

    def test_engines_go_and_come(self):
        engines, balancer = ScriptedEngines(3), build(RoundRobin)
        chosen = Counter()
        for step in range(300):
            if step % 50 == 25:
                engines.lose(1) if len(engines.views) == 3 else engines.start(1)
            chosen[engines.choose(balancer, ask(1, f"r{step}")).rank] += 1
        assert min(chosen.values()) >= 45


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (LeastCost, {"in_flight_tokens": -1}, "in_flight_tokens: expected a whole number >= 0"),
        (LeastCost, {"seed": 1}, "seed: unknown field"),
        (TwoChoices, {"sessions": -1}, "sessions: expected a whole number >= 0"),
        (TwoChoices, {"seed": "x"}, "seed: expected a whole number, got 'x'"),
        (RoundRobin, {"seed": 1}, "seed: unknown field"),
    ],
)
def test_wrong_options(cls, options, message):
    with pytest.raises(ConfigError) as error:
        build(cls, **options)
    assert str(error.value).startswith(f"plugin.it.{message}")
