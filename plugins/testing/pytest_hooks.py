"""The pytest hooks of `pytest_plugins = ["hardpoint.testing"]`; seeds and sizes of searches."""

from __future__ import annotations

import math
import os
import random
from typing import Any

from .pace import EVIDENCE

SEED_VARIABLE = "HARDPOINT_SEED"
"""Environment variable that repeats the searches of an earlier run."""

EXAMPLES_VARIABLE = "HARDPOINT_EXAMPLES"
"""Environment variable that multiplies the number of cases of all searches."""

_P99 = "hardpoint_p99_seconds"


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


def examples_scale() -> float:
    """Return the factor that the environment sets, or 1.

    Raises:
        ValueError: the environment sets a value that is not a number above 0.
    """
    value = os.environ.get(EXAMPLES_VARIABLE, "1")
    try:
        scale = float(value)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ValueError(f"{EXAMPLES_VARIABLE}: expected a number > 0, got {value!r}")
    return scale


def replay_line(number: int) -> str:
    """Return the command that repeats the current test's search."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    scale = os.environ.get(EXAMPLES_VARIABLE)
    scaled = f"{EXAMPLES_VARIABLE}={scale} " if scale else ""
    return f"{SEED_VARIABLE}={number} {scaled}pytest {test!r}"


def pytest_report_header() -> str:
    """Return a report line with the seed of the searches."""
    number = os.environ.get(SEED_VARIABLE)
    return f"hardpoint conformance suites: {SEED_VARIABLE} {number or 'not set, random'}"


def pytest_runtest_setup(item: Any) -> None:  # noqa: ARG001
    """Forget the figures of the test before."""
    EVIDENCE.clear()


def pytest_runtest_teardown(item: Any) -> None:
    """Add the time of calls that a test measured to its report."""
    if EVIDENCE.p99_seconds is not None:
        item.user_properties.append((_P99, EVIDENCE.p99_seconds))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the measured times of calls, and the replay command of every broken rule."""
    times = {
        f"{report.nodeid}: p99 of a call {value * 1e6:.3g} us"
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _P99
    }
    if times:
        terminalreporter.section("hardpoint conformance: time of calls")
        for time in sorted(times):
            terminalreporter.line(time)
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
