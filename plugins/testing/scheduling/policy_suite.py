"""The conformance suite for scheduling policies; the built-in ones pass it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import strategies as st

from hardpoint.plugins import PolicyContext, SchedulingPolicy
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import GeneralComponentSuite, LiveComponentSuite
from hardpoint.testing.engine_access import load_default_scheduler, policy_arguments
from hardpoint.testing.general.growth import RESOURCES
from hardpoint.testing.general.suite import InUse

from .checks import policy as rules
from .features import UnsupportedFeatures
from .rules import POLICY_CALLS
from .scenarios import Scenario, play, scenarios

_VOCAB_SIZE = 257  # for `prepare`
_ALL_SUPPORTED = UnsupportedFeatures({}, frozenset())


class SchedulingPolicySuite(GeneralComponentSuite, LiveComponentSuite):
    """Base class of a test class, which sets `policy`, and `options` if it has some.

    Attributes:
        policy: the class under test.
        tags: a strategy for the tags of requests.
        budget_us_per_request: maximum microseconds of the calls for one request, and of victim()
            per running request; None does not measure.
    """

    kind = "scheduling_policies"
    policy: ClassVar[type[SchedulingPolicy]]
    tags: ClassVar[st.SearchStrategy[dict[str, str]]] = st.sampled_from(
        [{}, {"tenant": "acme"}, {"tenant": "zeta"}]
    )
    budget_us_per_request: ClassVar[float | None] = 100.0

    def _component(self) -> type[Component]:
        return self.policy

    def test_keys(self) -> None:
        """Keys order requests, and are not NaN; every call, and every instance, returns the same.
        With `uses_priority = False`, they do not depend on the priority.
        """
        self._search(
            "keys: they are ordered, and every call returns the same key",
            150,
            lambda requests: rules.check_keys(self._make, requests),
            requests=self._requests(4),
        )

    def test_groups(self) -> None:
        """Groups are hashable, and their keys order them."""
        if "group" not in vars(self.policy) and self.policy.group is SchedulingPolicy.group:
            pytest.skip("group is not overridden: all requests wait in one queue")
        self._search(
            "groups: they are hashable and do not change, and their keys are ordered",
            100,
            lambda requests, tokens: rules.check_groups(self._make, requests, tokens),
            requests=self._requests(6),
            tokens=st.lists(st.integers(1, 20), max_size=6),
        )

    def test_victim(self) -> None:
        """The victim is a running request."""
        self._search(
            "victim: a running request, and every call returns the same one",
            100,
            lambda requests: rules.check_victim(self._make, requests),
            requests=self._requests(6),
        )

    def test_admit(self) -> None:
        """A request that is not admitted gets a reason."""
        if self.policy.admit is SchedulingPolicy.admit:
            pytest.skip("admit is not overridden: every request is admitted")
        self._search(
            "admit: None, or the reason as a string",
            100,
            lambda requests, running: rules.check_admit(self._make, requests, running),
            requests=self._requests(6),
            running=st.integers(0, 4),
        )

    def test_reads_only(self) -> None:
        """The policy writes to no request."""
        self._search(
            "read-only: a policy writes to no request",
            50,
            lambda requests: rules.check_reads_only(self._make, requests),
            requests=self._requests(4),
        )

    def test_progress(self) -> None:
        """Under the default scheduler, with any cache, every request finishes within the bound, and
        no decision is a fault.
        """
        scheduler = load_default_scheduler()

        def check(scenario: Scenario) -> None:
            simulator = play(scheduler, scenario)
            if simulator.policy_faults:
                raise POLICY_CALLS.violation(
                    f"the scheduler reported a policy fault: {simulator.policy_faults[0]}",
                    "admit at least one request when none is running",
                )

        self._search(
            "progress: with any requests and any cache, every request finishes",
            150,
            check,
            scenario=scenarios(
                _ALL_SUPPORTED,
                sometimes=("unchunked", "timeouts", "faults"),
                events=("abort", "advance"),
                policies=(self._factory(),),
                plugin_args=self._plugin_args(),
            ),
        )

    def test_replacement(self) -> None:
        """The policy replaces another one, and itself, on a running engine."""
        scheduler = load_default_scheduler()

        def check(scenario: Scenario) -> None:
            play(scheduler, scenario)

        self._search(
            "replacement: no request is lost when policies change",
            80,
            check,
            scenario=scenarios(
                _ALL_SUPPORTED,
                events=("swap", "abort"),
                policies=(self._factory(), "fcfs"),
                plugin_args=self._plugin_args(),
            ),
        )

    def test_state(self) -> None:
        """With a `state_format`, exported state is plain data, and an instance that imports it
        keeps the order.
        """
        if not self.policy.state_format:
            pytest.skip("state_format is empty: no state is exported")
        self._search(
            "state: an instance that imports it orders requests as before",
            60,
            lambda requests, tokens: rules.check_state(self._make, requests, tokens),
            requests=self._requests(6),
            tokens=st.lists(st.integers(1, 20), max_size=12),
        )
        if self.policy.export_state is SchedulingPolicy.export_state:
            pytest.skip("export_state is not overridden: it needs none to keep the order")

    def test_memory(self) -> None:
        """Finished requests leave nothing behind."""
        self._search(
            "memory: nothing grows with the number of finished requests",
            2,
            lambda requests: rules.check_memory(self._make, requests),
            requests=self._requests(6),
        )

    def test_speed(self) -> None:
        """The calls for a request stay within the budget."""
        budget = self.budget_us_per_request
        if budget is None:
            pytest.skip("budget_us_per_request is None")
        self._search(
            "speed: a request costs no more than its budget",
            1,
            lambda requests: rules.check_speed(self._make, requests, budget),
            requests=self._requests(6),
        )

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        (sources, *_) = self._sampled(RESOURCES, self._requests(6), 1)
        policy = self._make()

        def use(number: int) -> None:
            rules.run_requests(policy, sources, number)

        yield InUse(policy, use)

    def _make(self) -> SchedulingPolicy:
        policy: SchedulingPolicy = self._build(PolicyContext)
        return policy

    def _factory(self) -> _Factory:
        return _Factory(self)

    def _requests(self, max_size: int) -> st.SearchStrategy[Any]:
        return rules.request_lists(self.tags, self._plugin_args(), max_size)

    def _plugin_args(self) -> st.SearchStrategy[dict[str, Any]]:
        if self.arguments is None:
            return st.just({})
        key = policy_arguments(self._make()).key
        drawn = self._drawn_arguments(_VOCAB_SIZE)
        return drawn.map(lambda arguments: {key: msgspec.to_builtins(arguments, str_keys=False)})


class _Factory:
    """Creates a new policy for every case."""

    def __init__(self, suite: SchedulingPolicySuite) -> None:
        self._suite = suite

    def __call__(self) -> SchedulingPolicy:
        return self._suite._make()

    def __repr__(self) -> str:
        return self._suite.policy.__name__
