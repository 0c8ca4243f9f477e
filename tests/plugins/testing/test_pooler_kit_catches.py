"""Poolers with one mistake each fail the rule that they break, with a helpful message."""

from __future__ import annotations

import pytest
from support.broken import poolers as broken
from support.kit_suites import (
    GENERAL,
    assert_fails,
    each_broken,
    label,
    messages_of,
    shorten,
    suite_tests,
)
from support.searching import kit_examples

from hardpoint.testing import PoolerSuite

# pooler, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.NoState, "shape", "shape", r"start\(\) gave 7, expected a PromptPooler"),
    (broken.WrongShape, "shape", "shape", r"gave a tensor \[\d+, 16\], expected \[16\]"),
    (broken.NoTensor, "shape", "shape", r"finish\(\) gave -?\d"),
    (broken.Fails, "shape", "exceptions", r"KeyError: 'vector' \(in finish"),
    (broken.DependsOnChunks, "chunks", "chunks", r"has another result in chunks of \d+, \d+"),
    (broken.SharesState, "alone", "alone", r"prompt \d of \d has another result than alone"),
    (broken.Remembers, "alone", "alone", r"another result than alone"),
    (broken.KeepsViews, "overwritten", "overwritten", "memory that was shown before"),
    (broken.Leaks, "resources", "resources", "elements of its attribute 'states' grew by"),
    (broken.LeavesThread, "close", "close", "still are: thread 'pooler'; expected none"),
    (broken.Multiplies, "wide", "wide", "has another result in chunks of|has another result than"),
    (broken.Zeros, "effect", "effect", "have the same results with other hidden states, expected"),
    (broken.InPlace, "reads_only", "reads only", r"update\(\) changed hidden in place, which are"),
    (broken.Slow, "speed", "speed", r"99th percentile .* is \d+ microseconds, expected at most b"),
    (broken.Sleeps, "speed", "waits", r"update\(.*\) waited 0.3 s without computing, expected at"),
    (broken.NeedsMore, "last", "last", r"without the first \d+ of \d+ tokens, the result is"),
]


LIMITED = {broken.Sleeps: {"max_wait_seconds": 0.1}, broken.Slow: {"budget_us_per_call": 1.0}}


def attributes(cls):
    """Return the attributes of a suite of a class."""
    return {"pooler": cls, **LIMITED.get(cls, {})}


@each_broken(BROKEN)
def test_a_broken_pooler_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, {"general.suite._CLOSE_SECONDS": 0.2})
    assert_fails(PoolerSuite, attributes(cls), test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Largest, broken.Newest], ids=label)
def test_correct_components_pass(cls):
    assert messages_of(PoolerSuite, {"pooler": cls, "examples": kit_examples()}) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(PoolerSuite) | GENERAL
