"""The engine of each session, for balancers that send its requests to the same one."""

from __future__ import annotations

from hardpoint.plugins import EngineCoreRequest

_MOST_SESSIONS = 65_536


class Sessions:
    """The engine that each session's last request was sent to; the oldest are forgotten."""

    def __init__(self, limit: int = _MOST_SESSIONS) -> None:
        """Remember `limit` sessions at most."""
        self._limit = limit
        self._ranks: dict[tuple[str | None, str], int] = {}

    def rank_of(self, request: EngineCoreRequest) -> int | None:
        """Return the rank of the engine; None without a session, or before its second request."""
        return None if (key := _session(request)) is None else self._ranks.get(key)

    def note(self, request: EngineCoreRequest, rank: int) -> None:
        """Remember where a request is sent."""
        if (key := _session(request)) is None:
            return
        self._ranks.pop(key, None)
        self._ranks[key] = rank
        if len(self._ranks) > self._limit:
            del self._ranks[next(iter(self._ranks))]


def _session(request: EngineCoreRequest) -> tuple[str | None, str] | None:
    retention = request.retention
    return None if retention is None else (request.cache_salt, retention.session)
