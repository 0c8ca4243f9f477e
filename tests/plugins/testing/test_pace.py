"""Budgets of time hold on a busy or slow machine for good components, and fail slow ones."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from support.broken import hooks, output_parsers, samplers
from support.broken.balancers import Fewest
from support.broken.grammars import Finite
from support.broken.media_parts import SUITE as MEDIA
from support.broken.media_parts import GoodMedia
from support.broken.policies import Fcfs, Oldest, SlowKeys
from support.kit_suites import label, message_of, messages_of, timed_tests
from support.samples import CLOCK
from test_grammar_kit_catches import SAMPLES as GRAMMARS
from test_kit_catches import RIGHT as PROCESSORS
from test_kit_catches import attributes
from test_text_kit_catches import RIGHT as TEXT

from hardpoint.builtin_plugins import commands as builtin
from hardpoint.builtin_plugins.response_stores import ResponseStores
from hardpoint.testing import (
    EvictionPolicySuite,
    GrammarSuite,
    HookSuite,
    LoadBalancerSuite,
    LogitsProcessorSuite,
    OutputParserSuite,
    SamplerSuite,
    SchedulingPolicySuite,
    StepPartSuite,
    pace,
)

BUDGET = 0.005


class Machine:
    """A machine with a clock that advances by work; `busy` slows the work down."""

    def __init__(self, busy):
        self.busy, self.now, self.worked = busy, 0.0, []

    def work(self, seconds):
        self.now += seconds * (self.busy.pop(0) if isinstance(self.busy, list) else self.busy)
        self.worked.append(seconds)

    def cost(self, seconds, **options):
        """Return the cost of work that takes so many seconds on a usual machine."""
        reference = pace.Reference(lambda: self.work(0.001), 0.001)

        def measure():
            began = self.now
            self.work(seconds)
            return self.now - began

        clock = lambda: self.now  # noqa: E731
        return pace.cost_of(
            measure, BUDGET, clock=clock, reference=reference, **{"rounds": 8} | options
        )


@pytest.mark.parametrize("busy", [0.5, 1.0, 3.0, 40.0])
def test_a_budget_is_of_a_usual_machine(busy):
    assert Machine(busy).cost(0.0045) <= BUDGET
    assert Machine(max(busy, 1.0)).cost(0.0055) == pytest.approx(0.0055)


def test_what_is_good_enough_ends():
    machine = Machine(1.0)
    assert machine.cost(0.004) == 0.004
    assert machine.worked == [0.004]


def test_what_is_far_too_slow_ends():
    machine = Machine(1.0)
    assert machine.cost(1.0) == 1.0
    assert machine.worked.count(1.0) == 3


def test_a_moment_in_which_others_ran_excuses_nothing():
    # The reference work of one round of eight took 50 times as long.
    rounds = [1.0, 50.0, 50.0, 50.0, *[1.0] * 4 * 7]
    assert Machine(rounds).cost(0.009) > BUDGET


def test_time_in_which_other_programs_ran_is_not_counted(monkeypatch, tmp_path):
    delays = tmp_path / "schedstat"
    delays.write_text("10 2000000000 7")
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: 7.0))
    monkeypatch.setattr(pace, "_DELAYS", delays)
    assert pace.own_seconds() == 5.0
    monkeypatch.setattr(pace, "_DELAYS", tmp_path / "missing")
    assert pace.own_seconds() == 7.0


# Components that are right, and those of the engine whose budgets are in other tests of a suite.
RIGHT = [
    *((LogitsProcessorSuite, attributes(cls, arguments)) for cls, arguments in PROCESSORS),
    (LoadBalancerSuite, {"balancer": Fewest}),
    (GrammarSuite, {"grammar": Finite, "samples": GRAMMARS}),
    *(
        (OutputParserSuite, {"parser": cls, "samples": output_parsers.SAMPLES, "examples": 0.3})
        for cls in (output_parsers.Right, output_parsers.RightWrapped)
    ),
    (SchedulingPolicySuite, {"policy": Fcfs}),
    (EvictionPolicySuite, {"eviction": Oldest}),
    (StepPartSuite, {"part": GoodMedia, **MEDIA, "examples": 0.1}),
    (SamplerSuite, {"sampler": samplers.Gumbel}),
    *((suite, {attribute: cls}) for suite, attribute, cls in TEXT),
]


@pytest.mark.timing
@pytest.mark.parametrize(("suite", "attributes"), RIGHT, ids=label)
def test_right_components_keep_their_budgets(suite, attributes):
    assert messages_of(suite, attributes, timed_tests(suite)) == {}


@pytest.mark.timing
@pytest.mark.parametrize(
    ("plugin", "options"),
    [(builtin, {}), (ResponseStores, {"use": "memory"}), (hooks.Right, {})],
    ids=label,
)
def test_hooks_keep_their_budgets(plugin, options):
    assert messages_of(HookSuite, {"hooks": plugin, "options": options}, ["prompt"]) == {}


# suite, component that is good, one that is slow, budget
SUITES = [
    (SamplerSuite, {"sampler": samplers.Gumbel}, {"sampler": samplers.Slow}),
    (SchedulingPolicySuite, {"policy": Fcfs}, {"policy": SlowKeys}),
]


@pytest.mark.timing
@pytest.mark.parametrize(("suite", "good", "slow"), SUITES, ids=["sampler", "policy"])
def test_a_machine_of_a_third_of_the_speed_fails_slow_components_alone(
    monkeypatch, suite, good, slow
):
    name = "budget_us_per_row" if suite is SamplerSuite else "budget_us_per_request"
    budget, scale = getattr(suite, name) / 4, 1.0
    good, slow = {"examples": 0.02, **good}, {"examples": 0.02, **slow}
    monkeypatch.setattr(pace, "cpu_seconds", lambda: scale * (time.process_time() + CLOCK.spent()))
    while message_of(suite, {**good, name: budget}, "speed") is None:
        budget /= 2  # until it fails on this machine
    scale = 3.0
    assert message_of(suite, {**good, name: 3 * budget}, "speed") is None
    assert "the budget is" in message_of(suite, slow, "speed")
