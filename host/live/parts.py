"""Live changes of step parts: two generations of the plugins run side by side."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from hardpoint.errors import ConfigError
from hardpoint.host.boundary.parts.bound_half import BoundHalf, OpenHalves
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.registry.blame import describe, raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins.component.manifest import PluginEntry

from .change import LiveChange, PreparedChange, Switch
from .generations import GenerationChanges

_log = logging.getLogger("hardpoint")

H = TypeVar("H", bound=BoundHalf[Any])


class PartHalves(Protocol[H]):
    """The halves of step parts in one process."""

    open: OpenHalves[H] | None

    @property
    def halves(self) -> Sequence[H]:
        """All halves in use, of every plugin generation, in the order of their calls."""


def part_changes(
    parts: PartHalves[H],
    use: Callable[[Sequence[H]], None],
    plugins: PluginSet,
    users_of: Callable[[H], Collection[str]] = lambda _half: (),
    *,
    closes_later: bool = False,
) -> GenerationChanges[H]:
    """Return the live changes of the halves of step parts in one process.

    Args:
        parts: has the halves.
        use, plugins, users_of, closes_later: as for `GenerationChanges`.
    """

    def build(
        plugins: PluginSet, entries: Sequence[PluginEntry], gone: Sequence[H], change: LiveChange
    ) -> Sequence[H]:
        built = [] if parts.open is None else parts.open(plugins, entries, change.config)
        try:
            for half in (*built, *gone):
                _check(half, change)
        except BaseException:
            _close(built)
            raise
        for half in built:
            half.begin_with(change.manifest.generation)
        return built

    return GenerationChanges(
        "step_parts",
        plugins,
        lambda: parts.halves,
        use,
        build,
        _close,
        users_of=users_of,
        closes_later=closes_later,
    )


class HalfChanges:
    """Lets the frontend halves of step parts replace the components that they drive; a `Slot`."""

    def __init__(self, parts: FrontendParts) -> None:
        self._parts = parts

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Let the halves build new components.

        Raises:
            HardpointError: one cannot be changed so.
        """
        prepared = self._parts.prepare_changes(plugins, change.config)
        if not prepared:
            return None

        def switch(is_new: bool) -> None:
            for part_change in prepared:
                part_change.switch(is_new)

        def call(closes: Iterable[Callable[[], None]]) -> None:
            with contextlib.ExitStack() as stack:
                for close in closes:
                    stack.callback(close)

        return Switch(
            switch,
            lambda: call(part_change.close_old for part_change in prepared),
            lambda: call(part_change.close_new for part_change in prepared),
        )


def _check(half: BoundHalf[Any], change: LiveChange) -> None:
    part = type(half.part)
    why = half.why_fixed
    if part.request_fields(change.config):
        why = "its request_fields() are read when the engine starts"
    if half.moves_blocks or part.releases_blocks:
        why = f"it {'moves' if half.moves_blocks else 'releases'} blocks of the KV cache"
    if not part.changes_live:  # the order of it and another one changes
        why = "its class does not set changes_live = True"
    if why is not None:
        raise ConfigError(
            f"plugins: {half.source}: it cannot be changed while the engine runs: {why}; restart "
            f"it with the new configuration"
        )


def _close(halves: Sequence[BoundHalf[Any]]) -> None:
    for half in halves:
        try:
            half.close()
        except BaseException as cause:
            raise_unless_fault(cause)
            _log.warning("a live change: %s", describe(cause))
