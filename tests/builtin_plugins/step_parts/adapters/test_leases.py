"""Leases of slots: how many adapters run at once, and who is next."""

from __future__ import annotations

from hardpoint.builtin_plugins.step_parts.adapters.leases import Leases


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_one_adapter_share_a_slot_which_keeps_its_content():
    leases = Leases(2, Clock())
    assert leases.acquire({"a1": "a"}) is None
    assert leases.acquire({"b1": "b"}) is None
    assert leases.acquire({"a2": "a"}) is None
    assert leases.slot("a") != leases.slot("b")
    assert leases.counts() == {"a": 2, "b": 1}
    assert "with 2 others run (adapters.max_loras)" in leases.acquire({"c1": "c"})
    leases.release("a1")
    assert leases.acquire({"c1": "c"}) is not None
    leases.release("a2")
    free = leases.slot("a")
    assert not leases.has("a")
    assert leases.acquire({"c1": "c"}) is None
    assert leases.slot("c") == free


def test_the_slot_that_was_not_used_for_longest_gets_another_content():
    leases = Leases(2, Clock())
    for content in ("a", "b"):
        assert leases.acquire({content: content}) is None
        leases.release(content)
    assert leases.acquire({"again": "a"}) is None
    leases.release("again")
    slot = leases.slot("a")
    assert leases.acquire({"c": "c"}) is None
    assert leases.slot("a") == slot


def test_a_request_that_waits_long_is_next():
    clock = Clock()
    leases = Leases(1, clock)
    assert leases.acquire({"a1": "a"}) is None
    assert leases.acquire({"b1": "b"}) is not None
    assert leases.acquire({"a2": "a"}) is None  # it has its adapter
    clock.now = 1.5
    assert "a request before it waits" in leases.acquire({"a3": "a"})
    leases.release("a1")
    leases.release("a2")
    assert leases.acquire({"a3": "a"}) is not None
    assert leases.acquire({"b1": "b"}) is None
    assert "others run" in leases.acquire({"a3": "a"})
    leases.release("b1")
    assert leases.acquire({"a3": "a"}) is None


def test_a_request_that_ends_while_it_waits_holds_nobody_back():
    clock = Clock()
    leases = Leases(1, clock)
    assert leases.acquire({"a1": "a"}) is None
    assert leases.acquire({"b1": "b"}) is not None
    clock.now = 2.0
    leases.release("b1")
    assert leases.acquire({"a2": "a"}) is None


def test_a_group_gets_all_its_slots_at_once():
    leases = Leases(3, Clock())
    assert leases.acquire({"a1": "a"}) is None
    assert leases.acquire({"b1": "b"}) is None
    group = {"g": "a", "g/m/0": "c", "g/m/1": "d"}
    assert "for its 3 adapters: requests with 1 others" in leases.acquire(group)
    assert leases.counts() == {"a": 1, "b": 1}
    leases.release("b1")
    assert leases.acquire(group) is None
    assert leases.counts() == {"a": 2, "c": 1, "d": 1}
    assert len({leases.slot(content) for content in "acd"}) == 3


def test_a_group_that_waits_long_is_next():
    clock = Clock()
    leases = Leases(2, clock)
    assert leases.acquire({"a1": "a"}) is None
    assert leases.acquire({"g": "b", "g/m/0": "c"}) is not None
    clock.now = 1.5
    assert "a request before it waits" in leases.acquire({"a2": "a"})
    leases.release("a1")
    assert leases.acquire({"g": "b", "g/m/0": "c"}) is None
    for name in ("g", "g/m/0"):
        leases.release(name)
    assert leases.acquire({"a2": "a"}) is None
