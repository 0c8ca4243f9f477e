"""Base of both engines of a frontend: what follows when one of several engine processes dies."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from hardpoint.boundary.activity import PluginCall
from hardpoint.core.client.base import Death
from hardpoint.errors import BusyError, EngineDeadError
from hardpoint.live.change import Change, Changes, Prepared, Running, Switch
from hardpoint.live.driver import Steps, steps
from hardpoint.live.settings import Settings
from hardpoint.plugins.manifest import Manifest
from hardpoint.registry.discovery import is_third_party
from hardpoint.registry.plugin_set import PluginSet
from hardpoint.typed import convert

from .engine_parts import EngineParts
from .frontend import Frontend

_log = logging.getLogger("hardpoint")


class EngineOwner:
    """Owns the parts of an engine; base of LLMEngine and WatchedEngine.

    Attributes:
        parts: with the latest plugins.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Own the parts; the derived class closes them."""
        self.parts = parts
        self._frontend = Frontend(parts)
        self._changes = Changes([*self._frontend.change_slots(), *parts.client.change_slots, self])
        self._changing = threading.Lock()
        parts.client.watch_deaths(self._engine_lost)

    def _engine_lost(self, death: Death) -> EngineDeadError:
        """Return the error of an engine process; in another thread.

        A third-party plugin that ran when engines died is left out of those that are started next,
        and its requests are refused.
        """
        reported = self._frontend.named(death.error, death.in_step)
        if death.call is not None and death.repeated:
            self._quarantine(death.call, death.repeated)
        return reported

    def prepare(self, change: Change, plugins: PluginSet) -> Prepared:
        """Return what lets restarted engines have the plugins of a change: a `Slot`."""
        del change, plugins
        before, after = self.parts, self._next
        return Switch(lambda is_new: self.use(after if is_new else before))

    @contextlib.contextmanager
    def _change(
        self, make: Callable[[Settings], Settings], running: Running
    ) -> Iterator[tuple[Steps, Manifest]]:
        """Yield the steps of a live change, and the manifest after it.

        Raises:
            BusyError: another change is under way.
            ConfigError, PluginError: it cannot be made of the current settings.
        """
        running = convert(running, Running, path="running")
        if not self._changing.acquire(blocking=False):
            raise BusyError("another live change is under way; try again once it is done")
        try:
            settings = make(self.parts.settings)
            self._next = self.parts.with_settings(settings)
            config, manifest = settings.config, settings.plugins.manifest
            change = Change(manifest=manifest, config=config.without_tables(), running=running)
            seconds = config.plugins.change_seconds
            yield steps(change, self._changes, settings.plugins, seconds), manifest
        finally:
            self._changing.release()

    def _quarantine(self, call: PluginCall, times: str) -> None:
        entry = self.parts.plugins.find(call.kind, call.name)
        if entry is None or not is_third_party(entry):
            return
        if (parts := self.parts.without(call)) is None:
            return
        message = f"the engine died {times} in {call}"
        _log.error("quarantined: %s", message)
        self.use(parts)
        self._frontend.quarantine(call, message)
        if call.kind == "scheduling_policies":  # requests may still name another one, to be refused
            self._frontend.submitter.use_plugins(parts.plugins)

    def use(self, parts: EngineParts) -> None:
        """Replace the parts; engines that are restarted have them, too."""
        self.parts = parts
        parts.client.restart_with(parts.config, parts.plugins.manifest)
