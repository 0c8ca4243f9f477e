"""The pytest hooks of `pytest_plugins = ["hardpoint.testing"]`, and the seeds of searches."""

from __future__ import annotations

import os
import random
from typing import Any

SEED_VARIABLE = "HARDPOINT_SEED"
"""Environment variable that repeats the searches of an earlier run."""


def search_seed() -> int:
    """Return the seed that the environment sets, or a random one.

    Raises:
        ValueError: the environment sets a value that is not a whole number.
    """
    value = os.environ.get(SEED_VARIABLE)
    if value is None:
        return random.SystemRandom().randrange(2**32)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{SEED_VARIABLE}: expected a whole number, got {value!r}") from None


def replay_line(number: int) -> str:
    """Return the command that repeats the current test's search."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return f"{SEED_VARIABLE}={number} pytest {test!r}"


def pytest_report_header() -> str:
    """Return a report line with the seed of the searches."""
    number = os.environ.get(SEED_VARIABLE)
    return f"hardpoint conformance suites: {SEED_VARIABLE} {number or 'not set, random'}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the replay command of every broken rule."""
    lines = [
        line.strip()
        for report in terminalreporter.stats.get("failed", ())
        for line in str(report.longrepr).splitlines()
        if line.strip().startswith(f"replay: {SEED_VARIABLE}=")
    ]
    if lines:
        terminalreporter.section("hardpoint conformance: replay")
        for line in lines:
            terminalreporter.line(line.removeprefix("replay: "))
