"""The pytest plugin that turns tests of a suite into records."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hardpoint.testing.component_suite import OPTIONS
from hardpoint.testing.pace import EVIDENCE
from hardpoint.testing.running.step_parts.effect import NO_METHODS
from hardpoint.testing.suite import NOTHING_DRAWN

from .made_suite import GUIDE, NEEDS
from .request import check_record

Send = Callable[[Mapping[str, Any]], None]

_UNDECIDED = (NEEDS, "this machine ", "undecidable ", "the engine cannot import")
"""Begin the reasons of checks that this run could not make; others do not apply to the class."""

_REFUSED = re.compile(
    rf"^(?:(?<=  rule: {OPTIONS.text}\n)  observed: "
    r"|  observed: (?:no engine can be opened with it: |.*\b(?:ConfigError|ModelError): )"
    r"|E +\S*\b(?:ConfigError|ModelError): ).*$",
    re.M,
)
"""In a report: a requirement of the component is missing; the rule was neither kept nor broken."""

_LACKING = re.compile(
    r"its constructor raised ImportError: (.*)$|^  observed: (.*\bConnection refused\b.*)$", re.M
)
"""In a report: a library, or a server, is not there; a slip is another class."""

_UNDRAWN = re.compile(rf"^  observed: {NOTHING_DRAWN}: (.*)\n  fix: (.*)$", re.M)
"""In a report: nothing was drawn with which the component does anything; only its author can."""

_REPLAY = re.compile(r"^( *replay: HARDPOINT_SEED=\d+)( HARDPOINT_EXAMPLES=\S+)? pytest .*$", re.M)


class CheckRecorder:
    """Sends a record of each test."""

    def __init__(
        self,
        send: Send,
        expected: Mapping[str, str],
        name: str,
        *,
        has_own_suite: bool,
    ) -> None:
        """Create a recorder.

        Args:
            expected: reasons of expected failures by test.
            name: the component to check again, for replays.
            has_own_suite: whether the author's suite gives options, arguments, files and samples,
                which are drawn from their types without it, so that one with an effect may be rare.
        """
        self._send = send
        self._expected = expected
        self._name = name
        self._has_own_suite = has_own_suite
        self._claims: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Read the claims, mark expected failures, announce the checks."""
        for item in items:
            self._claims[item.nodeid] = _claim(getattr(item, "obj", None), item.name)
            if reason := self._expected.get(item.name.partition("[")[0]):
                item.add_marker(pytest.mark.xfail(reason=reason))
        self._send(
            {
                "record": "plan",
                "checks": [(item.name, self._claims[item.nodeid]) for item in items],
            }
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report which check runs now."""
        EVIDENCE.clear()
        self._send({"record": "begin", "check": nodeid.rpartition("::")[2]})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a record once a test is decided."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2]
        outcome, reason, seen = self._judge(name, report)
        self._send(
            check_record(
                name,
                self._claims[report.nodeid],
                outcome,
                reason=reason,
                evidence=seen,
                seconds=report.duration,
            )
        )

    def _judge(self, name: str, report: pytest.TestReport) -> tuple[str, str, str]:
        expected = getattr(report, "wasxfail", None)
        if report.passed:
            reason = f"it was expected to fail: {expected}" if expected is not None else ""
            return "proved", reason, _figures()
        if report.skipped and expected is not None:
            return "expected_failure", expected.removeprefix("reason: "), self._message(report)
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            reason = report.longrepr[2].removeprefix("Skipped: ")
            decided = not reason.startswith(_UNDECIDED)
            return ("not_applicable" if decided else "not_proved"), reason, ""
        message = self._message(report)
        if lacking := _LACKING.search(message):
            return "not_proved", f"this machine lacks a requirement: {lacking[1] or lacking[2]}", ""
        if self._has_own_suite:
            return "failed", "", message
        if name == "test_effect" and NO_METHODS not in message:
            reason = f"{NEEDS}`arguments` or `params` with an effect; the drawn ones had none"
            return "not_proved", reason, message
        if refused := _REFUSED.search(message):
            reason = f"{NEEDS}options, files or a configuration that it accepts; it refuses these"
            return "not_proved", reason, refused[0].strip()
        if undrawn := _UNDRAWN.search(message):
            reason = f"{NEEDS}a suite of its author: {undrawn[1]}; {undrawn[2]} ({GUIDE})"
            return "not_proved", reason, ""
        return "failed", "", message

    def _message(self, report: pytest.TestReport) -> str:
        text = report.longreprtext.strip()
        return _REPLAY.sub(rf"\1\2 hardpoint plugins check {self._name}", text)


def _claim(test: Any, name: str) -> str:
    doc = inspect.getdoc(test) or ""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return paragraph or name.removeprefix("test_").replace("_", " ")


def _figures() -> str:
    evidence = EVIDENCE
    parts = [f"{evidence.num_cases} cases"] if evidence.num_cases else []
    parts += [
        f"{cost * 1e6:.3g} us of {budget * 1e6:.6g} us allowed" for cost, budget in evidence.costs
    ]
    if evidence.p99_seconds is not None:
        parts.append(f"p99 of a call {evidence.p99_seconds * 1e6:.3g} us")
    return ", ".join(parts)
