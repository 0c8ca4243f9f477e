"""Components of many kinds that leave resources fail the rules of every suite."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

import pytest
from hypothesis import strategies as st
from support.broken import attention, models, ops, processors, samplers, speculators, tokenizers
from support.kit_suites import GENERAL, assert_fails, messages_of, shorten
from support.samples import leave_file, leave_thread

from hardpoint.testing import (
    AttentionBackendSuite,
    LogitsProcessorSuite,
    ModelSuite,
    OpsSuite,
    SamplerSuite,
    SpeculatorSuite,
    TokenizerSuite,
)
from hardpoint.testing.general import holdings
from hardpoint.testing.general.growth import check_growth
from hardpoint.testing.general.holdings import FileWatch, busy_thread
from hardpoint.testing.suite import Violation

# suite, attribute, right component, method of a use, further attributes
KINDS: list[tuple[Any, str, Any, str, dict[str, Any]]] = [
    (
        LogitsProcessorSuite,
        "processor",
        processors.Bias,
        "apply",
        {"arguments": st.just({"by": 1.0})},
    ),
    (SamplerSuite, "sampler", samplers.Gumbel, "sample", {}),
    (SpeculatorSuite, "speculator", speculators.LastPair, "propose", {}),
    (TokenizerSuite, "tokenizer", tokenizers.Bytes, "encode", {}),
    (OpsSuite, "ops", ops.Plain, "linear", {}),
    (AttentionBackendSuite, "backend", attention.Plain, "attend", {}),
    (ModelSuite, "model", models.Tiny, "forward", {"config": models.CONFIG}),
]


def keeping(cls, method):
    """Return a class with instances that keep a text of each call of a method."""
    seen = []

    def call(self, *args, **named):
        seen.append(f"call {len(seen)} of many" * 40)
        return getattr(cls, method)(self, *args, **named)

    return type("Keeps", (cls,), {method: call, "__module__": cls.__module__, "seen": seen})


def opening(cls, method):
    """Return a class that opens a file in each call of a method."""

    def call(self, *args, **named):
        leave_file()
        return getattr(cls, method)(self, *args, **named)

    return type("Opens", (cls,), {method: call, "__module__": cls.__module__})


def leaving(cls, _method):
    """Return a class with instances that leave a thread."""

    def begin(self, context):
        cls.__init__(self, context)
        leave_thread("left")

    return type("Leaves", (cls,), {"__init__": begin, "__module__": cls.__module__})


@pytest.mark.parametrize(
    ("change", "test", "pattern"),
    [
        (keeping, "resources", r"bytes of Python objects grew by \d+ .* in line \d+ of"),
        (opening, "resources", r"there are \d+ more open files and pipes after"),
        (leaving, "close", "still are: thread 'left'; expected none"),
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_what_stays_is_caught(kind, change, test, pattern, monkeypatch):
    suite, attribute, right, method, more = kind
    shorten(monkeypatch, {"general.suite._CLOSE_SECONDS": 0.2})
    cls = change(right, method)
    assert_fails(suite, {attribute: cls, "examples": 0.4, **more}, test, test, pattern)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_right_components_pass(kind):
    suite, attribute, right, _, more = kind
    attributes_of_kind = {attribute: right, "examples": 0.4, **more}
    assert messages_of(suite, attributes_of_kind, sorted(GENERAL)) == {}


class Queue:
    """Writes its items in a thread, more slowly than they come."""

    def __init__(self):
        self.items, self.end, self.left = collections.deque(), threading.Event(), []
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.thread.start()

    def write(self):
        while not self.end.wait(0.001):
            if self.items:
                self.items.popleft()

    def close(self):
        self.end.set()
        self.thread.join()


def test_a_thread_that_catches_up_is_no_growth():
    known, queue = threading.enumerate(), Queue()
    try:
        check_growth(queue, queue.items.append, 100, 32, known)
        with pytest.raises(Violation, match="'left' grew by 100 from 600"):
            check_growth(queue, queue.left.append, 100, 32, known)
    finally:
        queue.close()


def test_a_table_that_gets_its_next_size_is_no_growth():
    """A cache fills up in four stages, and then one stage makes a table larger."""
    cache, table = [], []

    def use(number):
        if number < 500:
            cache.append(bytes(100))
        elif number == 550:
            table.append(bytes(7_000_000))

    check_growth(object(), use, 100, 32, set(threading.enumerate()))
    assert table


def test_names_that_the_interpreter_caches_are_no_growth():
    """C code looks attributes up by new strings, and a cache of the interpreter keeps them."""

    def use(number):
        names = ["".join(("bit", "_length")) for _ in range(2 * number)]  # each at a new address
        return [getattr(1, name) for name in names]

    check_growth(object(), use, 40, 32, set(threading.enumerate()))


def test_files_of_other_threads_are_not_the_components(tmp_path):
    """An engine that was closed may still keep hashes of its files in the cache folder."""
    begun = threading.Event()

    def write(path):
        begun.wait()
        path.mkdir()

    other = threading.Thread(target=write, args=[tmp_path / "other"])
    other.start()
    watch = FileWatch()
    with watch.watching():
        own = threading.Thread(target=write, args=[tmp_path / "own"])
        own.start()
        begun.set()
        for thread in (other, own):
            thread.join()
    assert watch.left(lambda _path: False) == [str(tmp_path / "own")]


@pytest.fixture
def begin():
    """Return a function that starts threads, and returns those from before."""
    is_ended, threads = threading.Event(), []

    def start(run, count):
        before = set(threading.enumerate())
        for n in range(count):
            threads.append(threading.Thread(target=run, args=(is_ended,), name=f"new-{n}"))
            threads[-1].start()
        return before

    yield start
    is_ended.set()
    for thread in threads:
        thread.join()


def spin(is_ended):
    while not is_ended.is_set():
        pass


def test_threads_that_share_the_interpreter_are_busy(begin):
    assert busy_thread(begin(spin, 4), 0.2) is not None


def test_threads_that_wait_are_not_busy(begin):
    assert busy_thread(begin(threading.Event.wait, 4), 60.0) is None


@pytest.mark.parametrize(
    ("spent", "state", "busy"),
    [
        (0.0, "R", "new-0"),  # it waits for a processor since before the window
        (0.05, "S", "new-0"),  # it waits for the interpreter, as this thread is called late
        (0.02, "S", None),
    ],
)
def test_a_late_reading_changes_nothing(spent, state, busy, begin, tmp_path, monkeypatch):
    before = begin(threading.Event.wait, 1)
    (thread,) = set(threading.enumerate()) - before
    (folder := tmp_path / str(thread.native_id)).mkdir()
    (folder / "stat").write_text(f"{thread.native_id} (new) {state} 1")
    ran, sleep = folder / "schedstat", time.sleep
    ran.write_text("0 0 1")

    def sleep_late(seconds):
        sleep(4 * seconds)
        ran.write_text(f"{round(spent * 1e9)} 0 1")

    monkeypatch.setattr(holdings, "_TASKS", str(tmp_path))
    monkeypatch.setattr(holdings.time, "sleep", sleep_late)
    assert busy_thread(before, 0.0) == busy
