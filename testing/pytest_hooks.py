"""What `pytest_plugins = ["hardpoint.testing"]` adds to pytest: seeds, before and after."""

from __future__ import annotations

import os
from typing import Any

from .suite import SEED_VARIABLE


def pytest_report_header() -> str:
    """Say which seed the conformance suites search with."""
    number = os.environ.get(SEED_VARIABLE)
    return f"hardpoint conformance suites: {SEED_VARIABLE} {number or 'not set, drawn afresh'}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Repeat at the end how each broken rule is seen again."""
    lines = [
        line.strip()
        for report in terminalreporter.stats.get("failed", ())
        for line in str(report.longrepr).splitlines()
        if line.strip().startswith(f"replay: {SEED_VARIABLE}=")
    ]
    if lines:
        terminalreporter.section("hardpoint conformance: see it again")
        for line in lines:
            terminalreporter.line(line.removeprefix("replay: "))
