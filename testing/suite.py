"""What all conformance suites share: no test may be replaced, and failures look alike."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import pytest

from .searching import Found
from .seeds import replay_line
from .violations import Violation

__all__ = ["fail", "refuse_replaced_tests", "replayed"]


def refuse_replaced_tests(derived: type, suite: type) -> None:
    """Refuse a class that replaces a test of its suite: a suite that was bent proves nothing.

    Raises:
        Violation: it does, without a reason.
    """
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        own = getattr(derived, name)
        if name.startswith("test_") and own is not test and not _expected_to_fail(own):
            raise Violation(
                f"{derived.__name__} replaces {name}",
                "give the additional test another name; to leave a rule out, override its "
                "test with one that is marked pytest.mark.xfail(reason=...)",
            )


def fail(component: type, rule: str, violation: Violation, case: str = "") -> NoReturn:
    """Fail the test that runs: say which class breaks which rule, and what to do about it.

    Args:
        case: further lines, from `replayed`.
    """
    pytest.fail(
        f"{component.__module__}.{component.__qualname__} breaks a rule.\n"
        f"  rule: {rule}\n  saw: {violation.saw}\n  do: {violation.do}{case}",
        pytrace=False,
    )


def replayed(found: Found, told: str) -> str:
    """Return the lines that show a case, told in words, and how to see it again."""
    return f"\n  case:\n{told}\n  replay: {replay_line(found.seed)}"


def _expected_to_fail(test: Any) -> bool:
    marks = getattr(test, "pytestmark", [])
    return any(mark.name in ("xfail", "skip") and mark.kwargs.get("reason") for mark in marks)
