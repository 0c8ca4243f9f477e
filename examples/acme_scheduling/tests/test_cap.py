from acme_scheduling import TenantCap
from by_hand import LOAD, build, request

from hardpoint.plugins import RequestStatus


def of(tenant, name):
    return request(name, tags={"tenant": tenant})


def start(policy, *requests):
    for it in requests:
        policy.added(it)
        policy.scheduled(it, 3)


def test_a_tenant_at_its_cap_is_held_back_with_a_reason():
    policy = build(TenantCap, max_running=2)
    start(policy, of("acme", "a"), of("acme", "b"))
    reason = policy.admit(of("acme", "c"), LOAD)
    assert reason == "tenant 'acme' has 2 requests running, which is its limit"
    assert policy.admit(of("zeus", "d"), LOAD) is None


def test_a_request_that_runs_for_many_steps_counts_once():
    policy = build(TenantCap, max_running=2)
    it = of("acme", "a")
    start(policy, it, it, it)
    assert policy.admit(of("acme", "b"), LOAD) is None


def test_who_ended_or_was_preempted_makes_room():
    policy = build(TenantCap, max_running=1)
    a = of("acme", "a")
    for leave in (policy.finished, policy.preempted):
        start(policy, a)
        assert policy.admit(of("acme", "b"), LOAD) is not None
        leave(a)
        assert policy.admit(of("acme", "b"), LOAD) is None


def test_who_never_ran_leaves_without_a_trace():
    policy = build(TenantCap, max_running=1)
    start(policy, of("acme", "a"))
    waiting = of("acme", "b")
    policy.added(waiting)
    policy.finished(waiting)
    policy.finished(of("zeus", "c"))
    assert policy.admit(of("acme", "d"), LOAD) is not None


def test_tenants_have_their_own_limits():
    policy = build(TenantCap, max_running=1, limits={"gold": 2})
    start(policy, of("gold", "a"), of("iron", "b"))
    assert policy.admit(of("gold", "c"), LOAD) is None
    assert policy.admit(of("iron", "d"), LOAD) is not None


def test_tenants_at_their_cap_are_looked_at_last():
    policy = build(TenantCap, max_running=1)
    start(policy, of("acme", "a"))
    assert policy.group_key("zeus", 0.0) < policy.group_key("acme", 0.0)


def test_requests_without_the_tag_are_one_tenant():
    policy = build(TenantCap, tag="team", max_running=1)
    start(policy, of("acme", "a"))
    assert policy.group(of("zeus", "b")) == ""
    assert policy.admit(of("zeus", "b"), LOAD) is not None


def test_what_runs_when_it_takes_over_counts():
    policy = build(TenantCap, max_running=1)
    running, waiting = of("acme", "a"), of("acme", "b")
    running.status = RequestStatus.RUNNING
    policy.added(running)
    policy.added(waiting)
    assert policy.admit(waiting, LOAD) is not None
