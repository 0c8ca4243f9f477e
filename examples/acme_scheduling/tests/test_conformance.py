"""The package's policies pass the conformance kit."""

from acme_scheduling import AgeingShortestFirst, EarliestDeadline, TenantCap

from hardpoint.testing import SchedulingPolicySuite

pytest_plugins = ["hardpoint.testing"]


class TestAgeingShortestFirst(SchedulingPolicySuite):
    policy = AgeingShortestFirst


class TestEarliestDeadline(SchedulingPolicySuite):
    policy = EarliestDeadline


class TestTenantCap(SchedulingPolicySuite):
    policy = TenantCap
    options = {"max_running": 2}
