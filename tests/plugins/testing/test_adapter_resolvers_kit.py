"""Adapter resolvers with one mistake each fail the rule that they break; right ones pass."""

from __future__ import annotations

import pytest
from support.broken import adapter_resolvers as broken
from support.kit_suites import (
    GENERAL,
    assert_fails,
    each_broken,
    label,
    messages_of,
    shorten,
    suite_tests,
)

from hardpoint.builtin_plugins.adapters.folder import Folder
from hardpoint.testing import AdapterResolverSuite

# resolver, test that it fails, rule, pattern of the message
BROKEN = [
    (broken.NoContract, "contract", "contract", "add `contract = 1` to its class body"),
    (broken.Strings, "known", "result", r"resolve\('sql'\) returned '/.*, expected a Path, a LoRA"),
    (broken.Relative, "known", "result", r"returned 'sql', expected an absolute path"),
    (broken.OfAnotherName, "known", "result", "returned 'SQL', expected the adapter 'sql'"),
    (broken.Once, "known", "known", r"resolve\('sql'\) found None, expected a folder with adapter"),
    (broken.Joins, "inside", "inside", r"resolve\('../outside'\) found .*, which is outside of"),
    (broken.Flattens, "inside", "inside", r"resolve\('planted'\) found .*, which is outside of"),
    (broken.Demands, "names", "names", r"resolve\('..'\) raised KeyError: '..'"),
    (broken.AnyName, "names", "names", r"resolve\('..'\) found .*, which is no adapter"),
    (broken.Waits, "known", "time", r"resolve\('absent'\) took \d.* s, `max_seconds` is 0.2"),
    (broken.RemembersTheLast, "threads", "threads", "in 8 threads at once, it found"),
    (broken.RemembersUnknown, "later", "later", r"resolve\('sql'\) found None for an adapter that"),
    (broken.RemembersAll, "resources", "resources", "elements of its attribute 'asked' grew by"),
    (broken.LeavesThread, "close", "close", "still are: thread 'watcher'; expected none"),
    (
        broken.Waits,
        "speed",
        "waits",
        r"resolve\(.*\) waited 0.3 s without computing, expected at m",
    ),
    (
        broken.Slow,
        "speed",
        "speed",
        r"99th percentile .* is \d+ microseconds, expected at most bud",
    ),
    (broken.Indexes, "reads_only", "reads only", r"resolving changed \['index.json'\]"),
]
LIMITED = {
    (broken.Waits, "known"): {"max_seconds": 0.2},
    (broken.Waits, "speed"): {"max_wait_seconds": 0.1},
    (broken.Slow, "speed"): {"budget_us_per_call": 1.0},
}
OFFERED = {"known": broken.KNOWN, "provide": broken.provide}


class TestFolder(AdapterResolverSuite):
    resolver = Folder
    known = broken.KNOWN
    provide = broken.provide


@each_broken(BROKEN)
def test_a_broken_resolver_fails_its_rule(cls, test, rule, pattern, monkeypatch):
    shorten(monkeypatch, {"general.suite._CLOSE_SECONDS": 0.2})
    limit = LIMITED.get((cls, test), {})
    assert_fails(AdapterResolverSuite, {"resolver": cls, **OFFERED, **limit}, test, rule, pattern)


@pytest.mark.parametrize("cls", [broken.Table, broken.Requests, broken.Looks], ids=label)
def test_correct_components_pass(cls):
    assert messages_of(AdapterResolverSuite, {"resolver": cls, **OFFERED}) == {}


def test_every_test_catches_a_component():
    assert {test for _, test, _, _ in BROKEN} == suite_tests(AdapterResolverSuite) | GENERAL
