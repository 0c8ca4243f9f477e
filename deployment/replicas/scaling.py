"""Changes of the number of engines, while they serve."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from hardpoint.errors import EngineDeadError, shown
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.plugins.server.engine_set import EngineSet

from .ledger import Ledger
from .replica import Replica
from .replicas import Replicas

_log = logging.getLogger("hardpoint")

_MOST_ENGINES = 1024
_POLL_S = 0.02


class Scaling:
    """Starts and retires engines; one change at a time, each whole or undone."""

    def __init__(
        self,
        replicas: Replicas,
        ledger: Ledger,
        changed: threading.Condition,
        move: Callable[[Replica], None],
        report_end: Callable[[Replica], None],
    ) -> None:
        """Begin with no change.

        Args:
            changed: guards both.
            move: lets the requests of an engine go on at others.
            report_end: lets sinks know of the end of an engine.
        """
        self._replicas, self._ledger = replicas, ledger
        self._changed, self._move, self._report_end = changed, move, report_end
        self._epoch = 0
        self._is_busy = threading.Lock()

    def scale(self, num_engines: int, drain_s: float) -> EngineSet:
        """Start or retire engines, so that so many live.

        Dead engines do not count; their ranks are free again. Of the others, those that are being
        restarted are retired first, then those of the highest ranks.

        Raises:
            RequestError: the number is not possible.
            EngineDeadError: all engines are dead.
            HardpointError: another change is under way, or an engine cannot be started.
        """
        if type(num_engines) is not int or not 1 <= num_engines <= _MOST_ENGINES:
            raise RequestError(
                f"scale: expected 1 to {_MOST_ENGINES} engines, got {shown(num_engines)}"
            )

        def change() -> tuple[int, Sequence[int]]:
            replicas = self._replicas
            living = sorted(
                replicas.coming, key=lambda rank: (not replicas.of(rank).is_serving, rank)
            )
            return max(num_engines - len(living), 0), living[num_engines:]

        return self._change("scale", change, drain_s)

    def retire(self, ranks: Sequence[int], drain_s: float) -> EngineSet:
        """End engines, once their requests have ended or the time is up.

        Raises:
            RequestError: one is not an engine, or no living engine would be left.
            EngineDeadError: all engines are dead.
            HardpointError: another change is under way.
        """

        def change() -> tuple[int, Sequence[int]]:
            known, living = self._replicas.ranks, self._replicas.coming
            for rank in ranks:
                if rank not in known:
                    listed = ", ".join(map(str, known))
                    raise RequestError(f"retire: expected ranks of {listed}, got {shown(rank)}")
            if living <= set(ranks):
                got = "all of them" if living == set(known) else "all that are not dead"
                raise RequestError(f"retire: expected that an engine is left, got {got}")
            return 0, tuple(dict.fromkeys(ranks))

        return self._change("retire", change, drain_s)

    def replace(self, rank: int, *, is_starting: bool) -> tuple[Replica, Replica] | None:
        """Put another engine in the place of one, once its requests have ended, or go on elsewhere.

        It waits for a change that is under way.

        Args:
            rank: number of the engine.
            is_starting: whether the other one is going to start.

        Returns:
            The engine, without requests, and the other one; None if it does not serve, or its end
            is that of others too.
        """
        with self._is_busy:
            with self._changed:
                serving = {engine.rank: engine for engine in self._replicas.serving}
                replica = serving.get(rank)
                if replica is None or self._replicas.ending_with(replica) != [replica]:
                    return None
                self._replicas.drain(replica, for_good=False)
            drain_s = self._replicas.start.config.engine.drain_seconds
            self._wait_without_requests([replica], drain_s)
            with self._changed:
                if not self._replicas.is_current(replica):  # it has died, and its requests go on
                    return None
                successor = self._replicas.succeed(replica, is_starting=is_starting)
                self._report_end(replica)
            self._move(replica)
            return replica, successor

    def _change(
        self, name: str, change: Callable[[], tuple[int, Sequence[int]]], drain_s: float
    ) -> EngineSet:
        if not drain_s >= 0:
            raise RequestError(f"drain_seconds: expected seconds >= 0, got {shown(drain_s)}")
        if not self._is_busy.acquire(blocking=False):
            raise HardpointError("scale: the engines are being changed already; try again later")
        try:
            with self._changed:
                if not self._replicas.coming:
                    raise EngineDeadError(f"{name}: expected an engine that lives; all are dead")
                num_added, retired = change()
            if num_added or retired:
                self._apply(num_added, retired, drain_s)
                self._epoch += 1
            return EngineSet(self._epoch, self._replicas.ranks)
        finally:
            self._is_busy.release()

    def _apply(self, num_added: int, retired: Sequence[int], drain_s: float) -> None:
        """Start engines, or else end some; see `scale`."""
        if num_added:
            self._replicas.remove_dead()
            self._replicas.add(num_added, self._end)
        if retired:
            self._retire([self._replicas.of(rank) for rank in retired], drain_s)

    def _retire(self, replicas: Sequence[Replica], drain_s: float) -> None:
        for replica in replicas:
            self._replicas.drain(replica)
        self._wait_without_requests(replicas, drain_s)
        for replica in replicas:
            self._end_drained(replica.rank)

    def _end(self, replica: Replica) -> None:
        self._replicas.drain(replica)
        self._end_drained(replica.rank)

    def _end_drained(self, rank: int) -> None:
        """End an engine, unless it serves again; its requests go on at others."""
        while rank in self._replicas.ranks:  # twice, if it dies in the meantime
            current = self._replicas.of(rank)
            if current.is_serving:  # the others have died
                break
            self._move(current)
            if not self._replicas.remove(current):
                break
            self._report_end(current)

    def _wait_without_requests(self, replicas: Sequence[Replica], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._has_requests(replicas) and time.monotonic() < deadline:
                self._changed.wait(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))

    def _has_requests(self, replicas: Sequence[Replica]) -> bool:
        return not self._replicas.is_closed and any(map(self._ledger.of, replicas))


def leaving(leave: weakref.WeakMethod[Callable[[int], None]]) -> Callable[[int], None]:
    """Return a function that lets an engine go in a thread, if its client is there."""

    def start(rank: int) -> None:
        _log.warning("engine %d is to end, as is asked for where it runs", rank)
        if (method := leave()) is not None:
            name = "hardpoint-leave"
            threading.Thread(target=method, args=(rank,), name=name, daemon=True).start()

    return start
