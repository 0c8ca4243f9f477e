"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint import plugins
from hardpoint.plugins import Annotated, Load, Meta, Request, SchedulingPolicy


class EarliestDeadline(SchedulingPolicy):
    """Runs the request with the earliest deadline first; preempts the one with the latest.

    No request starves: it is overtaken only by those that arrive before its own deadline.

    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
    Environment", Journal of the ACM 20(1), 1973.
    """

    contract = 1

    class Options(plugins.Options):
        """`horizon`: seconds from arrival to the deadline of requests without a timeout."""

        horizon: Annotated[float, Meta(ge=0)] = 60.0

    options: Options

    def key(self, request: Request) -> float:
        """Order by deadline."""
        if request.deadline is not None:
            return request.deadline
        return request.arrival_time + self.options.horizon

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the request with the latest deadline, ties the latest admitted."""
        return max(reversed(running), key=self.key)
