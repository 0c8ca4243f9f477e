"""Load balancers with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

from support.broken import balancers as broken
from support.kit_suites import assert_fails, each_broken, messages_of, suite_tests
from support.searching import kit_examples

from hardpoint.testing import LoadBalancerSuite

# balancer, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.ReturnsRanks, "index", "index", r"returned \d, expected an index of engines, from 0"),
    (broken.ReturnsNothing, "index", "index", "returned None, expected an index of engines"),
    (broken.ReturnsEngines, "index", "index", r"returned <engine \d>, expected an index"),
    (broken.ReturnsBool, "index", "index", r"returned (True|False), expected an index of engines"),
    (broken.CountsBackwards, "index", "index", r"returned -\d, expected an index of engines"),
    (broken.NeedsTags, "index", "exceptions", r"KeyError: 'shard' \(in choose"),
    (broken.WritesRequest, "reads_only", "reads only", "choose changed the request"),
    (broken.CountsForItself, "reads_only", "reads only", r"changed engine \d: .*'in_flight': 1"),
    (broken.Sorts, "reads_only", "reads only", "choose changed the sequence of engines"),
    (broken.FillsTheFirst, "starves", "starves", "engine 1 got 0, its share is 64"),
    (broken.LovesPrefixes, "pins", "pins", "128 are at engine 0, its share is 32"),
    (broken.UsesTwo, "pins", "pins", r"of \d+ prompt tokens to compute after .* are at engine 1"),
    (broken.TrustsStatistics, "stale", "stale", "128 are at engine 0, its share is 32"),
    (broken.TakesTurns, "affinity", "affinity", r"turn 2 of session 's\d' was sent to engine"),
    (broken.RemembersPlaces, "affinity", "affinity", r"turn 5 of session 's\d' was sent to engine"),
    (broken.CountsOnce, "changes", "index", "returned 3, expected an index of engines, from 0 to"),
    (broken.KnowsTheFirst, "changes", "changes", "engine 0 got 0, its share is"),
    (broken.Draws, "repeatable", "repeatable", r"was sent to engine \d, by a new instance to \d"),
    (broken.SharesTurns, "instances", "instances", r"engine \d, next to another instance to"),
    (broken.RemembersSessions, "memory", "memory", r"grew from \d+ to \d+ elements while 240 req"),
    (broken.Slow, "speed", "speed", r"among 64 engines cost \d+\.\d microseconds, the budget is"),
]  # fmt: skip


@each_broken(BROKEN)
def test_a_broken_balancer_fails_its_rule(cls, test, rule, pattern):
    assert_fails(LoadBalancerSuite, {"balancer": cls}, test, rule, pattern)


def test_a_right_one_passes():
    assert (
        messages_of(LoadBalancerSuite, {"balancer": broken.Fewest, "examples": kit_examples()})
        == {}
    )


def test_a_balancer_without_sessions_is_not_asked_to_keep_them():
    attributes = {"balancer": broken.TakesTurns, "keeps_sessions": False}
    assert messages_of(LoadBalancerSuite, attributes, ["affinity"]) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(LoadBalancerSuite)
