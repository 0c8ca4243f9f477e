"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint import plugins
from hardpoint.plugins import Annotated, Load, Meta, Request, SchedulingPolicy


class EarliestDeadline(SchedulingPolicy):
    """The request whose time ends first runs first; who has most time left gives way.

    Nobody starves: a request is overtaken only by those that come before it is due.

    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
    Environment", Journal of the ACM 20(1), 1973.
    """

    contract = 1

    class Options(plugins.Options):
        """When the others are due: `horizon` seconds after they came, without a timeout."""

        horizon: Annotated[float, Meta(ge=0)] = 60.0

    def key(self, request: Request) -> float:
        """Order by deadline."""
        if request.deadline is not None:
            return request.deadline
        return request.arrival_time + self.options.horizon

    def victim(self, running: Sequence[Request], load: Load) -> Request:  # noqa: ARG002
        """Return the request that is due last, the latest admitted of equals."""
        return max(reversed(running), key=self.key)
