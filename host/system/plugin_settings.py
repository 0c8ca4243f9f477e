"""torch's settings around calls of plugins, for code that also runs if torch is not imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def read_nothing() -> None:
    """Return the settings where there are none."""


_TORCH_STATE = "hardpoint.host.system.torch_state"

READ: list[Callable[[], Any]] = [read_nothing]
"""Its item reads the settings; `torch_state` puts its own in as soon as it is imported."""


def changed(before: Any, plugin: object, method: str, *, threads: bool = True) -> None:
    """Put settings back that a call has changed, and log which plugin it was.

    Args:
        before: the settings before the call; None if torch was not imported yet.
        plugin: names it.
        method: method of the call.
        threads: whether the number of threads is put back, too.
    """
    if before is not None:
        sys.modules[_TORCH_STATE].put_back(before, plugin, method, threads=threads)


class StepSettings:
    """Restores torch's settings that plugins have changed, once per step of a thread.

    A change affects the rest of its step at most. Steps in flight have the settings in common that
    were read before the first of them. Parts of steps may be within one another: the late end of a
    step runs within the next one if that one begins first.

    Args:
        in_flight: whether further steps are in flight at the end of one.
        threads: whether the number of threads is restored.
        process: whether the settings that threads of a process share are restored.
    """

    def __init__(
        self,
        in_flight: Callable[[], bool] = bool,
        *,
        threads: bool = True,
        process: bool = True,
    ) -> None:
        self._in_flight = in_flight
        self._restored = {"threads": threads, "process": process}
        self._before: Any = None
        self._depth = 0

    def begin(self) -> None:
        """Read the settings, unless steps are in flight or this is a part of one."""
        self._depth += 1
        if self._before is None:
            self._before = READ[0]()

    def end(self) -> None:
        """Restore the settings that were read, at the end of the last part."""
        self._depth -= 1
        if self._depth:
            return
        before = self._before
        if not self._in_flight():
            self._before = None
        if before is not None and READ[0]() != before:
            sys.modules[_TORCH_STATE].restore_after_step(before, **self._restored)

    def around(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls another one as a step, or a part of it."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            self.begin()
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return call
