"""Components that cannot be changed live fail the rule of their kind, with a helpful message."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from support.broken import processors
from support.broken.step_parts import Good
from support.kit_suites import shorten
from support.samples import Sample

from hardpoint.plugins import StatSink
from hardpoint.testing import LogitsProcessorSuite, StatSinkSuite, StepPartSuite

BUILT: list[str] = []
TICKERS: dict[str, threading.Event] = {}


class Quiet(Sample, StatSink, contract=1):
    """A sink with a thread, which ends with it."""

    def __init__(self, context):
        super().__init__(context)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ended.wait, name="ticker")
        self._thread.ended = self._ended
        self._thread.start()

    def record(self, stats):
        """Do nothing."""

    def close(self):
        """End the thread."""
        self._ended.set()
        self._thread.join()


class Counts(Quiet):
    """Counts instances in its class."""

    built: ClassVar[int] = 0

    def __init__(self, context):
        super().__init__(context)
        type(self).built += 1


class Registers(Quiet):
    """Registers instances in its module."""

    def __init__(self, context):
        super().__init__(context)
        BUILT.append(self.name)


class Shares(Quiet):
    """Has one thread for all instances, which ends with any."""

    def __init__(self, context):
        StatSink.__init__(self, context)
        if "event" not in TICKERS:
            TICKERS["event"] = threading.Event()
            threading.Thread(target=TICKERS["event"].wait, name="shared").start()

    def close(self):
        """End the thread of all."""
        TICKERS["event"].set()
        [thread.join() for thread in threading.enumerate() if thread.name == "shared"]


class Leaves(Quiet):
    """Leaves its thread behind."""

    def close(self):
        """End nothing."""


class Large(Quiet):
    """Tells too much."""

    def dump_state(self):
        """Return more than may be."""
        return {"all": "x" * 5000}


class Objects(Quiet):
    """Reports a state that is no plain data."""

    def dump_state(self):
        """Return an object."""
        return {"thread": self._thread}


class Registering(processors.Bias):
    """A processor that notes its instances in its class."""

    known: ClassVar[list[str]] = []

    def __init__(self, context):
        super().__init__(context)
        self.known.append(self.name)


class LiveGood(Good):
    """Says that it changes live."""

    changes_live = True


class RegisteringPart(LiveGood):
    """Notes its instances in its class."""

    known: ClassVar[list[str]] = []

    def __init__(self, context):
        super().__init__(context)
        self.known.append(self.name)


def check(suite, **attributes):
    """Run the check of a class."""
    type("Test", (suite,), attributes)().test_live_change()


@pytest.fixture(autouse=True)
def ended():
    yield
    for event in TICKERS.values():
        event.set()
    TICKERS.clear()
    for thread in threading.enumerate():
        if thread.name == "ticker":
            thread.ended.set()


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (Counts, r"Counts.built was 1, and 2 once a second one had ended"),
        (Registers, r"test_live_change_kit_catches.BUILT was a list of 1, and a list of 2"),
        (Shares, "the end of a second one ended the thread 'shared' of the first"),
        (Leaves, r"the thread 'ticker' runs on after close\(\)"),
        (Large, r"dump_state\(\) returned .*\n.*a mapping of at most 4096 bytes"),
        (Objects, r"dump_state\(\) cannot be JSON: "),
    ],
)
def test_sinks(sink, words, monkeypatch):
    if sink is Leaves:
        shorten(monkeypatch, {"component_suite._THREADS_END_S": 0.1})
    BUILT.clear()
    Counts.built = 0
    with pytest.raises(pytest.fail.Exception, match=rf"(?s)live changes: .*{words}"):
        check(StatSinkSuite, sink=sink)


def test_good_ones():
    check(StatSinkSuite, sink=Quiet)
    check(LogitsProcessorSuite, processor=processors.Bias, arguments=st.just({"by": 1.0}))
    check(StepPartSuite, part=LiveGood)


def test_a_processor_and_a_part():
    with pytest.raises(pytest.fail.Exception, match=r"Registering\.known was a list of"):
        check(LogitsProcessorSuite, processor=Registering, arguments=st.just({"by": 1.0}))
    with pytest.raises(pytest.fail.Exception, match=r"RegisteringPart\.known was a list of"):
        check(StepPartSuite, part=RegisteringPart)


def test_a_part_that_does_not_state_it_is_left_out():
    with pytest.raises(pytest.skip.Exception, match="does not set `changes_live = True`"):
        check(StepPartSuite, part=Good)
