"""The package's balancer passes the conformance kit."""

from acme_ring import TenantRing

from hardpoint.testing import LoadBalancerSuite

pytest_plugins = ["hardpoint.testing"]


class TestTenantRing(LoadBalancerSuite):
    balancer = TenantRing


class TestTenantRingWithMorePoints(LoadBalancerSuite):
    balancer = TenantRing
    options = {"points": 256, "spare": 0.1}
