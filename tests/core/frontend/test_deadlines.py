"""Deadlines of requests: which have to end now, and when the next one has to."""

from __future__ import annotations

from hardpoint.core.frontend.deadlines import GRACE_S, Deadlines


class Requests:
    def __init__(self):
        self.now, self.live = 0.0, set()
        self.deadlines = Deadlines(lambda: self.now, lambda name: name in self.live)

    def add(self, name, timeout):
        self.live.add(name)
        self.deadlines.add(name, timeout)


def test_requests_expire_in_the_order_of_their_deadlines():
    requests = Requests()
    for name, timeout in (("late", 9.0), ("soon", 1.0), ("next", 2.0)):
        requests.add(name, timeout)
    assert requests.deadlines.seconds_left() == 1.0 + GRACE_S
    requests.now = 2.0 + GRACE_S
    assert requests.deadlines.pop_expired() == ["soon", "next"]
    assert requests.deadlines.seconds_left() == 7.0
    assert requests.deadlines.pop_expired() == []


def test_requests_that_have_ended_are_passed_over():
    requests = Requests()
    requests.add("ended", 1.0)
    requests.add("other", 2.0)
    requests.live.remove("ended")
    assert requests.deadlines.seconds_left() == 2.0 + GRACE_S
    requests.live.clear()
    assert requests.deadlines.seconds_left() is None


def test_many_requests_that_ended_early_are_not_kept():
    requests = Requests()
    for number in range(10_000):
        requests.add(str(number), 1e6)
        requests.live.discard(str(number - 5))
    assert requests.deadlines.seconds_left() is not None
    requests.now = 2e6
    assert len(requests.deadlines.pop_expired()) == 5
