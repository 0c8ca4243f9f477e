"""The client of a simulated fleet, with the counts and choices of the real client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineConfig, EngineCoreOutputs, EngineCoreRequest
from hardpoint.plugins.requests.stats import StepFault
from hardpoint.replicas.choice import EngineChoice
from hardpoint.replicas.ledger import Entry, Ledger
from hardpoint.replicas.prefix_index import PrefixIndex
from hardpoint.replicas.replica import Replica
from hardpoint.replicas.sessions import Sessions
from hardpoint.replicas.statistics import PrefillRate

from .engine import SimulatedEngine
from .measures import Measures

_VERSION = "0"  # of weights, which never change here


class SimulatedClient:
    """Divides requests among engines, as `ReplicaSet` does, without processes and threads."""

    def __init__(
        self,
        config: EngineConfig,
        plugins: PluginSet,
        clock: Callable[[], float],
        measures: Measures,
        *,
        has_choice: bool,
    ) -> None:
        """Build the balancer; there is no engine yet.

        Args:
            clock: seconds.
            has_choice: whether there may be several engines.

        Raises:
            PluginError: the balancer cannot be built.
        """
        self._clock, self._measures = clock, measures
        self._choice = EngineChoice(plugins, config, clock)
        cache = config.kv_cache
        self._index: PrefixIndex | None = None
        if has_choice and self._choice.uses_cached_prefixes:
            self._index = PrefixIndex(cache.block_size, cache.hash_algorithm)
        self._sessions, self._ledger = Sessions(), Ledger()
        self._rate = PrefillRate()
        self._replicas: dict[int, Replica] = {}
        self._engines: dict[int, SimulatedEngine] = {}
        self._serving: list[Replica] = []
        self._waiting: list[Entry] = []

    @property
    def reports_cache(self) -> bool:
        """Whether engines are to report the changes of their caches."""
        return self._index is not None

    def faults(self) -> dict[str, StepFault]:
        """Return the failed decisions of the balancer, by its name."""
        return self._choice.faults()

    def add(self, engine: SimulatedEngine) -> None:
        """Let an engine serve; requests that waited for one are sent."""
        replica = Replica(engine.rank, self._sessions, self._rate, self._index, reports=True)
        # Asked only where changes are missing, of which none get lost here.
        replica.client = _NoControlCalls()  # type: ignore[assignment]
        self._replicas[engine.rank], self._engines[engine.rank] = replica, engine
        self._refresh()
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._place(entry)

    def remove(self, engine: SimulatedEngine) -> None:
        """Let an engine serve no more; its requests go on at others."""
        replica = self._replicas.pop(engine.rank)
        del self._engines[engine.rank]
        if self._index is not None:
            self._index.remove_engine(engine.rank)
        self._refresh()
        for entry in self._ledger.of(replica):
            entry.leave()
            entry.num_moves += 1
            self._place(entry)

    def send(self, request: EngineCoreRequest) -> None:
        """Send a request to the engine that the balancer chooses."""
        (entry,) = self._ledger.open([request])
        self._place(entry)

    def receive(self, engine: SimulatedEngine, item: EngineCoreOutputs) -> None:
        """Read the messages of an engine."""
        self._replicas[engine.rank].read(item)
        ledger, measures, now = self._ledger, self._measures, self._clock()
        for output in item.outputs:
            if (entry := ledger.get(output.request_id)) is None:
                continue
            entry.read(output)
            measures.read(output, now)
            if output.finish_reason is not None:
                measures.count_in_flight(engine.rank, -1, now)
                ledger.close(entry)

    def close(self) -> None:
        """Close the balancer."""
        self._choice.close()

    def _refresh(self) -> None:
        self._serving = [self._replicas[rank] for rank in sorted(self._replicas)]
        self._measures.set_engines(self._replicas, self._clock())

    def _place(self, entry: Entry) -> None:
        request = entry.request
        if not self._serving:
            self._waiting.append(entry)
            return
        began = time.perf_counter()
        replica = self._choice.choose(request, self._serving)
        self._measures.decided(time.perf_counter() - began)
        self._sessions.note(request, replica.rank)
        entry.send_to(replica, _VERSION)
        self._measures.count_in_flight(replica.rank, 1, self._clock())
        if entry.num_moves:
            self._measures.moved()
            request = entry.resumed()
        self._engines[replica.rank].submit(request)


class _NoControlCalls:
    """The client of a simulated engine, which answers no control calls."""

    def call(self, method: str, *args: Any) -> Any:  # noqa: ARG002
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{method}: a simulated engine takes no control calls")
