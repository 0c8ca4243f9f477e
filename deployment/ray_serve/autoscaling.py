"""How many engines there are to be: by the seconds of prompt work that wait."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

_MOST_RUNNING = 0.9
"""Of the requests that engines may run at once, how many the engines that stay have to run."""


class WaitingPromptWork:
    """The autoscaling policy of engines; Serve applies bounds and delays to its result."""

    def __init__(self, waiting_seconds: float) -> None:
        """`waiting_seconds` of work may wait for each engine."""
        self._waiting_seconds = waiting_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return how many engines there should be.

        So many that each has `waiting_seconds` of work or less, and that those which stay can run
        all requests that run.
        """
        metrics = context.aggregated_metrics or {}
        waiting = metrics.get("waiting_seconds", {})
        if not waiting:  # no engine has reported yet
            return context.target_num_replicas, {}
        running = metrics.get("running_share", {})
        wanted = math.ceil(sum(waiting.values()) / self._waiting_seconds)
        holding = math.ceil(sum(running.values()) / _MOST_RUNNING)
        if wanted <= context.target_num_replicas:
            wanted = max(wanted, min(holding, context.target_num_replicas))
        return max(wanted, 1), {}
