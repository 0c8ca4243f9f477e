from acme_scheduling import EarliestDeadline
from by_hand import LOAD, build, request


def order(policy, *requests):
    return "".join(r.request_id for r in sorted(requests, key=policy.key))


def test_who_is_due_first_goes_first():
    a = request("a", arrival=0.0, timeout=9.0)
    b = request("b", arrival=5.0, timeout=1.0)
    c = request("c", arrival=1.0, timeout=7.0)
    assert order(build(EarliestDeadline), a, b, c) == "bca"


def test_without_a_timeout_a_request_is_due_after_the_horizon():
    policy = build(EarliestDeadline, horizon=10.0)
    patient = request("a", arrival=0.0)
    assert order(policy, patient, request("b", arrival=5.0, timeout=4.9)) == "ba"
    assert order(policy, patient, request("b", arrival=5.0, timeout=5.1)) == "ab"
    assert order(policy, request("b", arrival=10.1, timeout=0.0), patient) == "ab"


def test_who_has_most_time_left_gives_way_the_latest_of_equals():
    policy = build(EarliestDeadline)
    a, b = request("a", timeout=5.0), request("b", timeout=1.0)
    c, d = request("c"), request("d")
    assert policy.victim([a, b], LOAD) is a
    assert policy.victim([c, a, d, b], LOAD) is d
