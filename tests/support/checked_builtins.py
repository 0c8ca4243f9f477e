"""Checks each built-in component once per process, which is a fifth of an engine's start."""

from __future__ import annotations

import inspect
from typing import Any

from hardpoint.host.registry import adapt

_PACKAGE = "hardpoint.builtin_plugins"
_BUILTIN = ("hardpoint.", "builtins", "abc", "typing")


def check_builtins_once() -> None:
    """Let a built-in class that has passed the checks of its contract pass from then on.

    Each engine checks all its components anew, and tests open thousands. Classes that have a base
    of another package are always checked, and so is a class whose attributes a test replaces.
    """
    check, passed = adapt.check_component, {}

    def check_once(target: Any, kind: Any, source: Any, hint: str = "") -> None:
        state = _state(target)
        if state is None:
            check(target, kind, source, hint)
        elif passed.get((target, kind.name)) != state:
            check(target, kind, source, hint)
            passed[target, kind.name] = state

    adapt.check_component = check_once


def _state(target: Any) -> list[tuple[int, ...]] | None:
    """Return the ids of a built-in class's attributes; None if it is always checked."""
    if not inspect.isclass(target) or not target.__module__.startswith(_PACKAGE):
        return None
    modules = {base: base.__module__ for base in target.__mro__}
    if not all(module.startswith(_BUILTIN) for module in modules.values()):
        return None
    own = [base for base, module in modules.items() if module.startswith(_PACKAGE)]
    return [tuple(map(id, vars(base).values())) for base in own]
