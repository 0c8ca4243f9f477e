"""Faults of plugins that the engine survives: counted, reported and logged."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hardpoint.errors import PluginFaultError
from hardpoint.host.registry.blame import describe, responsible
from hardpoint.plugins.component import Source
from hardpoint.plugins.config_tables import PluginsConfig
from hardpoint.plugins.requests.stats import StepFault

from .activity import Activity, PluginCalls
from .guard import FaultReporter as FaultReporter

_log = logging.getLogger("hardpoint")

CALL_LOST = "the engine goes on, and only this call is lost"
"""The consequence of a fault where no default replaces the plugin's decision."""

_WITHOUT = "the engine goes on without it"


class StepFaults:
    """Counts the faults of plugins of scope *step*.

    Args:
        ends_engine: names of the plugins with faults of scope engine (`plugins.on_error`).
        slow_seconds: above which a plugin's time in a step is counted; 0 is never.
    """

    def __init__(
        self,
        ends_engine: Collection[str] = (),
        slow_seconds: float = 0.0,
        activity: Activity | None = None,
    ) -> None:
        self._ends_engine = frozenset(ends_engine)
        self._slow_seconds = slow_seconds
        self._activity = activity or Activity()
        self._faults: dict[str, StepFault] = {}
        self._slow: dict[str, StepFault] = {}
        self._timed: list[PluginCalls] = []

    @classmethod
    def under(cls, config: PluginsConfig, activity: Activity | None = None) -> StepFaults:
        """Return the counter for a configuration of plugins."""
        ends_engine = [name for name, scope in config.on_error.items() if scope == "engine"]
        return cls(ends_engine, config.slow_seconds, activity)

    def calls(self, kind: str, source: Source) -> PluginCalls:
        """Return an object that calls a plugin's methods and checks their time."""
        calls = PluginCalls(self._activity, kind, source)
        if self._slow_seconds:
            self._timed.append(calls)
        return calls

    def check_slow(self) -> None:
        """Count the plugins that took too long since the last call; called once per step."""
        for calls in self._timed:
            seconds, calls.seconds = calls.seconds, 0.0
            if seconds > self._slow_seconds:
                message = slow_message(calls.source, seconds, self._slow_seconds)
                _count(self._slow, calls.source.name, message)

    def slow(self) -> dict[str, StepFault]:
        """Return the steps in which plugins took too long, by plugin name."""
        self.check_slow()
        return dict(self._slow)

    def reporter(self, source: Source, consequence: str = _WITHOUT) -> FaultReporter:
        """Return the reporter of one plugin; `consequence` is logged with the first fault.

        The reporter raises PluginFaultError if the plugin's faults end the engine.
        """

        def report(message: str, cause: BaseException | None = None) -> None:
            plugin = source
            if cause is not None:
                plugin, method = responsible(cause, source, "")
                if plugin != source:  # a component that the plugin wraps
                    message = f"{method}() failed, called by {source.name!r}"
                message = f"{message}: {describe(cause)}"
            message = f"{plugin}: {message}"
            if source.name in self._ends_engine:
                raise PluginFaultError(message) from cause
            self.note(source.name, message, cause, consequence)

        return report

    def note(
        self,
        name: str,
        message: str,
        cause: BaseException | None = None,
        consequence: str = _WITHOUT,
    ) -> None:
        """Count a fault under a name; keep and log the first one of each name."""
        if _count(self._faults, name, message):  # a broken plugin fails in every step
            log_fault(message, cause, consequence)

    def record(self, name: str, message: str, consequence: str = _WITHOUT) -> None:
        """Count a fault that another process reports.

        Raises:
            PluginFaultError: the plugin's faults end the engine.
        """
        if name in self._ends_engine:
            raise PluginFaultError(message)
        self.note(name, message, consequence=consequence)

    def report(self) -> dict[str, StepFault]:
        """Return the faults so far by plugin name."""
        return dict(self._faults)


def log_fault(message: str, cause: BaseException | None, consequence: str) -> None:
    """Log a fault with its traceback."""
    _log.warning("%s; %s", message, consequence, exc_info=cause)


def _count(counts: dict[str, StepFault], name: str, message: str) -> bool:
    """Count one more under a name; return whether it is the first, which keeps its message."""
    before = counts.get(name)
    counts[name] = StepFault(before.count + 1, before.message) if before else StepFault(1, message)
    return before is None


def slow_message(source: Source, seconds: float, limit: float) -> str:
    """Return the message for a plugin that took too long in a step, and log it."""
    message = (
        f"{source}: its methods took {seconds:.3g} s in one step, "
        f"more than plugins.slow_seconds ({limit:g})"
    )
    _log.warning("%s; all requests waited for it", message)
    return message
