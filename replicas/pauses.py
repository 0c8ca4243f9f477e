"""Which engines are paused, as control calls leave them."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

from hardpoint.plugins import HardpointError

from .replicas import Replica, Replicas

_PAUSING = frozenset({"pause", "sleep"})
_CHANGING = _PAUSING | {"resume", "wake_up"}


class Pauses:
    """Notes which engines are paused, so that balancers leave them out."""

    def __init__(self, replicas: Replicas) -> None:
        """Follow the calls to engines."""
        self._replicas = replicas

    def follow(self, replica: Replica, method: str, call: Future[Any]) -> None:
        """Note what a control call does; once it is answered, ask the engine whether it is paused.

        Args:
            replica: the engine.
            method: name of the utility.
            call: its answer.
        """
        if method not in _CHANGING:
            return
        if method in _PAUSING:
            self._replicas.set_paused(replica, paused=True)
        call.add_done_callback(lambda _: self._ask(replica))

    def _ask(self, replica: Replica) -> None:
        with contextlib.suppress(HardpointError):  # it is dead
            answer = replica.open_client.call("is_paused")
            answer.add_done_callback(lambda answer: self._answered(replica, answer))

    def _answered(self, replica: Replica, answer: Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._replicas.set_paused(replica, paused=answer.result())
