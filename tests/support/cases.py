"""Cases of a test; the default run takes some, and `--all` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def nightly_but(
    cases: Iterable[Any], *default: Any, name: Callable[[Any], str] | None = None
) -> list[Any]:
    """Return the cases of `parametrize`, with all but some marked `nightly`.

    Args:
        cases: values of a parameter; tuples are values of several ones.
        default: cases that the default run takes, too.
        name: returns the id of a case; None leaves it to pytest.
    """
    known = list(cases)
    assert all(case in known for case in default), f"expected cases among {known}, got {default}"
    params = []
    for case in known:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in default else pytest.mark.nightly
        params.append(pytest.param(*values, id=name and name(case), marks=marks))
    return params
