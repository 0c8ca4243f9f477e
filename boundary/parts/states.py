"""The states of components, for operators and reports of faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hardpoint.plugins.component import Component
from hardpoint.registry.blame import describe, raise_unless_fault

MAX_BYTES = 4096
"""Size of the state of a component as JSON, at most."""

States = dict[str, dict[str, Any]]
"""The states of components by their names; of one that failed, why, as `error`."""


def states_of(components: Iterable[Component]) -> States:
    """Return the states of those components that have one. Never raises."""
    found: States = {}
    for component in components:
        own: Component = vars(component).get("wrapped", component)  # of a guarded one
        if type(own).dump_state is Component.dump_state:
            continue
        try:
            found[own.name] = _checked(own.dump_state())
        except BaseException as cause:
            raise_unless_fault(cause)
            found[own.name] = {"error": f"its dump_state failed: {describe(cause)}"}
    return found


def _checked(state: object) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(f"expected a mapping, got {type(state).__name__}")
    encoded = msgspec.json.encode(dict(state))
    if len(encoded) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes as JSON, got {len(encoded)}")
    plain: dict[str, Any] = msgspec.json.decode(encoded)
    return plain
