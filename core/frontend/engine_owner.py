"""Base of both engines of a frontend: reaction to the death of one of several engine processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hardpoint.core.client.base import Death
from hardpoint.errors import EngineDeadError
from hardpoint.host.boundary.activity import PluginCall
from hardpoint.host.boundary.parts.states import States
from hardpoint.host.live.driver import ChangeOwner
from hardpoint.host.registry.discovery import is_third_party
from hardpoint.plugins.config_tables import LoadConfig

from .engine_parts import REMOVABLE_KINDS, EngineParts
from .frontend import Frontend

_log = logging.getLogger("hardpoint")


class EngineOwner:
    """Owns the parts of an engine; base of LLMEngine and WatchedEngine.

    Attributes:
        parts: with the latest plugins.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._parts_lock = threading.Lock()
        self._frontend = Frontend(parts)
        slots = [*self._frontend.change_slots(), *parts.client.change_slots]
        self._changes: ChangeOwner[EngineParts] = ChangeOwner(
            self, slots, lingers=parts.client.shares_engines
        )
        parts.client.watch_deaths(self._engine_lost)

    def close(self) -> None:
        """End the engine and close its parts. Closing twice does nothing."""
        raise NotImplementedError

    def states(self) -> States:
        """Return the states of the components of this process, by name."""
        return self._frontend.states()

    def _engine_lost(self, death: Death) -> EngineDeadError:
        """Return the error of an engine process; in another thread.

        A third-party plugin that ran when engines died is left out of those that are started next,
        and its requests are refused.
        """
        reported = self._frontend.named(death.error, death.in_step)
        if death.call is not None and death.repeated:
            self._quarantine(death.call, death.repeated)
        return reported

    def _quarantine(self, call: PluginCall, times: str) -> None:
        entry = self.parts.plugins.find(call.kind, call.name)
        if entry is None or not is_third_party(entry) or call.kind not in REMOVABLE_KINDS:
            return
        message = f"the engine died {times} in {call}"
        _log.error("quarantined: %s", message)
        self.use(lambda parts: parts.without(call, message))
        self._frontend.quarantine(call, message)
        if call.kind == "scheduling_policies":  # requests may still name another one, to be refused
            self._frontend.submitter.use_plugins(self.parts.plugins)

    def use(self, change: Callable[[EngineParts], EngineParts]) -> None:
        """Replace the parts by the result of `change`; restarted engines have it, too."""
        with self._parts_lock:
            self.parts = parts = change(self.parts)
            parts.client.restart_with(parts.config, parts.plugins.manifest)

    def set_load(self, load: LoadConfig) -> None:
        """Read the weights in another way when the engine is restarted."""
        self.use(lambda parts: parts.with_load(load))
