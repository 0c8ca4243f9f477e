"""Policies with a key that is fixed at arrival: fcfs, priority and shortest_first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from hardpoint import plugins
from hardpoint.plugins import Load, Meta, Request, SchedulingPolicy


class FirstComeFirstServed(SchedulingPolicy):
    """Runs requests in order of arrival; by the inherited default, preempts the last admitted."""

    contract = 1
    uses_priority = False

    def key(self, request: Request) -> Any:
        """Order by arrival."""
        return request.arrival_time


class Priority(SchedulingPolicy):
    """Runs smaller values of `priority` first, ties in order of arrival.

    The request with the largest value is preempted first, of equal values the last to arrive.
    """

    contract = 1

    def key(self, request: Request) -> Any:
        """Order by priority, then by arrival."""
        return _priority_key(request)

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the request with the largest priority value, ties the latest to arrive."""
        return max(reversed(running), key=_priority_key)


def _priority_key(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time


class ShortestFirst(SchedulingPolicy):
    """Shortest job first with linear ageing, so that no request starves.

    The key is the arrival time plus `seconds_per_token` for each token of expected work. It can be
    static, since all requests age alike. A request is overtaken only by shorter ones that arrive
    within `seconds_per_token` times the difference in work after it.
    """

    contract = 1
    uses_priority = False

    class Options(plugins.Options):
        """The weight of work against waiting time.

        Attributes:
            seconds_per_token: added to the arrival time for each token of work; 0 is fcfs.
            output_weight: weight of a token of `max_tokens` in the work; a prompt token weighs 1.
                Above 1, longer prompts go first among requests without `max_tokens`, since they
                leave less room for outputs.
        """

        seconds_per_token: Annotated[float, Meta(ge=0)] = 0.01
        output_weight: Annotated[float, Meta(ge=0)] = 1.0

    def key(self, request: Request) -> Any:
        """Order by arrival and work."""
        outputs = self.options.output_weight * (request.params.max_tokens or 0)
        work = request.num_prompt_tokens + outputs
        return request.arrival_time + self.options.seconds_per_token * work
