"""The conformance suite for scheduling policies: what the built-ins pass, in your tests."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import PolicyContext, SchedulingPolicy
from hardpoint.plugins.component import Component
from hardpoint.testing.scheduling.checks.names import POLICY, BrokenRule
from hardpoint.testing.suite import refuse_replaced_tests

from .checks import policy as rules
from .features import Refusals
from .scenarios import Scenario, play, scenarios
from .settings import builtin_scheduler
from .suite_base import SchedulingSuiteBase

_ANYTHING = Refusals({}, frozenset())


class SchedulingPolicySuite(SchedulingSuiteBase):
    """Derive a test class from it, and set `policy`, and `options` if it needs some.

    Attributes:
        policy: the class under test.
        tags: a strategy for the tags of requests.
        budget_us_per_request: microseconds that the calls for one request may cost, and those
            for one that runs when a victim is chosen; None does not measure.
    """

    kind = "scheduling_policies"
    policy: ClassVar[type[SchedulingPolicy]]
    tags: ClassVar[st.SearchStrategy[dict[str, str]]] = st.sampled_from(
        [{}, {"tenant": "acme"}, {"tenant": "zeta"}]
    )
    budget_us_per_request: ClassVar[float | None] = 100.0

    def _component(self) -> type[Component]:
        return self.policy

    def test_contract(self) -> None:
        """It states its contract, and can be built; its options travel."""
        self._once(
            "the contract: a loader must be able to check and build it",
            lambda: refuse_replaced_tests(type(self), SchedulingPolicySuite),
            self._check_contract,
            lambda: self._make().close(),
        )

    def test_keys(self) -> None:
        """Keys order requests, and stay what they are."""
        self._search(
            "keys: they compare, make an order, and are the same when asked again",
            150,
            lambda requests: rules.check_keys(self._make, requests),
            requests=self._requests(4),
        )

    def test_groups(self) -> None:
        """Groups hash, and their keys order them."""
        if "group" not in vars(self.policy) and self.policy.group is SchedulingPolicy.group:
            pytest.skip("group is not overridden: all requests wait in one queue")
        self._search(
            "groups: they hash and stay what they are, and their keys make an order",
            100,
            lambda requests, tokens: rules.check_groups(self._make, requests, tokens),
            requests=self._requests(6),
            tokens=st.lists(st.integers(1, 20), max_size=6),
        )

    def test_victim(self) -> None:
        """The victim is one of those that run."""
        self._search(
            "victim: one of those that run, and the same when asked again",
            100,
            lambda requests: rules.check_victim(self._make, requests),
            requests=self._requests(6),
        )

    def test_admit(self) -> None:
        """Whoever is held back is told why."""
        if self.policy.admit is SchedulingPolicy.admit:
            pytest.skip("admit is not overridden: nobody is held back")
        self._search(
            "admit: None, or the reason in words",
            100,
            lambda requests, running: rules.check_admit(self._make, requests, running),
            requests=self._requests(6),
            running=st.integers(0, 4),
        )

    def test_reads_only(self) -> None:
        """It changes no request."""
        self._search(
            "reading: a policy writes to no request",
            50,
            lambda requests: rules.check_reads_only(self._make, requests),
            requests=self._requests(4),
        )

    def test_progress(self) -> None:
        """Under the default scheduler every request ends, and no decision is a fault."""
        scheduler = builtin_scheduler()

        def check(scenario: Scenario) -> None:
            rig = play(scheduler, scenario)
            if rig.policy_faults:
                raise BrokenRule(
                    POLICY,
                    f"the scheduler could not do as it said: {rig.policy_faults[0]}",
                    "hold nobody back for ever: let one run when nothing does",
                )

        self._search(
            "progress: with any requests and any cache, every one of them ends",
            150,
            check,
            scenario=scenarios(
                _ANYTHING,
                sometimes=("whole", "timeouts", "faults"),
                events=("abort", "advance"),
                policies=(self._maker(),),
            ),
        )

    def test_takes_over(self) -> None:
        """It takes the place of another policy, and of itself, on a running engine."""
        scheduler = builtin_scheduler()

        def check(scenario: Scenario) -> None:
            play(scheduler, scenario)

        self._search(
            "taking over: no request is lost when policies change",
            80,
            check,
            scenario=scenarios(
                _ANYTHING, events=("swap", "abort"), policies=(self._maker(), "fcfs")
            ),
        )

    def test_state(self) -> None:
        """Its books are plain data, and another instance goes on with them."""
        if not self.policy.state_format:
            pytest.skip("state_format is empty: it hands over no books")
        self._search(
            "books: whoever takes them over orders requests as before",
            60,
            lambda requests, tokens: rules.check_state(self._make, requests, tokens),
            requests=self._requests(6),
            tokens=st.lists(st.integers(1, 20), max_size=12),
        )

    def test_memory(self) -> None:
        """Requests that are gone leave nothing behind."""
        self._search(
            "memory: nothing grows with the number of requests that were served",
            2,
            lambda requests: rules.check_memory(self._make, requests),
            requests=self._requests(6),
        )

    def test_speed(self) -> None:
        """A request costs no more than the budget."""
        budget = self.budget_us_per_request
        if budget is None:
            pytest.skip("budget_us_per_request is None")
        self._search(
            "speed: a request costs no more than its budget",
            1,
            lambda requests: rules.check_speed(self._make, requests, budget),
            requests=self._requests(6),
        )

    def _make(self) -> SchedulingPolicy:
        policy: SchedulingPolicy = self._build(PolicyContext)
        return policy

    def _maker(self) -> _Maker:
        return _Maker(self)

    def _requests(self, most: int) -> st.SearchStrategy[Any]:
        return rules.requests(self.tags, most)


class _Maker:
    """Makes the policy anew for every case."""

    def __init__(self, suite: SchedulingPolicySuite) -> None:
        self._suite = suite

    def __call__(self) -> SchedulingPolicy:
        return self._suite._make()

    def __repr__(self) -> str:
        return self._suite.policy.__name__
