"""Threads for calls that may raise, or never return."""

from __future__ import annotations

import threading
import time

import pytest
from support.kv_stores import scripted_clock
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_connectors.threads import TaskThreads

NAME = "KVTested"


def alive() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture
def reports():
    return []


@pytest.fixture
def make(reports):
    """Make threads, which are closed at the end."""
    made: list[TaskThreads] = []

    def of(count: int = 2, timeout: float = 60.0) -> TaskThreads:
        made.append(TaskThreads(NAME, count, timeout, reports.append))
        return made[-1]

    yield of
    for threads in made:
        threads.close(1.0)
    wait_until(lambda: not alive(), what="the end of the threads")


@pytest.fixture
def clock(monkeypatch):
    return scripted_clock(monkeypatch, "kv_connectors.threads")


def test_all_tasks_run_in_so_many_threads(make):
    threads, lock, most, running, ran = make(3), threading.Lock(), 0, 0, []
    meeting = threading.Barrier(3)

    def task(index):
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        if index < 3:
            meeting.wait(60.0)
        with lock:
            running -= 1
            ran.append(index)

    for index in range(60):
        threads.submit(lambda index=index: task(index))
    assert threads.drain(60.0)
    assert sorted(ran) == list(range(60))
    assert most == 3
    assert alive() == 3


def test_without_tasks_there_are_no_threads(make):
    threads = make()
    assert threads.drain(0.0)
    assert alive() == 0
    threads.submit(lambda: None)
    assert threads.drain(60.0)
    assert alive() == 1


def test_in_order_but_for_those_that_are_first(make):
    threads, hold, ran = make(1), threading.Event(), []
    threads.submit(lambda: hold.wait(60.0))
    for name in "abc":
        threads.submit(lambda name=name: ran.append(name))
    threads.submit(lambda: ran.append("first"), first=True)
    hold.set()
    assert threads.drain(60.0)
    assert ran == ["first", "a", "b", "c"]


def test_a_task_that_raises_is_reported_and_its_thread_goes_on(make, reports):
    threads, ran = make(1), []

    def fail(error):
        raise error

    for error in (ValueError("no such luck"), SystemExit("away"), KeyboardInterrupt()):
        threads.submit(lambda error=error: fail(error))
    threads.submit(lambda: ran.append(1))
    assert threads.drain(60.0)
    assert ran == [1]
    assert reports == [
        f"{NAME}: ValueError: no such luck",
        f"{NAME}: SystemExit: away",
        f"{NAME}: KeyboardInterrupt",
    ]
    assert alive() == 1


def test_a_thread_that_is_stuck_is_replaced_and_ends_when_it_returns(make, clock):
    threads, hold, begun, ran = make(1, timeout=10.0), threading.Event(), [], []
    threads.submit(lambda: begun.append(1) or hold.wait(60.0))
    wait_until(lambda: begun)
    clock.advance(10.1)
    threads.submit(lambda: ran.append(1))
    wait_until(lambda: ran, what="the task behind the one that is stuck")
    assert alive() == 2
    hold.set()
    wait_until(lambda: alive() == 1, what="the end of the thread that was stuck")
    threads.submit(lambda: ran.append(2))
    assert threads.drain(60.0)
    assert ran == [1, 2]


def test_there_are_only_so_many_stuck_threads(make, clock):
    threads, hold, begun = make(1, timeout=10.0), threading.Event(), []
    for number in range(30):
        threads.submit(lambda: begun.append(1) or hold.wait(60.0))
        wait_until(lambda number=number: len(begun) == min(number + 1, 8))
        clock.advance(10.1)
    assert alive() == 8
    hold.set()
    assert threads.drain(60.0)


def no_thread(_):
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_does_not_count(make, monkeypatch):
    threads, ran = make(2), []
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", no_thread)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                threads.submit(lambda: ran.append("refused"))
        assert threads.drain(0.0)
    for index in range(10):
        threads.submit(lambda index=index: ran.append(index))
    threads.close(60.0)
    assert sorted(ran) == list(range(10))


def test_a_task_waits_for_a_thread_that_runs_if_no_other_can_start(make, monkeypatch):
    threads, hold, ran = make(2), threading.Event(), []
    threads.submit(lambda: hold.wait(60.0))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    threads.submit(lambda: ran.append(1))
    hold.set()
    assert threads.drain(60.0)
    assert ran == [1]


def test_drain_ends_in_time(make):
    threads, hold = make(1, timeout=60.0), threading.Event()
    threads.submit(lambda: hold.wait(60.0))
    began = time.monotonic()
    assert not threads.drain(0.05)
    assert time.monotonic() - began < 30.0
    hold.set()
    assert threads.drain(60.0)


def test_close_runs_what_there_is_and_takes_no_more(make):
    threads, ran = make(2), []
    for index in range(20):
        threads.submit(lambda index=index: ran.append(index))
    threads.close(60.0)
    assert sorted(ran) == list(range(20))
    assert alive() == 0
    threads.submit(lambda: ran.append("late"))
    assert threads.drain(1.0)
    assert "late" not in ran


def test_close_leaves_a_stuck_thread_behind(make):
    threads, hold, ran = make(1, timeout=60.0), threading.Event(), []
    threads.submit(lambda: hold.wait(60.0))
    threads.submit(lambda: ran.append(1))
    began = time.monotonic()
    threads.close(0.05)
    assert time.monotonic() - began < 30.0
    hold.set()
    wait_until(lambda: not alive())
    assert ran == []
