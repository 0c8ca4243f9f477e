"""Activation taps with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from support.broken import taps as broken
from support.kit_suites import (
    GENERAL,
    assert_fails,
    each_broken,
    label,
    messages_of,
    shorten,
    suite_tests,
)

from hardpoint.testing import ActivationTapSuite

# tap, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.Neither, "overrides", "overrides", r"neither read\(\) nor change\(\) nor exits\(\)"),
    (broken.NoSites, "sites", "sites", r"sites\(\) gave \[\]"),
    (broken.WrongPlace, "sites", "sites", r"sites\(\) gave \[TapSite\(layer=0, place='logits'"),
    (broken.Sums, "shape", "shape", r"read\(\) gave \[16\], expected \[\d+, ...\]"),
    (broken.Cuts, "shape", "shape", r"change\(\) gave \[\d+, 3\], expected \[\d+, 16\]"),
    (broken.Infinite, "shape", "shape", r"change\(\) gave numbers that are not finite"),
    (broken.Fails, "shape", "exceptions", r"KeyError: 'direction' \(in read"),
    (broken.Centred, "alone", "alone", r"read\(\) gave other numbers for \d requests? than"),
    (broken.Counts, "again", "again", r"read\(\) gave other numbers when it was called again"),
    (broken.InPlace, "in_place", "in_place", r"change\(\) changed values in place"),
    (broken.SortsLayers, "in_place", "in_place", r"read\(\) changed rows in place, which are now"),
    (
        broken.KeepsArguments,
        "alone",
        "alone",
        r"change\(\) gave other numbers for \d requests than",
    ),
    (broken.KeepsByLayer, "alone", "alone", r"change\(\) gave other numbers for \d requests than"),
    (
        broken.Multiplies,
        "wide",
        "wide",
        r"read\(\) gave other .* of \d+ differ, by up to .*same bits",
    ),
    (
        broken.Adds,
        "wide",
        "wide",
        r"change\(\) gave other .* differ, by up to .*; expected the same",
    ),
    (
        broken.Nothing,
        "effect",
        "effect",
        r"read\(\) gave nothing that depends on the hidden states",
    ),
    (broken.Zeros, "effect", "effect", r"read\(\) gave nothing that depends on the hidden states"),
    (broken.Identity, "effect", "effect", r"change\(\) left them, and exits\(\) named no token"),
    (broken.Leaks, "resources", "resources", r"elements of its attribute 'seen' grew by \d+ from"),
    (
        broken.LeaksElsewhere,
        "resources",
        "resources",
        r"bytes of .* \(allocated in line \d+ of taps",
    ),
    (broken.LeaksOneTensor, "resources", "resources", r"bytes of tensors grew by \d+ from \d+ in"),
    (broken.KeepsFilesOpen, "resources", "resources", r"there are \d+ more open files .* after"),
    (
        broken.BeginsThreads,
        "resources",
        "resources",
        "more threads after .* such as thread 'tap'; ex",
    ),
    (
        broken.Spins,
        "resources",
        "idle",
        "the thread 'poller' ran all the time for .* expected it to",
    ),
    (broken.Pins, "resources", "settings", "changed the processors .* may run on: it was {0, 1"),
    (
        broken.SetsThreads,
        "resources",
        "settings",
        r"changed torch's number of threads from \d+ to \d+",
    ),
    (broken.Seeds, "resources", "settings", "it changed torch's random state"),
    (broken.LeavesThread, "close", "close", "still are: thread 'writer'; expected none"),
    (broken.LeavesFileOpen, "close", "close", "still are: .*; expected none"),
    (
        broken.LeavesTemporaryFile,
        "close",
        "close",
        r"after close\(\) there is the file '.*tap-\d+.log'",
    ),
    (broken.LeavesProcess, "close", "close", "still are: .*child process; expected none"),
    (broken.ClosesOnce, "close", "close", r"a second close\(\) raised AttributeError"),
    (
        broken.Sleeps,
        "speed",
        "waits",
        r"read\(.*\) waited 0.3 s without computing, expected at most",
    ),
    (
        broken.Slow,
        "speed",
        "speed",
        r"99th percentile .* is \d+ microseconds, expected at most bud",
    ),
    (broken.OneKey, "cache_key", "cache_key", "have one key and two effects"),
    (broken.ExitsByNumber, "shape", "shape", r"exits\(\) gave torch.float32 \[\d+\], expected to"),
    (
        broken.ExitsTogether,
        "alone",
        "alone",
        r"exits\(\) gave other numbers for \d requests? than",
    ),
    (broken.ExitsNowhere, "effect", "effect", r"and exits\(\) named no token; expected an effect"),
    (broken.ExitsWithOneKey, "cache_key", "cache_key", "have one key and two effects"),
    (broken.TextKey, "cache_key", "cache_key", r"cache_key\(\) gave 'scaled', expected bytes"),
]

LIMITED = {broken.Sleeps: {"max_wait_seconds": 0.1}, broken.Slow: {"budget_us_per_call": 1.0}}
ARGUMENTS = st.builds(dict, factor=st.sampled_from([0.5, 3.0]), layer=st.integers(0, 3))


def attributes(cls):
    """Return the attributes of a suite of a class."""
    takes_some = issubclass(cls, broken.Scaled | broken.Exits)
    return (
        {"tap": cls, "examples": 0.4}
        | ({"arguments": ARGUMENTS} if takes_some else {})
        | LIMITED.get(cls, {})
    )


@each_broken(BROKEN)
def test_a_broken_tap_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    limits = {"general.suite._BUSY_SECONDS": 0.2, "general.suite._CLOSE_SECONDS": 0.2}
    shorten(monkeypatch, limits)
    assert_fails(ActivationTapSuite, attributes(cls), test, rule, pattern)


@pytest.mark.parametrize(
    "cls",
    [broken.Norms, broken.Scaled, broken.Exits, broken.ExitsOrNone, broken.MultipliesRows],
    ids=label,
)
def test_correct_components_pass(cls):
    assert messages_of(ActivationTapSuite, attributes(cls)) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(ActivationTapSuite) | GENERAL
