"""A publisher that keeps events in memory of the process."""

from __future__ import annotations

from hardpoint.plugins import KVEventPublisher

EVENTS = []


class EventList(KVEventPublisher):
    """Appends the events to EVENTS."""

    contract = 1

    def publish(self, batch):
        EVENTS.extend(batch.events)
