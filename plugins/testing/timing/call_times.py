"""Times of a component's calls: the 99th percentile, and waits, in which nothing is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hardpoint.testing.pace import own_seconds
from hardpoint.testing.suite import Rule, short_repr

__all__ = ["WAITS", "CallTimes"]

WAITS = Rule(
    "waits: a call computes, and waits for nothing that takes long",
    "do not sleep, and do slow work in the constructor; or set max_wait_seconds to the "
    "time for which the engine may wait",
)


class CallTimes:
    """Times of calls.

    Attributes:
        seconds: time of each call, without the time in which its thread waited for a processor.
    """

    def __init__(self, max_wait_seconds: float | None) -> None:
        """Create a list of times, which is empty.

        Args:
            max_wait_seconds: the longest wait of a call; None accepts any.
        """
        self.seconds: list[float] = []
        self._max_wait = max_wait_seconds

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method; return its result.

        Raises:
            Violation: it waited too long, for a timer, a lock, a server or a disk.
        """
        started, computed = own_seconds(), time.thread_time()
        try:
            return method(*arguments)
        finally:
            passed = own_seconds() - started
            self.seconds.append(passed)
            self._check_wait(method, arguments, passed - (time.thread_time() - computed))

    def p99(self) -> float:
        """Return the seconds that 99 of 100 calls stay below or reach; 0 without calls."""
        if not self.seconds:
            return 0.0
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]

    def _check_wait(self, method: Callable[..., Any], arguments: Any, waited: float) -> None:
        if self._max_wait is not None and waited > self._max_wait:
            shown = ", ".join(short_repr(value)[:60] for value in arguments)
            raise WAITS.violation(
                f"{method.__name__}({shown}) waited {waited:.2g} s without computing, expected at "
                f"most max_wait_seconds = {self._max_wait:g}"
            )
