"""Dispatch of requests to engines: placement, sending, and the queue for an engine."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import EngineCoreRequest, HardpointError
from hardpoint.process.client.base import Attempt

from .choice import EngineChoice
from .ledger import Entry, Ledger
from .recovery import Recovery
from .replica import Replica
from .replicas import Replicas

_log = logging.getLogger("hardpoint")

_BLOCKED_S = 1.0
"""How long an engine takes no message until the requests for it are sent elsewhere."""
RETRY_S = 0.001
"""Time between two attempts to send a message."""

Refuse = Callable[[Entry, Exception, str], None]
"""Ends a request with an error and the reason; the lock is held."""


class Dispatch:
    """Sends requests to the engines of a group. In any thread.

    An engine whose queue stays full, such as one that is stopped, is unreachable until a message of
    it comes: it gets no requests, and those that it has not taken go to others.
    """

    def __init__(
        self,
        choice: EngineChoice,
        replicas: Replicas,
        ledger: Ledger,
        recovery: Recovery,
        lock: threading.RLock,
        refuse: Refuse,
    ) -> None:
        """Dispatch the requests of a ledger.

        Args:
            recovery: those that wait for an engine.
            lock: guards all of these; no message is sent while it is held.
            refuse: see Refuse.
        """
        self._choice, self._replicas, self._ledger = choice, replicas, ledger
        self._recovery, self._lock, self._refuse = recovery, lock, refuse

    def offer(self, requests: Sequence[EngineCoreRequest]) -> Attempt:
        """Return a function that tries to send the new requests of one call without waiting.

        Raises:
            RequestError: one cannot be encoded.
            EngineDeadError: one names an engine that is dead.
        """
        attempts: deque[Attempt] = deque()
        for replica, part in self._place(requests):
            with contextlib.suppress(EngineDeadError):  # they go on elsewhere, see `_lost`
                offer = replica.open_client.offer_requests(part)
                ids = [request.request_id for request in part]
                attempts.append(partial(self._try, replica, ids, offer))

        def attempt() -> bool:
            while attempts:
                with contextlib.suppress(EngineDeadError):
                    if not attempts[0]():
                        return False
                attempts.popleft()
            return True

        return attempt

    def send_waiting(self) -> None:
        """Send the requests that wait for an engine, once one serves and takes messages."""
        while self._recovery.has_more and self._replicas.reachable:
            with self._lock:
                sent: list[tuple[Replica, Entry]] = []
                for entry in self._recovery.pop():
                    if (replica := self._choose(entry)) is not None:
                        sent.append((replica, entry))
                    else:
                        self._recovery.wait(entry)
            for replica, entry in sent:
                self._replicas.totals.num_resumes[replica.rank] += entry.num_moves > 0
                try:
                    self._send(replica, entry)
                except EngineDeadError:
                    pass  # they are waiting again, see `_lost`
                except HardpointError as error:
                    with self._lock:
                        self._refuse(entry, error, "cannot go on")
            if not sent:
                return

    def send_elsewhere(self, entry: Entry) -> None:
        """Let a request that an engine has taken go on at another one, for a reason but death."""
        entry.leave()
        entry.num_moves += 1
        self._recovery.wait(entry)

    def _place(
        self, requests: Sequence[EngineCoreRequest]
    ) -> list[tuple[Replica, list[EngineCoreRequest]]]:
        """Choose the engines of requests; requests without one wait until an engine serves."""
        with self._lock:
            for request in requests:
                rank = request.data_parallel_rank
                if rank is not None and rank not in self._replicas.coming:
                    raise EngineDeadError(f"data_parallel_rank: engine {rank} is dead")
            parts: dict[Replica, list[EngineCoreRequest]] = {}
            for entry in self._ledger.open(requests):
                if (replica := self._choose(entry)) is None:
                    self._recovery.wait(entry)
                else:
                    parts.setdefault(replica, []).append(entry.request)
            return list(parts.items())

    def _choose(self, entry: Entry) -> Replica | None:
        request, replicas = entry.request, self._replicas
        engines = replicas.chosen_from
        if (rank := request.data_parallel_rank) is not None:
            engines = [replica for replica in replicas.candidates if replica.rank == rank]
        if not engines:
            return None
        replica = self._choice.choose(request, engines)
        replicas.sessions.note(request, replica.rank)
        entry.send_to(replica, replicas.weight_version)
        return replica

    def _send(self, replica: Replica, entry: Entry) -> None:
        """Send a request that waited; if its engine takes no messages, it waits again.

        Raises:
            EngineDeadError: the engine is gone.
            RequestError: the request cannot be encoded.
        """
        with self._lock:
            if not self._ledger.has(entry):  # it was aborted
                return
        attempt = replica.open_client.offer_requests([entry.resumed()])
        while not self._try(replica, [entry.request.request_id], attempt, may_wait=True):
            time.sleep(RETRY_S)

    def _try(
        self,
        replica: Replica,
        request_ids: Sequence[str],
        attempt: Attempt,
        *,
        may_wait: bool = False,
    ) -> bool:
        """Try to send requests to an engine; return whether nothing is left to send there.

        If it takes no messages for a while, they go to another engine instead.

        Args:
            may_wait: whether they wait if no other engine takes messages.
        """
        if attempt():
            replica.blocked_since = None
            self._abort_gone(replica, request_ids)
            return True
        if replica.is_reachable:
            now = time.monotonic()
            if replica.blocked_since is None:
                replica.blocked_since = now
            if now - replica.blocked_since < _BLOCKED_S:
                return False
        if not may_wait and self._replicas.reachable in ([], [replica]):
            return False
        with self._lock:
            if replica.is_reachable:
                _log.warning("engine %d takes no messages; it gets no requests", replica.rank)
                self._replicas.set_reachable(replica, reachable=False)
            for request_id in request_ids:
                entry = self._ledger.get(request_id)
                if entry is not None and entry.replica is replica:
                    entry.leave()
                    self._recovery.wait(entry)
        if not may_wait:  # else the caller sends them
            self.send_waiting()
        return True

    def _abort_gone(self, replica: Replica, request_ids: Sequence[str]) -> None:
        """Abort requests at their engine if they were aborted before they were sent."""
        with self._lock:
            gone = [name for name in request_ids if self._ledger.get(name) is None]
        if gone:
            replica.open_client.abort_requests(gone)
