"""The backend of a device: attention and operations, chosen as a pair or one by one.

`backend` names a component of both kinds; `attention.use` and `ops.use` of "auto" follow it. A
`backend` of "auto" leaves the choice to the worker, which knows its device: of the candidates that
the plugin set has then, `first_that_runs` builds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hardpoint.errors import ConfigError, ModelError
from hardpoint.plugins.component import Component
from hardpoint.plugins.component.manifest import PluginEntry

from .discovery import SelectedPlugin
from .kinds import KINDS

C = TypeVar("C", bound=Component)


def first_that_runs(
    entries: Mapping[str, PluginEntry],
    device: str,
    target: Callable[[PluginEntry], Any],
    build: Callable[[PluginEntry, str], C],
) -> tuple[PluginEntry, C]:
    """Build the component of a device; return its entry and it.

    Args:
        entries: by name; the only one, or the entries of the candidates.
        build: builds the component of an entry, given why another one is not used.

    Raises:
        ModelError: none runs there.
    """
    if len(entries) == 1:
        (entry,) = entries.values()
        check_device(entry, target(entry), device)
        return entry, build(entry, "")
    first, fallback = (entries[name] for name in _preferred(device))
    if device not in target(first).devices:
        reason = f"{first.name!r} does not run on {device}"
    else:
        try:
            return first, build(first, "")
        except ModelError as cause:
            reason = str(cause)
    return fallback, build(fallback, reason)


def _preferred(device: str) -> tuple[str, str]:
    return ("native_cpu" if device == "cpu" else "triton"), "torch"


def check_device(entry: PluginEntry, target: Any, device: str) -> None:
    """Reject a component of a per-device kind on a device where it does not run.

    Args:
        device: type of the device.

    Raises:
        ModelError: it does not run on the device.
    """
    if device not in target.devices:
        path = "backend" if entry.origin.startswith("backend ") else KINDS[entry.kind].chosen_by
        raise ModelError(
            f"{path}: {entry.name!r} runs on {', '.join(target.devices)}, the device is {device}"
        )


def check_devices(chosen: Sequence[SelectedPlugin], targets: Mapping[Any, Any]) -> None:
    """Refuse attention and operations that run on no common device.

    Args:
        targets: their classes, by key.

    Raises:
        ConfigError: naming both.
    """
    of_kind = {
        kind: [item for item in chosen if item.kind.name == kind]
        for kind in ("attention_backends", "ops")
    }
    if any(len(items) != 1 for items in of_kind.values()):
        return  # candidates, of which each device has one
    (attention,), (ops,) = of_kind.values()
    runs_on = [tuple(getattr(targets[item.key], "devices", ())) for item in (attention, ops)]
    if all(runs_on) and not set.intersection(*map(set, runs_on)):
        raise ConfigError(
            f"{attention.path}: {attention.name!r} runs on {', '.join(runs_on[0])}, and "
            f"{ops.path}: {ops.name!r} on {', '.join(runs_on[1])}; expected attention and "
            f"operations of one device"
        )
