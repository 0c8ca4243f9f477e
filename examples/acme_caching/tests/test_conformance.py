"""The package's policies pass the conformance kit."""

from acme_caching import AdaptiveReplacement, LeastFrequentlyUsed, TwoQueues

from hardpoint.testing import EvictionPolicySuite

pytest_plugins = ["hardpoint.testing"]


class TestLeastFrequentlyUsed(EvictionPolicySuite):
    eviction = LeastFrequentlyUsed


class TestTwoQueues(EvictionPolicySuite):
    eviction = TwoQueues


class TestAdaptiveReplacement(EvictionPolicySuite):
    eviction = AdaptiveReplacement
