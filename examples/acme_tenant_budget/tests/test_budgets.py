import msgspec
import pytest
from acme_tenant_budget.part import BudgetLog
from by_hand import halves, request

from hardpoint.plugins import RequestError, SchedulerOutput, WaitingFor


def test_only_requests_with_a_tenant_use_it():
    half, _ = halves()
    assert half.uses(request("a", "acme").source)
    assert not half.uses(request("b").source)
    assert halves(tag="team")[0].uses(request("c", "acme").source) is False


def test_what_costs_more_than_a_tenant_can_save_is_refused():
    half, _ = halves(burst=9)
    half.check(request("a", "acme", max_tokens=4).source)
    with pytest.raises(RequestError, match="costs 10 tokens.* save up 9"):
        half.check(request("b", "acme").source)


def test_a_request_waits_until_its_tenant_has_tokens_and_others_do_not():
    half, clock = halves(tokens_per_second=2.0, burst=10)
    assert half.gate(request("a", "acme")) is None
    late = request("b", "acme")
    reason = half.gate(late)
    assert reason.message == (
        "tenant 'acme' has 0 tokens left, the request costs 10; 2 come per second"
    )
    assert (reason.waiting_for, reason.needed, reason.available) == (WaitingFor.PART, 10, 0)
    assert half.gate(request("c", "zeus")) is None
    clock.now = 4.9
    assert half.gate(late).available == 9
    clock.now = 5.0
    assert half.gate(late) is None


def test_what_is_not_generated_is_returned():
    half, _ = halves(burst=10)
    first = request("a", "acme")
    half.gate(first)
    first.append(7)
    half.ended("a")
    assert half.gate(request("b", "acme")).available == 4


def test_a_request_that_never_passed_the_gate_returns_nothing():
    half, _ = halves(burst=10)
    half.gate(request("a", "acme"))
    half.gate(request("b", "acme"))
    half.ended("b")
    assert half.gate(request("c", "acme")).available == 0


def test_tenants_have_their_own_rates():
    half, clock = halves(tokens_per_second=1.0, burst=10, rates={"gold": 10.0})
    for tenant in ("gold", "iron"):
        half.gate(request(tenant, tenant))
    clock.now = 1.0
    assert half.gate(request("a", "gold")) is None
    assert half.gate(request("b", "iron")).available == 1


def test_only_limited_tenants_need_slots():
    half, _ = halves(running={"acme": 2})
    assert half.capacity == {"slots of acme": 2}
    assert half.cost(request("a", "acme")) == {"slots of acme": 1}
    assert half.cost(request("b", "zeus")) == {}


def test_the_budgets_ride_on_the_plan():
    half, clock = halves(tokens_per_second=2.0, burst=10)
    half.gate(request("a", "acme"))
    half.gate(request("b", "zeus", max_tokens=1))
    clock.now = 0.5
    data = half.begin(SchedulerOutput(step=1))
    assert msgspec.msgpack.decode(data) == {"acme": 1, "zeus": 5}
    log = BudgetLog(0)
    log.begin(SchedulerOutput(step=1), data)
    assert log.levels == {"acme": 1, "zeus": 5}
