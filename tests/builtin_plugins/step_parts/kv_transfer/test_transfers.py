"""Loads and saves of several ranks: each ends once, after all ranks or at its deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.builtin_plugins.step_parts.kv_transfer.transfers import PendingLoads, Saves
from hardpoint.testing import ScriptedClock


@pytest.fixture
def clock():
    return ScriptedClock()


@pytest.fixture
def loads(clock):
    return PendingLoads(range(2), clock, seconds=10)


def begun(loads, step=1):
    loads.begin("a", [5, 6])
    assert loads.plan(step) == []
    return loads


class TestLoads:
    def test_it_ends_when_all_ranks_have_finished(self, loads):
        begun(loads)
        loads.finished("a", 0, 1)
        assert loads.end(1) == {}
        loads.finished("a", 0, 2)
        assert loads.end(2) == {}
        loads.finished("a", 1, 2)
        (ended,) = loads.end(2).values()
        assert (ended.invalid, ended.failed, ended.is_error) == (frozenset(), False, False)
        assert not loads
        assert not loads.is_busy("a")

    def test_a_bad_block_of_an_earlier_step_counts_in_the_end(self, loads):
        begun(loads)
        loads.failed(frozenset([6, 9]))
        loads.finished("a", 0, 1)
        assert loads.end(1) == {}
        loads.finished("a", 1, 2)
        (ended,) = loads.end(2).values()
        assert (ended.invalid, ended.failed, ended.is_error) == ({6}, True, True)

    def test_names_before_the_plan_that_starts_it_are_of_another_one(self, loads):
        loads.begin("a", [5])
        loads.finished("a", 0, 3)
        loads.plan(5)
        loads.finished("a", 1, 4)
        assert loads.end(5) == {}
        loads.finished("a", 0, 5)
        loads.finished("a", 1, 5)
        assert list(loads.end(5)) == ["a"]

    def test_it_is_given_up_at_its_deadline_and_ends_with_the_plan_that_cancels_it(
        self, loads, clock
    ):
        begun(loads)
        loads.finished("a", 0, 1)
        clock.now = 10.5
        assert loads.pop_late() == ["a"]
        assert loads.pop_late() == []
        assert loads.end(2) == {}
        assert loads.plan(3) == ["a"]
        assert loads.plan(4) == []
        assert loads.end(2) == {}
        (ended,) = loads.end(3).values()
        assert (ended.invalid, ended.is_error) == ({5, 6}, True)

    def test_its_id_loads_nothing_for_a_while_then(self, loads, clock):
        begun(loads)
        loads.request_ended("a")
        assert loads.plan(2) == ["a"]
        (ended,) = loads.end(2).values()
        assert (ended.invalid, ended.failed, ended.is_error) == (frozenset(), True, False)
        assert loads.is_busy("a")
        clock.now = 10.5
        assert not loads.is_busy("a")

    def test_a_load_that_all_ranks_finish_before_it_is_cancelled_has_failed_all_the_same(
        self, loads
    ):
        begun(loads)
        loads.finished("a", 0, 1)
        loads.finished("a", 1, 1)
        loads.fail_all(1)
        (ended,) = loads.end(1).values()
        assert ended.invalid == {5, 6}
        assert loads.plan(2) == []

    def test_a_failure_is_of_what_was_under_way(self, loads):
        begun(loads, 1)
        loads.begin("b", [7])
        loads.plan(4)
        loads.fail_all(3)
        assert loads.plan(5) == ["a"]

    def test_what_a_lost_plan_cancels_the_next_one_does(self, loads):
        begun(loads)
        loads.request_ended("a")
        assert loads.plan(2) == ["a"]
        loads.plan_lost(2)
        assert loads.end(2) == {}
        assert loads.plan(3) == ["a"]
        assert list(loads.end(3)) == ["a"]

    def test_a_lost_plan_is_no_error_but_gives_up_what_was_under_way(self, loads):
        begun(loads, 1)
        loads.begin("b", [7])
        loads.plan(3)
        loads.plan_lost(2)
        assert loads.plan(4) == ["a"]
        (ended,) = loads.end(4).values()
        assert (ended.invalid, ended.failed, ended.is_error) == ({5, 6}, True, False)

    def test_without_workers_all_end_at_once(self, loads):
        begun(loads)
        loads.workers_lost()
        (ended,) = loads.end(1).values()
        assert (ended.invalid, ended.is_error) == ({5, 6}, False)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from("abc")),
        st.tuples(st.just("finished"), st.sampled_from("abcd"), st.integers(0, 2)),
        st.tuples(st.just("failed"), st.integers(0, 8)),
        st.tuples(st.just("fail_all")),
        st.tuples(st.just("request_ended"), st.sampled_from("abc")),
        st.tuples(st.just("workers_lost")),
        st.tuples(st.just("lost")),
        st.tuples(st.just("time"), st.floats(0, 8)),
    ),
    max_size=40,
)


class Model:
    """Records each load's possible ends."""

    def __init__(self):
        self.clock = ScriptedClock()
        self.loads = PendingLoads(range(2), self.clock, seconds=10)
        self.open, self.finished_ranks, self.bad = {}, {}, set()

    def begin(self, name):
        if not self.loads.is_busy(name):
            blocks = {"a": {0, 1}, "b": {2, 3}, "c": {4, 5}}[name]
            self.loads.begin(name, blocks)
            self.open[name], self.finished_ranks[name] = blocks, set()
            self.bad -= blocks

    def process(self, step, event, *args):
        if event == "finished":
            self.loads.finished(*args, step)
            self.finished_ranks.get(args[0], set()).add(args[1])
        elif event == "failed":
            self.loads.failed(frozenset(args))
            self.bad.update(args)
        elif event == "fail_all":
            self.loads.fail_all(step)
        elif event == "time":
            self.clock.now += args[0]
        elif event != "begin":
            getattr(self.loads, event)(*args)
        self.loads.pop_late()
        for name, ended in self.loads.end(step).items():
            blocks = self.open.pop(name)
            assert ended.invalid <= blocks
            if not ended.failed:
                assert self.finished_ranks[name] >= {0, 1}
                assert not self.bad & blocks


@given(events=EVENTS)
def test_each_load_ends_once_and_what_ends_well_all_ranks_have_finished(events):
    model = Model()
    for step, event in enumerate([*events, *[("time", 11)] * 3]):
        if event[0] == "begin":
            model.begin(event[1])
        assert set(model.loads.plan(step)) <= model.open.keys()
        if event[0] == "lost":
            model.loads.plan_lost(step)
        else:
            model.process(step, *event)
    assert not model.open
    assert not model.loads


class TestSaves:
    def test_blocks_are_kept_until_all_ranks_have_saved_them(self, clock):
        saves = Saves(frozenset([0, 1]), clock, 10)
        saves.begin("a")
        assert "a" in saves
        saves.finished("a", 0, 1)  # no plan has yet reported that it has ended
        saves.plan(2)
        saves.finished("a", 1, 2)
        assert saves.end() == ([], [])
        saves.finished("a", 0, 3)
        assert saves.end() == (["a"], [])
        assert not saves

    def test_and_no_longer_than_their_lease(self, clock):
        saves = Saves(frozenset([0, 1]), clock, 10)
        saves.begin("a")
        saves.plan(1)
        clock.now = 10
        assert saves.end() == ([], [])
        clock.now = 10.5
        assert saves.end() == (["a"], ["a"])

    def test_without_workers_nobody_reads_them(self, clock):
        saves = Saves(frozenset([0, 1]), clock, 10)
        saves.begin("a")
        saves.workers_lost()
        assert saves.end() == (["a"], [])
