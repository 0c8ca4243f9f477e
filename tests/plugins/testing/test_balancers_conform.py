"""The built-in load balancers pass the conformance kit."""

from __future__ import annotations

from support.kit_suites import assert_tests_builtins

from hardpoint.builtin_plugins.balancers.least_cost import LeastCost
from hardpoint.builtin_plugins.balancers.round_robin import RoundRobin
from hardpoint.builtin_plugins.balancers.two_choices import TwoChoices
from hardpoint.testing import LoadBalancerSuite


class TestLeastCost(LoadBalancerSuite):
    balancer = LeastCost


class TestTwoChoices(LoadBalancerSuite):
    balancer = TwoChoices
    options = {"sessions": 16}
    budget_us = 20.0
    budget_engines = 1000


class TestTwoChoicesWithAnotherSeed(LoadBalancerSuite):
    balancer = TwoChoices
    options = {"sessions": 16, "seed": 7}
    budget_us = None


class TestRoundRobin(LoadBalancerSuite):
    balancer = RoundRobin
    keeps_sessions = False
    budget_us = 20.0
    budget_engines = 1000


def test_each_built_in_is_tested():
    assert_tests_builtins("balancers", "balancer", globals())
