"""Counts of several processes: exact sums, limits, rates, notes and dead processes."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.process.forked_python import forked_python
from support.processes import ROOT

from hardpoint.builtin_plugins.server.access import counts as counts_module
from hardpoint.builtin_plugins.server.access.counts import Counts, SharedCounts, held


@pytest.fixture
def pair():
    """The counts of two processes, which here are one."""
    memory = SharedCounts.create(2)
    yield SharedCounts(memory, 0, 2), SharedCounts(os.dup(memory), 1, 2)
    os.close(memory)


def test_a_total_is_of_all_processes(pair):
    first, second = pair
    first.add("a", 2)
    second.add("a")
    second.add("b", 5)
    assert [counts.total("a") for counts in pair] == [3, 3]
    assert [counts.elsewhere("a") for counts in pair] == [1, 2]
    assert dict(first.items("")) == {"a": 3, "b": 5}
    first.add("a", -2)
    assert second.total("a") == 1


def test_a_limit_holds_for_all_together(pair):
    first, second = pair
    assert [first.add_below("a", 3), second.add_below("a", 3), first.add_below("a", 3)] == [
        True
    ] * 3
    assert not first.add_below("a", 3)
    assert not second.add_below("a", 3)
    first.add("a", -1)
    assert second.add_below("a", 3)


@pytest.mark.parametrize("shared", [False, True])
def test_a_rate_is_of_all_together(pair, shared):
    first, second = pair if shared else [Counts()] * 2
    waits = [counts.take_from_rate("alice", 3, 100.0) for counts in (first, second, first, second)]
    assert waits == [0, 0, 0, 20]
    assert second.take_from_rate("alice", 3, 110.0) == 10
    assert second.take_from_rate("alice", 3, 120.5) == 0
    assert first.take_from_rate("alice", 3, 120.5) == 20
    assert first.take_from_rate("bob", 1, 120.0) == 0


def test_notes_are_known_in_all(pair):
    first, second = pair
    assert second.notes == {}
    first.note("paused", "by an administrator")
    second.note("other", "text")
    assert first.notes == second.notes == {"paused": "by an administrator", "other": "text"}
    second.note("paused", None)
    assert first.notes == {"other": "text"}


def test_what_a_dead_process_held_is_given_back(pair):
    first, second = pair
    for counts in pair:
        counts.add(held("connections"), 4)
        counts.add("answered", 4)
    first.clear(1)
    assert (first.total(held("connections")), first.total("answered")) == (4, 8)
    assert second.elsewhere(held("connections")) == 4


def test_names_that_no_one_needs_make_room(pair, monkeypatch):
    first, second = pair
    monkeypatch.setattr(counts_module, "_NUM_ROWS", 64)
    first.add("kept", 7)
    for number in range(500):
        name = held(f"conversations of {number}")
        assert second.add_below(name, 1)
        second.add(name, -1)
        first.take_from_rate(f"client {number}", 1, float(number) - 1e9)
    assert [counts.total("kept") for counts in pair] == [7, 7]
    for number in range(47):
        first.add(f"{number}")
    with pytest.raises(MemoryError, match="have room for 48 counts, and need more"):
        first.add("more")


def test_long_names_are_told_apart(pair):
    first, second = pair
    first.add("x" * 200 + "1")
    second.add("x" * 200 + "2", 2)
    assert (second.total("x" * 200 + "1"), first.total("x" * 200 + "2")) == (1, 2)


CHILD = """
import os, sys
from hardpoint.builtin_plugins.server.access.counts import SharedCounts
counts = SharedCounts(os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2]), 4)
taken = sum(counts.add_below("a", 1000) for _ in range(500))
for _ in range(500):
    counts.add("b")
print(taken)
"""


def test_processes_at_the_same_time():
    memory = SharedCounts.create(4)
    path = f"/proc/{os.getpid()}/fd/{memory}"

    def count(column):
        arguments = ["-c", CHILD, path, str(column)]
        return int(forked_python().run(arguments, ROOT.parent, dict(os.environ)).stdout)

    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(count, range(4)))
    counts = SharedCounts(memory, 0, 4)
    assert sum(taken) == counts.total("a") == 1000
    assert counts.total("b") == 2000


def test_threads_at_the_same_time(pair):
    first, _ = pair

    def count():
        for _ in range(500):
            first.add("a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.total("a") == 2000
