"""The sink of the client of one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hardpoint.plugins import EngineCoreOutputs

from .replicas import Replica


class _Receives(Protocol):
    def receive(self, replica: Replica, item: EngineCoreOutputs | Exception) -> None: ...


class Receiver:
    """The sink of an engine's client, which does not hold the client of several."""

    def __init__(self, group: Callable[[], _Receives | None], replica: Replica) -> None:
        """Hand what comes from an engine on to the group; `group` is a weak reference to it."""
        self._group, self._replica = group, replica

    def __call__(self, item: EngineCoreOutputs | Exception) -> None:
        """Hand on outputs, or the error that ended them."""
        if (group := self._group()) is not None:
            group.receive(self._replica, item)
