"""Publishes the KV cache events of each step to every publisher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.faults import Fanout, FaultReporter
from hardpoint.plugins import KVEventBatch, KVEventPublisher
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.typed import read_only


class KVEventFanout:
    """Passes the events of each step to all publishers, also if one of them fails."""

    def __init__(
        self,
        publishers: Sequence[tuple[KVEventPublisher, FaultReporter, PluginCalls]],
        wall_clock: Callable[[], float],
        data_parallel_rank: int = 0,
    ) -> None:
        """Store the publishers.

        Args:
            publishers: each with the reporter of its faults and what calls its methods.
            wall_clock: seconds since 1970.
            data_parallel_rank: data-parallel rank of the engine.
        """
        self._publishers = Fanout(publishers)
        self._wall_clock = wall_clock
        self._rank = data_parallel_rank

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish the events of a step, if there are any.

        Raises:
            PluginFaultError: a publisher whose faults end the engine failed; all were called.
        """
        if events and self._publishers:
            batch = read_only(KVEventBatch(self._wall_clock(), list(events), self._rank))
            self._publishers.call("publish", batch)

    def close(self) -> None:
        """Close all publishers.

        Raises:
            PluginFaultError: a publisher whose faults end the engine failed; all were closed.
        """
        self._publishers.close()
