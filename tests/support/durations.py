"""Durations and outcomes of the tests of a run, which scripts/durations makes tables of."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest


class Durations:
    """A pytest plugin, for the process that has the reports of all workers."""

    def __init__(self, path: Path) -> None:
        """Start the clock; the file is written at the end of the session."""
        self._path = path
        self._seconds: Counter[str] = Counter()
        self._outcomes: dict[str, str] = {}
        self._started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add set-up, call or tear-down of a test."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.skipped or report.failed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be collected."""
        if report.failed:
            self._outcomes[report.nodeid] = "not collected"

    def pytest_sessionfinish(self) -> None:
        """Write the seconds of the tests and of the session."""
        tests = {name: round(seconds, 3) for name, seconds in self._seconds.most_common()}
        wall = round(time.monotonic() - self._started, 1)
        record = {"wall": wall, "outcomes": self._outcomes, "tests": tests}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=0), encoding="utf-8")
