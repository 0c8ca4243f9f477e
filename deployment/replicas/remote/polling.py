"""Waiting for sockets and descriptors."""

from __future__ import annotations

from collections.abc import Iterable

import zmq

Source = zmq.Socket[bytes] | int


def readable(sources: Iterable[Source], seconds: float) -> set[Source]:
    """Return the sources that can be read, as soon as there are any or the time is up."""
    poller = zmq.Poller()
    for source in sources:
        poller.register(source, zmq.POLLIN)
    events = poller.poll(int(max(seconds, 0.0) * 1000) + 1)
    return {source for source, _ in events}
