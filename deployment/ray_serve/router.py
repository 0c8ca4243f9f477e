"""The request router: the alpha interface of Ray Serve, in one file; see `version.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from hardpoint.errors import EngineDeadError

OnReplicas = Callable[[frozenset[str]], None]
"""Called with the ids of the replicas that take requests, in the router's thread."""


class Address:
    """The first argument of each call of an engine: which replica it is for.

    The router, which runs in the process of the caller, reads it; the replica gets the name alone.

    Attributes:
        replica: id of the replica; None is any.
    """

    def __init__(self, replica: str | None, on_replicas: OnReplicas | None = None) -> None:
        """`on_replicas`: called whenever the replicas change, from the first call on."""
        self.replica = replica
        self.on_replicas = on_replicas

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self.replica,)


class EngineRouter(RequestRouter):
    """Sends each call to the engine that the balancer has chosen for its request.

    The balancer sees what only the ingress knows (requests in flight, prefixes that engines have
    cached), so it is asked there, and its choice comes with the call. Serve's ranks have that one
    engine: where its queue is full, Serve waits for it. `max_ongoing_requests` is above what
    engines take, so that their own limits hold.
    """

    def initialize_state(self, **_options: Any) -> None:
        """Begin without a listener."""
        self._on_replicas: OnReplicas | None = None
        self._notified: frozenset[str] | None = None
        self._lock = threading.Lock()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that a call names, as the only rank."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full queue is polled
        address: Address = pending_request.args[0]
        if address.on_replicas is not None:
            self._on_replicas = address.on_replicas
            self._notify()
        if address.replica is None:
            return [candidate_replicas]
        matches = [replica for replica in candidate_replicas if _id(replica) == address.replica]
        if not matches:
            gone = EngineDeadError(f"the replica {address.replica} takes no more requests")
            if not pending_request.future.done():
                pending_request.future.set_exception(gone)
            return [candidate_replicas]  # which ends the search, as the call has ended
        return [matches]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the replicas that Serve runs."""
        super().update_replicas(replicas)
        self._notify()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._notify()

    def _notify(self) -> None:
        listener = getattr(self, "_on_replicas", None)
        if listener is None:
            return
        ids = frozenset(_id(replica) for replica in self.curr_replicas.values())
        with self._lock:
            if ids == self._notified:
                return
            self._notified = ids
        listener(ids)


def _id(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
