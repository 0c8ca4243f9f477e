"""A lock that is fair between owners: order of threads, and bounds of waits."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import wait_until

from hardpoint.toolkit.limited.fair_lock import FairLock


class Play:
    """Threads that take turns; each does its part of a script while it has its turn."""

    def __init__(self, script):
        """`script` has the owners that come during each turn."""
        self.turns, self.script, self.order = FairLock(), list(script), []
        self.threads, self.arrived, self.failures = [], [], []
        self.outside = threading.Event()

    def come(self, owner):
        waiting = self.turns.num_waiting
        name = len(self.arrived)
        self.arrived.append((owner, len(self.order)))
        thread = threading.Thread(target=self._work, args=(owner, name), daemon=True)
        self.threads.append(thread)
        thread.start()
        wait_until(lambda: self.turns.num_waiting == waiting + 1, what="a thread that waits")

    def _work(self, owner, name):
        with self.turns.turn(owner):
            self.order.append((owner, name))
            for other in self.script.pop(0) if self.script else ():
                self.come(other)

    def run(self, first):
        with self.turns.turn("first"):
            self.order.append(("first", -1))
            for owner in first:
                self.come(owner)
        for thread in self.threads:
            thread.join(60)
        return self.order


def test_owners_take_turns():
    order = Play([]).run(["a", "a", "a", "a", "b", "b", "c"])
    assert "".join(owner for owner, _ in order[1:]) == "abcabaa"


def test_one_that_comes_is_before_the_owner_that_has_the_turn():
    """Eight images of one key delay another key's by one image."""
    order = Play([["b"]]).run(["a"] * 8)
    assert [owner for owner, _ in order[1:4]] == ["a", "b", "a"]


def test_one_that_comes_again_and_again_is_not_before_those_that_wait():
    order = Play([["b"], ["b"], ["b"], ["b"]]).run(["a"] * 4)
    assert "".join(owner for owner, _ in order[1:]) == "abababab"


owners = st.sampled_from("abcd")


@settings(max_examples=25, deadline=None)
@given(st.lists(owners, min_size=1, max_size=6), st.lists(st.lists(owners, max_size=2), max_size=5))
def test_each_waits_for_at_most_one_turn_of_each_other_owner(first, script):
    play = Play(script)
    order = play.run(first)
    assert len(order) == len(play.arrived) + 1
    for name, (owner, place) in enumerate(play.arrived):
        mine = order.index((owner, name))
        before = [i for i, (other, _) in enumerate(order[:mine]) if other == owner]
        # Its turn to wait begins when it comes, during the turn before, or when its owner had one.
        begins = max([place - 1, *(i + 1 for i in before)])
        others = [other for other, _ in order[begins:mine]]
        assert len(others) == len(set(others)), (order, owner, name)
        names = [other for who, other in order[:mine] if who == owner]
        assert names == sorted(names)  # one owner's in the order in which they came


def test_an_interrupt_of_one_that_waits_leaves_the_turn_to_others():
    turns, got = FairLock(), []

    class Stopped(BaseException):
        pass

    class Interrupted:
        """A lock with an interrupted second acquisition, like a signal in the main thread."""

        def __init__(self, lock):
            self._lock, self._count = lock, 0

        def acquire(self):
            self._count += 1
            if self._count == 2:
                raise Stopped
            return self._lock.acquire()

        def release(self):
            self._lock.release()

    with pytest.MonkeyPatch.context() as patch:
        with turns.turn("a"):
            made = threading.Lock
            patch.setattr(
                "hardpoint.toolkit.limited.fair_lock.threading",
                type("Threading", (), {"Lock": staticmethod(lambda: Interrupted(made()))}),
            )
            with pytest.raises(Stopped), turns.turn("b"):
                got.append("never")
        patch.undo()
        with turns.turn("c"):
            got.append("c")
    assert got == ["c"]
    assert turns.num_waiting == 0


def test_an_error_ends_the_turn():
    turns = FairLock()
    with pytest.raises(ZeroDivisionError), turns.turn("a"):
        raise ZeroDivisionError
    with turns.turn("b"):
        pass
