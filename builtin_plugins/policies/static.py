"""Policies that look at a request once, when it comes: fcfs, priority and shortest_first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import Load, Meta, Request, SchedulingPolicy


class FirstComeFirstServed(SchedulingPolicy):
    """Requests run in the order in which they came; the latest admitted gives way."""

    contract = 1

    def key(self, request: Request) -> Any:
        """Order by arrival."""
        return request.arrival_time


class Priority(SchedulingPolicy):
    """Smaller `priority` runs first; equal ones in the order in which they came."""

    contract = 1

    def key(self, request: Request) -> Any:
        """Order by priority, then by arrival."""
        return _importance(request)

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the least important request, of equals the latest to come."""
        return max(reversed(running), key=_importance)


def _importance(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time


class ShortestFirst(SchedulingPolicy):
    """Requests with little to do run first, and waiting makes up for having much to do.

    The key is the arrival time plus `seconds_per_token` for each token of expected work. So a
    request is overtaken only by those that come within `seconds_per_token` times its lead in work
    after it: from then on it waits as under fcfs, and nobody starves.

    Shortest job first with linear ageing, as a static key: all keys age alike, so their order
    never changes.
    """

    contract = 1

    class Options(plugins.Options):
        """What work is, and what it is worth.

        Attributes:
            seconds_per_token: by so much later a request counts as having come, for each token
                of its work; 0 is fcfs.
            output_weight: work is the prompt's tokens plus so many for each token of
                `max_tokens`. Above 1, longer prompts go first among requests that have no
                `max_tokens`, for they leave less room.
        """

        seconds_per_token: Annotated[float, Meta(ge=0)] = 0.01
        output_weight: Annotated[float, Meta(ge=0)] = 1.0

    def key(self, request: Request) -> Any:
        """Order by arrival and work."""
        outputs = self.options.output_weight * (request.params.max_tokens or 0)
        work = request.num_prompt_tokens + outputs
        return request.arrival_time + self.options.seconds_per_token * work
