"""Seeds of the conformance suites' searches."""

from __future__ import annotations

import os
import random

__all__ = ["SEED_VARIABLE", "replay_line", "seed_now"]

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
