"""Live changes of step parts: those of two generations of the plugins run side by side."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hardpoint.errors import ConfigError
from hardpoint.host.boundary.parts.bound_half import BoundHalf, OpenHalves
from hardpoint.host.boundary.parts.frontend_parts import BoundFrontendHalf, FrontendParts
from hardpoint.host.registry.blame import describe, raise_unless_fault
from hardpoint.host.registry.plugin_set import PluginSet

from .change import LiveChange, PreparedChange, Switch
from .processors import joined, kept_names

KIND = "step_parts"

_log = logging.getLogger("hardpoint")


def _nothing() -> None:
    """Close nothing."""


H = TypeVar("H", bound=BoundHalf[Any])


class PartHalves(Protocol[H]):
    """The halves of step parts in one process."""

    open: OpenHalves[H] | None

    @property
    def halves(self) -> Sequence[H]:
        """Those of all generations that are in use, in the order of their calls."""


class PartChanges(Generic[H]):
    """Replaces the halves of step parts in one process; a `WorkerSlot`.

    Requests use the parts of the generation that they were admitted with.

    Attributes:
        plugins: the latest ones.
    """

    def __init__(
        self,
        parts: PartHalves[H],
        use: Callable[[Sequence[H]], None],
        plugins: PluginSet,
        users_of: Callable[[H], Collection[str]] = lambda _half: (),
    ) -> None:
        """Replace the halves of parts, which are those of `plugins`.

        Args:
            use: lets other halves be called.
            users_of: returns the ids of requests for which calls of a half are still to come.
        """
        self._parts, self._use, self.plugins = parts, use, plugins
        self._users_of = users_of

    @property
    def latest(self) -> dict[str, H]:
        """The halves of the latest generation, by name."""
        return {half.name: half for half in self._parts.halves if half.until is None}

    def users_of_replaced(self) -> set[str]:
        """Return the ids of requests that use halves which changes have replaced or disabled."""
        gone = [half for half in self._parts.halves if half.until is not None]
        return {name for half in gone for name in self._users_of(half)}

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Build the halves that are new.

        Raises:
            ConfigError: a part takes part in the start of the engine.
            PluginError: one cannot be built.
        """
        entries, earlier = plugins.entries(KIND), self.plugins
        kept = kept_names(earlier.entries(KIND), entries)
        if len(kept) == len(entries) == len(earlier.entries(KIND)) or self._parts.open is None:
            return self._switch(change, lambda is_new: self._follow(plugins if is_new else earlier))
        fresh = [entry for entry in entries if entry.name not in kept]
        current = self.latest
        gone = [half for name, half in current.items() if name not in kept]
        built = self._parts.open(plugins, fresh, change.config)
        try:
            for half in (*built, *gone):
                _check(half, change)
        except BaseException:
            _close(built)
            raise
        generation = change.manifest.generation
        for half in built:
            half.begin_with(generation)
        own = {half.name: half for half in built}
        places = [own.get(entry.name) or current.get(entry.name) for entry in entries]
        after = [half for half in places if half is not None]

        def switch(is_new: bool) -> None:
            for half in gone:
                half.until = generation if is_new else None
            before = self._parts.halves
            rest = [half for half in before if half not in built]
            self._use(joined(before, after) if is_new else rest)
            self.plugins = plugins if is_new else earlier

        return self._switch(change, switch, lambda: _close(built))

    def _switch(
        self,
        change: LiveChange,
        switch: Callable[[bool], None],
        close: Callable[[], None] = _nothing,
    ) -> Switch:
        del change
        return Switch(switch, close_new=close)

    def _follow(self, plugins: PluginSet) -> None:
        self.plugins = plugins

    def release(self, oldest: int) -> None:
        """Close the halves that no request of a generation from `oldest` on uses."""
        halves = self._parts.halves
        unused = [
            half
            for half in halves
            if half.until is not None and half.until <= oldest and not self._users_of(half)
        ]
        if unused:
            self._use([half for half in halves if half not in unused])
            _close(unused)


class FrontendPartChanges(PartChanges[BoundFrontendHalf]):
    """Replaces the halves of step parts in a frontend; a `Slot`.

    Those that were replaced by a change are closed with a later one, since requests that are being
    prepared may still use them, and not while answers are to be validated by them.
    """

    def __init__(self, parts: FrontendParts, plugins: PluginSet) -> None:
        """Replace the halves of parts, which are those of `plugins`."""
        super().__init__(parts, parts.use_halves, plugins, parts.users_of)

    def _switch(
        self,
        change: LiveChange,
        switch: Callable[[bool], None],
        close: Callable[[], None] = _nothing,
    ) -> Switch:
        before = change.manifest.generation - 1
        return Switch(switch, lambda: self.release(before), close)


class HalfChanges:
    """Lets the frontend halves of step parts replace the components that they drive; a `Slot`."""

    def __init__(self, parts: FrontendParts) -> None:
        self._parts = parts

    def prepare(self, change: LiveChange, plugins: PluginSet) -> PreparedChange | None:
        """Let the halves build what is new.

        Raises:
            HardpointError: one cannot be changed so.
        """
        prepared = self._parts.prepare_changes(plugins, change.config)
        if not prepared:
            return None

        def switch(is_new: bool) -> None:
            for one in prepared:
                one.switch(is_new)

        def call(closes: Iterable[Callable[[], None]]) -> None:
            with contextlib.ExitStack() as stack:
                for close in closes:
                    stack.callback(close)

        return Switch(
            switch,
            lambda: call(one.close_old for one in prepared),
            lambda: call(one.close_new for one in prepared),
        )


def _check(half: BoundHalf[Any], change: LiveChange) -> None:
    part = type(half.part)
    why = half.why_fixed
    if part.request_fields(change.config):
        why = "its request_fields() are read when the engine starts"
    if half.moves_blocks:
        why = "it moves blocks of the KV cache"
    if not part.changes_live:  # the order of it and another one changes
        why = "its class does not say changes_live = True"
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
