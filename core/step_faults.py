"""Faults of plugins whose decisions the built-in default can take: counted, told, survived."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Mapping

from hardpoint.plugins import PluginFaultError, StepFault
from hardpoint.plugins.loading import Source

__all__ = ["FaultReporter", "StepFaults"]

_log = logging.getLogger("hardpoint")

FaultReporter = Callable[[str, BaseException | None], None]
"""Called with words such as "victim() returned None" and the cause, if there is one."""


class StepFaults:
    """Books of the decisions that plugins of scope *step* did not take."""

    def __init__(self, ends_engine: Collection[str] = ()) -> None:
        """`ends_engine` names the plugins whose faults end the engine (`plugins.on_error`)."""
        self._ends_engine = frozenset(ends_engine)
        self._faults: dict[str, StepFault] = {}

    @classmethod
    def under(cls, on_error: Mapping[str, str]) -> StepFaults:
        """Return the books where `plugins.on_error` says this."""
        return cls([name for name, scope in on_error.items() if scope == "engine"])

    def reporter(self, source: Source) -> FaultReporter:
        """Return what notes the faults of one plugin.

        The reporter raises PluginFaultError if the plugin's faults end the engine.
        """

        def report(words: str, cause: BaseException | None = None) -> None:
            if cause is not None:
                # Also where the error's own __str__ is broken.
                words = f"{words}: {traceback.format_exception_only(cause)[-1].strip()}"
            message = f"{source}: {words}"
            if source.name in self._ends_engine:
                raise PluginFaultError(message) from cause
            self.note(source.name, message, cause)

        return report

    def note(self, name: str, message: str, cause: BaseException | None = None) -> None:
        """Count a fault under a name; the first one of a name is logged."""
        before = self._faults.get(name)
        self._faults[name] = StepFault(before.count + 1 if before else 1, message)
        if before is None:  # what is broken is so in every step: health counts on
            _log.warning("%s; the engine goes on without it", message, exc_info=cause)

    def report(self) -> dict[str, StepFault]:
        """Return the faults so far by plugin name."""
        return dict(self._faults)
