"""A tenant has an engine of its own; who is passed over, and who moves."""

from collections import Counter

import pytest
from acme_ring import TenantRing

from hardpoint.plugins import BalancerContext
from hardpoint.testing import ScriptedEngines, scripted_request

TENANTS = [f"t{number}" for number in range(200)]


@pytest.fixture
def engines():
    return ScriptedEngines(5)


def ring(**options):
    options = TenantRing.Options(**options)
    return TenantRing(BalancerContext(name="ring", options=options, num_engines=5, clock=None))


def ask(tenant, number=0):
    tags = {} if tenant is None else {"tenant": tenant}
    return scripted_request(f"{tenant}-{number}", [1, 2, 3], tags=tags)


def homes(balancer, engines):
    return {t: engines.views[balancer.choose(ask(t), engines.views)].rank for t in TENANTS}


def test_a_tenant_has_one_engine_and_each_engine_has_tenants(engines):
    engines_by_tenant = homes(ring(), engines)
    assert engines_by_tenant == homes(ring(), engines)
    assert min(Counter(engines_by_tenant.values()).values()) > len(TENANTS) / 5 / 2


def test_requests_without_the_tag_are_one_tenant(engines):
    balancer = ring()
    assert balancer.choose(ask(None), engines.views) == balancer.choose(ask(""), engines.views)


def test_another_tag_names_the_tenant(engines):
    balancer = ring(tag="team")
    assert {balancer.choose(ask(tenant), engines.views) for tenant in TENANTS} == {
        ring().choose(ask(None), engines.views)
    }


def test_only_the_tenants_of_an_engine_that_goes_move(engines):
    balancer = ring()
    before = homes(balancer, engines)
    engines.lose(2)
    after = homes(balancer, engines)
    assert {t for t in TENANTS if before[t] != after[t]} == {t for t in TENANTS if before[t] == 2}
    engines.start(2)
    assert homes(balancer, engines) == before


def test_a_tenant_with_many_requests_takes_other_engines_too(engines):
    balancer = ring(spare=0.5)
    for number in range(100):
        engines.choose(balancer, ask("busy", number))
    assert max(engine.in_flight for engine in engines.views) == 1.5 * 100 / 5
