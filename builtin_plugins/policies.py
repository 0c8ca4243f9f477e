"""Scheduling policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.plugins import Request, SchedulingPolicy

__all__ = ["FirstComeFirstServed", "Priority"]


class FirstComeFirstServed(SchedulingPolicy):
    """Requests run in the order in which they came."""

    contract = 1

    def key(self, request: Request) -> Any:
        """Order by arrival."""
        return request.arrival_time


class Priority(SchedulingPolicy):
    """Smaller `priority` runs first; equal ones in the order in which they came."""

    contract = 1

    def key(self, request: Request) -> Any:
        """Order by priority, then by arrival."""
        return (request.priority, request.arrival_time)

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the least important request, the latest of equals."""
        return max(running, key=lambda request: (request.priority, request.arrival_time))
