"""Inputs of calls, which no component may change: compared with copies after each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Rule, short_repr

__all__ = ["unchanged"]


@contextmanager
def unchanged(rule: Rule, call: str, **inputs: Any) -> Iterator[None]:
    """Check that the body does not mutate the inputs of a call.

    Args:
        rule: the broken rule if it does.
        call: the called method, for messages.
        inputs: the inputs, by the names that messages use; `_` is shown as a space.

    Raises:
        Violation: an input has changed.
    """
    before = {name: snapshot(value) for name, value in inputs.items()}
    yield
    for name, value in inputs.items():
        if snapshot(value) != before[name]:
            raise rule.violation(
                f"{call} changed {name.replace('_', ' ')} in place, which are now "
                f"{short_repr(value)}; expected no change"
            )
