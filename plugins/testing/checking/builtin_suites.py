"""Suites of built-ins that promise something else than the suite of their kind expects.

A component names its suite by `conformance_suite`, so that `hardpoint plugins check` proves its
promises.
"""

from __future__ import annotations

from hardpoint.testing.balancing.balancer_suite import LoadBalancerSuite
from hardpoint.testing.speculator_suite import SpeculatorSuite


class RoundRobinSuite(LoadBalancerSuite):
    """Requests of a session go to the engines in turn, as all others do."""

    keeps_sessions = False


class TwoChoicesSuite(LoadBalancerSuite):
    """Few sessions are remembered, so that the suite has more of them."""

    options = {"sessions": 16}


class SuffixSuite(SpeculatorSuite):
    """Drafts depend on the outputs of a few requests before."""

    learns = True
    options = {"max_cached_requests": 8}
