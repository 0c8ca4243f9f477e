"""The sinks of statistics: calls of all of them, and their replacement while the engine runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hardpoint.errors import PluginFaultError
from hardpoint.plugins import IterationStats, StatSink, StatSinkContext
from hardpoint.plugins.step_part import PreparedPartChange

if TYPE_CHECKING:
    from hardpoint.plugins.requests.stats import PluginReport
    from hardpoint.plugins.step_part.components import ComponentFactory, FaultCounter

KIND = "stat_sinks"

_CALL_LOST = "the engine goes on, and only this call is lost"


class Sinks:
    """Calls all sinks; false without any. Collecting this object closes them, but not in a fork."""

    def __init__(self, sinks: Mapping[str, StatSink] | None = None) -> None:
        """`sinks` are guarded, by name, in the order of their calls."""
        self._sinks = dict(sinks or {})
        self._closing = self._close_if_collected()

    def _close_if_collected(self) -> weakref.finalize[..., Sinks]:
        return weakref.finalize(self, _close_all, list(self._sinks.values()), os.getpid())

    def __bool__(self) -> bool:
        return bool(self._sinks)

    @property
    def components(self) -> list[StatSink]:
        """The sinks."""
        return list(self._sinks.values())

    def record(self, stats: IterationStats) -> None:
        """Call `record` of every sink.

        Raises:
            PluginFaultError: a sink with fatal faults failed; all were called.
        """
        call_all(self._sinks.values(), "record", stats)

    def report(self) -> None:
        """Call `report` of every sink.

        Raises:
            PluginFaultError: as `record`.
        """
        call_all(self._sinks.values(), "report")

    def exposition(self, report: PluginReport) -> list[str]:
        """Return the exports of every sink.

        Raises:
            PluginFaultError: as `record`.
        """
        return call_all(self._sinks.values(), "exposition", report)

    def close(self) -> None:
        """Close every sink, once.

        Raises:
            PluginFaultError: as `record`.
        """
        self._closing()

    def prepare(
        self,
        now: ComponentFactory,
        then: ComponentFactory,
        build: Callable[[ComponentFactory, Collection[str]], dict[str, StatSink]],
    ) -> PreparedPartChange | None:
        """Build the sinks that another generation adds; the others go on with their figures.

        Args:
            now: components of this generation.
            then: components of the other one.
            build: builds sinks by name.

        Returns:
            The change; None if there is none.

        Raises:
            PluginError: a sink cannot be built.
        """
        before, names = self._sinks, then.enabled(KIND)
        unchanged = {
            name
            for name in names
            if name in before and now.identity(KIND, name) == then.identity(KIND, name)
        }
        built = build(then, [name for name in names if name not in unchanged])
        if not built and len(unchanged) == len(before):
            return None
        after = {name: built.get(name) or before[name] for name in names}
        gone = [sink for name, sink in before.items() if name not in unchanged]

        def switch(is_new: bool) -> None:
            self._sinks = after if is_new else before
            self._closing.detach()
            self._closing = self._close_if_collected()

        return PreparedPartChange(
            switch=switch,
            close_old=lambda: _close_all(gone),
            close_new=lambda: _close_all(built.values()),
        )


class ForwardedSinks(Sinks):
    """Sends the figures to another process, which has the sinks and calls their other methods."""

    def __init__(self, send: Callable[[IterationStats], None]) -> None:
        super().__init__()
        self._send = send

    def __bool__(self) -> bool:
        return True

    def record(self, stats: IterationStats) -> None:
        """Send the figures."""
        self._send(stats)


def build_sinks(
    components: ComponentFactory,
    names: Iterable[str],
    faults: FaultCounter | None,
    fields: Mapping[str, Any],
) -> dict[str, StatSink]:
    """Build sinks, guarded; if a sink fails, close the sinks before it.

    Args:
        components: build them.
        names: names of the sinks.
        faults: counts their faults.
        fields: fields of their contexts.

    Raises:
        PluginError: a sink cannot be built.
    """
    built: dict[str, StatSink] = {}
    with ExitStack() as undo:
        for name in names:
            source = components.calls(KIND, name).source
            report = _ignore if faults is None else faults.reporter(source, _CALL_LOST)
            built[name] = components.guarded(KIND, name, StatSinkContext, report, **fields)
            undo.callback(components.close, built[name])
        undo.pop_all()
    return built


def call_all(sinks: Iterable[StatSink], method: str, *args: Any) -> list[Any]:
    """Call a method of all sinks; return the results of the calls that succeeded.

    Raises:
        PluginFaultError: a sink with fatal faults failed; all were called.
    """
    results, fatal = [], None  # type: list[Any], PluginFaultError | None
    for sink in sinks:
        try:
            results.append(getattr(sink, method)(*args))
        except PluginFaultError as fault:
            fatal = fatal or fault
    if fatal is not None:
        raise fatal
    return results


def _close_all(sinks: Iterable[StatSink], owner: int | None = None) -> None:
    if owner in (None, os.getpid()):
        call_all(sinks, "close")


def _ignore(message: str, cause: BaseException | None) -> None:
    """Count no fault."""
