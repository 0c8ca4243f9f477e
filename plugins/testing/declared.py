"""Declared results of methods, as a rule of the suites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.plugins.component import Component
from hardpoint.plugins.component.behaviour import UnusableError, behaviour_of
from hardpoint.testing.suite import Rule, short_repr


def declared_result(
    rule: Rule,
    interface: type[Component],
    method: str,
    result: Any,
    args: Sequence[Any],
    fix: str | None = None,
) -> Any:
    """Return the value that the engine uses of a method's result; None if it uses nothing of it.

    Raises:
        Violation: violation of the rule, because the interface declares another result.
    """
    behaviour = behaviour_of(interface, method)
    if behaviour is None or behaviour.returned is None:
        return None
    call = f"{method}({', '.join(map(short_repr, args))})"
    try:
        return behaviour.returned.check(result, args, args)
    except UnusableError as error:
        cause = error.__cause__
        detail = "" if cause is None else f": {type(cause).__name__}: {cause}"
        raise rule.violation(f"{call} {error}{detail}", fix) from cause
    except Exception as cause:
        raise rule.violation(f"{call} returned {short_repr(result)}: {cause}") from cause
