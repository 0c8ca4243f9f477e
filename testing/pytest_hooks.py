"""The pytest hooks that `pytest_plugins = ["hardpoint.testing"]` adds, and the searches' seeds."""

from __future__ import annotations

import os
import random
from typing import Any

SEED_VARIABLE = "HARDPOINT_SEED"
"""Environment variable that makes the searches of an earlier run again."""


def seed_now() -> int:
    """Return the seed that the environment asks for, or a new one.

    Raises:
        ValueError: the environment asks for something that is no whole number.
    """
    wanted = os.environ.get(SEED_VARIABLE)
    if wanted is None:
        return random.SystemRandom().randrange(2**32)
    try:
        return int(wanted)
    except ValueError:
        raise ValueError(f"{SEED_VARIABLE}: expected a whole number, got {wanted!r}") from None


def replay_line(number: int) -> str:
    """Return the command that makes the current test's search again."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return f"{SEED_VARIABLE}={number} pytest {test!r}"


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
