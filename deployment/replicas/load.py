"""The load of several engines."""

from __future__ import annotations

import threading
from typing import Literal

from hardpoint.plugins.server.engine_set import EngineStatus, LoadReport

from .replica import Replica
from .replicas import Replicas


class Loads:
    """Reports the load of several engines."""

    def __init__(self, replicas: Replicas, changed: threading.Condition) -> None:
        """Report on engines, which `changed` guards."""
        self._replicas, self._changed = replicas, changed

    def report(self) -> LoadReport:
        """Return the load of the engines now; no engine is asked."""
        with self._changed:
            engines = [_status(self._replicas.of(rank)) for rank in self._replicas.ranks]
        return LoadReport.of(engines, self._replicas.prefill_rate.per_second)


def _status(replica: Replica) -> EngineStatus:
    return EngineStatus(
        rank=replica.rank,
        state=_state(replica),
        in_flight=replica.in_flight,
        num_running=replica.num_running,
        num_waiting=replica.num_waiting,
        waiting_prompt_tokens=replica.pending_prompt_tokens,
        kv_cache_usage=replica.kv_cache_usage,
    )


def _state(
    replica: Replica,
) -> Literal["serving", "paused", "starting", "draining", "dead"]:
    if replica.is_draining or replica.is_leaving:
        return "draining"
    if replica.is_serving:
        return "paused" if replica.is_paused else "serving"
    return "starting" if replica.is_starting or replica.is_added else "dead"
