"""Reports of an engine to its clients: its load, and the changes of its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hardpoint.plugins import EngineCoreOutputs, SchedulerStats
from hardpoint.plugins.requests.engine_state import EngineLoad, KVCacheChanges

_INTERVAL_S = 0.1
"""The least time between two reports of the load."""


class ClientReports:
    """Adds reports to the outputs of a loop: the changes since the last ones.

    Every client gets them, whether or not it has requests.
    """

    # The load is looked at once per interval, and once more after the last thing that happened, for
    # which a loop without work waits (`wait_s`): so the last report is right, however old it is.

    def __init__(
        self,
        num_clients: int,
        clock: Callable[[], float],
        *,
        stats: Callable[[], SchedulerStats] | None,
        cache: Callable[[], KVCacheChanges | None] | None,
    ) -> None:
        """Begin with nothing reported.

        Args:
            num_clients: number of the engine's clients.
            clock: seconds.
            stats: returns the state of the scheduler, None if the load is not reported.
            cache: `CacheReports.pop`, None if they are not reported.
        """
        self._clock = clock
        self._stats, self._cache = stats, cache
        self._num_steps = 0
        self._last_requests: list[str | None] = [None] * num_clients
        self._sent: list[EngineLoad] = []
        self._due = 0.0  # when the load is looked at again, on the clock
        self._is_leaving = False
        self._is_late = False  # whether it may have changed since it was looked at

    def read_request(self, client: int, request_id: str) -> None:
        """Note that the loop has read a request of a client."""
        if 0 <= client < len(self._last_requests):
            self._last_requests[client] = request_id

    def leave(self) -> dict[int, EngineCoreOutputs]:
        """Return messages to all clients: the engine takes no more requests."""
        self._is_leaving, self._due = True, 0.0
        return self.with_reports({})

    def with_reports(
        self, outputs: Mapping[int, EngineCoreOutputs], *, executed: bool = False
    ) -> dict[int, EngineCoreOutputs]:
        """Return outputs with the reports that are due.

        Args:
            outputs: by client index.
            executed: whether they are those of a step that computed any token.

        Raises:
            PluginFaultError: a publisher of KV cache events whose faults end the engine failed.
        """
        self._num_steps += executed
        messages = dict(outputs)
        changes = self._cache() if self._cache else None
        loads = self._changed_loads(self._stats) if self._stats else []
        if changes is None and not loads:
            return messages
        for client in range(len(self._last_requests)):
            message = messages.setdefault(client, EngineCoreOutputs())
            message.cache_changes = changes
            if loads:
                message.load = loads[client]
        return messages

    @property
    def wait_s(self) -> float | None:
        """Seconds until a report may be due though nothing happens; None if none will be."""
        return max(self._due - self._clock(), 0.0) if self._is_late else None

    def _changed_loads(self, stats_now: Callable[[], SchedulerStats]) -> list[EngineLoad]:
        now = self._clock()
        self._is_late = now < self._due
        if self._is_late:
            return []
        self._due = now + _INTERVAL_S
        stats = stats_now()
        loads = [
            EngineLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_cache_usage=stats.kv_cache_usage,
                num_steps=self._num_steps,
                adapters=list(stats.num_requests_by_adapter),
                last_request=last,
                is_leaving=self._is_leaving,
            )
            for last in self._last_requests
        ]
        if loads == self._sent:
            return []
        self._sent = loads
        return loads
