"""How long the tests search: examples of the profile `ci`, or `nightly` with `--all`; seconds."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from hardpoint.testing.pytest_hooks import SEED_VARIABLE

_NIGHTLY = 200
_DEFAULT = 20

# On a machine that others use too, slowness is no finding.
_OPTIONS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The default run draws the same examples each time: it is never red by chance.
settings.register_profile("ci", max_examples=_DEFAULT, derandomize=True, **_OPTIONS)
settings.register_profile("nightly", max_examples=_NIGHTLY, **_OPTIONS)


def choose_profile(*, long: bool) -> None:
    """Choose `nightly` or `ci`; in `ci` the conformance suites draw the same cases each time."""
    settings.load_profile("nightly" if long else "ci")
    if not long:
        os.environ.setdefault(SEED_VARIABLE, "1")


def searches_long() -> bool:
    """Whether the profile is `nightly`."""
    return settings.default.max_examples == _NIGHTLY


def examples(count: int, **options: object) -> settings:
    """Return settings with at most 20 examples in the profile `ci`, at least 200 in `nightly`.

    Args:
        count: examples in `ci` if fewer, in `nightly` if more.
        options: other fields of the settings.
    """
    tried = max(count, _NIGHTLY) if searches_long() else min(count, _DEFAULT)
    return settings(max_examples=tried, **options)


def soak_seconds() -> float:
    """Return the length of a test that kills processes at random, by HARDPOINT_SOAK_SECONDS."""
    return float(os.environ.get("HARDPOINT_SOAK_SECONDS", "60"))


def kit_examples(share: float = 1.0) -> float:
    """Return `examples` of a conformance suite: in `nightly` those that plugin authors run.

    Args:
        share: share of that in `nightly`, for a suite like another one.
    """
    return share if searches_long() else 0.05
