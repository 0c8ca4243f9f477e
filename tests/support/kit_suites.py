"""Results of a suite of the conformance kit for a component: for the kit's own tests."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.testing import OutputParserSuite, pace
from hardpoint.testing.general.suite import GeneralSuite
from hardpoint.testing.kv import watch
from hardpoint.testing.running.step_parts import session
from support.samples import CLOCK
from support.searching import searches_long

SEED = 20_240_601

GENERAL = {"resources", "close"}
"""Tests of every suite whose component is built and used without an engine."""


def label(value: object) -> str:
    """Return the label of a parameter in a test's id."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
    return name if name.isidentifier() else ""


def suite_tests(suite: type) -> set[str]:
    """Return the names of a suite's own tests, without `test_`.

    `test_live_change` and `GENERAL`, which many suites share, have samples of their own.
    """
    names = {name[5:] for name, _ in inspect.getmembers(suite) if name.startswith("test_")}
    return names - {"live_change"} - _general_tests(suite)


def _general_tests(suite: type) -> set[str]:
    """Return the tests of `GENERAL` that a suite has as they are."""
    return {
        name
        for name in GENERAL
        if getattr(suite, f"test_{name}", None) is getattr(GeneralSuite, f"test_{name}")
    }


def timed_tests(suite: type) -> set[str]:
    """Return the names of a suite's tests with a verdict that depends on the machine's speed."""
    names = {"speed", "time"} | ({"linear"} if suite is OutputParserSuite else set())
    return suite_tests(suite) & names


def untimed_tests(suite: type) -> set[str]:
    """Return the names of a suite's other tests."""
    return (suite_tests(suite) | _general_tests(suite)) - timed_tests(suite)


def each_broken(
    samples: Iterable[Sequence[Any]], names: Sequence[str] = ("cls", "test", "rule", "pattern")
) -> pytest.MarkDecorator:
    """Return a decorator for a test of broken samples.

    The first one of each test and of each rule of a suite always runs.

    Args:
        samples: tuples that end with the component, the suite's test that fails, the rule and a
            pattern of the message; they may begin with the suite.
        names: parameters of the test.
    """
    seen: set[tuple[Any, ...]] = set()
    parameters = []
    for sample in samples:
        suite, (test, rule, _) = filter(inspect.isclass, sample[:-4]), sample[-3:]
        where = tuple(suite)
        shown = {(*where, "test", test), (*where, "rule", rule.strip("()").partition("|")[0])}
        marks = [pytest.mark.nightly] if shown <= seen else []
        seen |= shown
        parameters.append(pytest.param(*sample, marks=marks))
    return pytest.mark.parametrize(names, parameters, ids=label)


def shorten(monkeypatch: pytest.MonkeyPatch, limits: Mapping[str, float]) -> None:
    """Set limits of waits, by their names in `hardpoint.testing`, for events that never come."""
    for name, seconds in limits.items():
        monkeypatch.setattr(f"hardpoint.testing.{name}", seconds)


def attributes_of(attribute: str, cls: type) -> dict[str, object]:
    """Return the attributes of a suite for a component: itself, and its ARGUMENTS if it has any."""
    arguments = {"arguments": cls.ARGUMENTS} if hasattr(cls, "ARGUMENTS") else {}
    return {attribute: cls, **arguments}


def message_of(suite: type, attributes: Mapping[str, object], test: str) -> str | None:
    """Return the message with which a test fails; None if it passes or is skipped."""
    instance = type("TestComponent", (suite,), {"replay_seed": SEED, **attributes})()
    try:
        getattr(instance, f"test_{test}")()
    except pytest.skip.Exception:
        return None
    except pytest.fail.Exception as failure:
        return str(failure)
    return None


def messages_of(
    suite: type, attributes: Mapping[str, object], tests: Iterable[str] | None = None
) -> dict[str, str]:
    """Return the messages of the tests that fail.

    Without `tests`, all run that measure no time; those of `GENERAL` only with `--all`.
    """
    if tests is None:
        tests = untimed_tests(suite) - (set() if searches_long() else _general_tests(suite))
    messages = {test: message_of(suite, attributes, test) for test in tests}
    return {test: message for test, message in messages.items() if message is not None}


@contextmanager
def scripted_clock() -> Iterator[None]:
    """Let suites measure the time that samples `spend`."""
    with pytest.MonkeyPatch.context() as patch:
        spent, passed = CLOCK.spent, CLOCK.passed
        patch.setattr(pace, "time", SimpleNamespace(process_time=spent, perf_counter=spent))
        patch.setattr(pace, "_DELAYS", Path("no delays"))
        patch.setattr(watch, "time", SimpleNamespace(monotonic=passed))
        patch.setattr(
            session, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=passed)
        )
        yield


def assert_fails(
    suite: type, attributes: Mapping[str, object], test: str, rule: str, pattern: str
) -> None:
    """Assert that a test names the component, its rule (a pattern), observation and remedy."""
    with scripted_clock():
        message = message_of(suite, attributes, test)
    assert message is not None, f"{test} let it pass"
    subjects = [a for a in attributes.values() if isinstance(a, type)]
    names = "|".join(re.escape(f"{cls.__module__}.{cls.__name__}") for cls in subjects) or ".+"
    assert re.match(f"(?:{names}) breaks a rule.\n  rule: (?:{rule})", message), message
    assert re.search(pattern, message), message
    assert "\n  fix: " in message


def assert_tests_builtins(
    kind: str,
    attribute: str,
    namespace: Mapping[str, object],
    has_suite: Callable[[object], bool] = lambda _builtin: True,
) -> None:
    """Assert that the suites of a test module test every built-in component of a kind.

    Args:
        attribute: attribute of a suite that has its component.
        namespace: the test module's globals().
        has_suite: whether the suite is for a component.
    """
    points = entry_points(group=f"hardpoint.{kind}")
    builtins = {point.load() for point in points if point.value.startswith("hardpoint.")}
    suites = [c for name, c in namespace.items() if name.startswith("Test") and inspect.isclass(c)]
    builtins = set(filter(has_suite, builtins))
    assert builtins
    assert builtins <= {getattr(suite, attribute, None) for suite in suites}
