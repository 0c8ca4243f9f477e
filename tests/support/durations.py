"""Notes how long each test takes; scripts/durations makes tables of it, by file and by folder."""

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
        self._started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add set-up, call or tear-down of a test."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the seconds of the tests, and those of the session."""
        tests = {name: round(seconds, 3) for name, seconds in self._seconds.most_common()}
        found = {"wall": round(time.monotonic() - self._started, 1), "tests": tests}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=0), encoding="utf-8")
