"""How often dead engines may be restarted, and which plugins they died in."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from hardpoint.host.boundary.activity import PluginCall

WINDOW_S = 60.0
"""In which restarts, and deaths of one cause, are counted."""

DEADLY = 2
"""So many deaths in a plugin's methods are too many."""


class RestartBudget:
    """Counts restarts and deaths within a minute. For one thread at a time.

    Each engine of another machine has a limit of its own, so that its deaths do not prevent the
    restart of other engines.

    Attributes:
        enabled: whether any engine is restarted.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        max_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a restart.

        Args:
            enabled: whether dead engines are restarted.
            max_per_minute: the limit.
            clock: seconds.
        """
        self.enabled = enabled
        self._limit = max_per_minute
        self._clock = clock
        self._deaths: list[tuple[float, tuple[str, str]]] = []
        self._attempts: dict[int | None, collections.deque[float]] = {}

    @property
    def is_spent(self) -> bool:
        """Whether the limit prevents a restart."""
        return self.enabled and any(
            len(attempts) >= self._limit for attempts in self._attempts.values()
        )

    def may_restart(self, remote: int | None = None) -> bool:
        """Return whether one more restart is allowed now, and count it.

        Args:
            remote: rank of an engine of another machine; None is one of this machine.
        """
        now, attempts = self._clock(), self._attempts.setdefault(remote, collections.deque())
        while attempts and now - attempts[0] >= WINDOW_S:
            attempts.popleft()
        if not self.enabled or len(attempts) >= self._limit:
            return False
        attempts.append(now)
        return True

    def died_in(self, call: PluginCall) -> str:
        """Record a death in a plugin's method; return how often, if that is too often."""
        now, key = self._clock(), (call.kind, call.name)
        self._deaths = [d for d in self._deaths if now - d[0] < WINDOW_S]
        self._deaths.append((now, key))
        times = sum(died == key for _, died in self._deaths)
        return f"{times} times within {WINDOW_S:g} s" if times >= DEADLY else ""

    @property
    def limit_text(self) -> str:
        """The limit as part of a message."""
        restarts = f"{self._limit} restart{'s' if self._limit > 1 else ''}"
        return f"not restarted: {restarts} within a minute (engine.max_restarts_per_minute)"
