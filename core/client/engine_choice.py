"""The engines of a client of several, as balancers see them, and the choice among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.boundary.errors import close_all
from hardpoint.boundary.faults import StepFaults
from hardpoint.boundary.guard import guard
from hardpoint.plugins import (
    BalancerContext,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    LoadBalancer,
    SchedulerStats,
)
from hardpoint.plugins.stats import StepFault
from hardpoint.registry.plugin_set import PluginSet

if TYPE_CHECKING:
    from .process_client import ProcessClient

_MOST_SESSIONS = 65_536


class Replica:
    """One engine process of several; the `EngineView` of balancers.

    Attributes:
        rank: number of the engine.
        client: its client; None while it is started.
        stats: its last scheduler statistics.
        failure: the error that ended it before its start was complete.
        is_serving: whether it accepts requests.
        is_starting: whether it is started again.
    """

    def __init__(self, rank: int, sessions: Sessions) -> None:
        """Begin without a request."""
        self.rank = rank
        self.client: ProcessClient | None = None
        self.stats: SchedulerStats | None = None
        self.failure: Exception | None = None
        self.is_serving = False
        self.is_starting = False
        self.in_flight = 0
        self.pending_prompt_tokens = 0
        self.num_waiting = 0
        self.num_running = 0
        self.kv_cache_usage = 0.0
        self._sessions = sessions

    @property
    def open_client(self) -> ProcessClient:
        """The client of an engine that has been started."""
        assert self.client is not None
        return self.client

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> int:  # noqa: ARG002
        """Return the length of the longest prefix of a prompt that the engine has cached."""
        return 0

    def has_session(self, request: EngineCoreRequest) -> bool:
        """Return whether the last request of the same session ran there."""
        return self._sessions.rank_of(request) == self.rank

    def has_adapter(self, request: EngineCoreRequest) -> bool:
        """Return whether the request's adapter is loaded there."""
        if request.lora is None:
            return True
        return self.stats is not None and request.lora.name in self.stats.num_requests_by_adapter

    def read(self, outputs: EngineCoreOutputs) -> None:
        """Read the statistics that come with outputs."""
        if (stats := outputs.scheduler_stats) is not None:
            self.stats = stats
            self.num_waiting, self.num_running = stats.num_waiting, stats.num_running
            self.kv_cache_usage = stats.kv_cache_usage


class Sessions:
    """The engine that each session's last request was sent to; the oldest are forgotten."""

    def __init__(self, most: int = _MOST_SESSIONS) -> None:
        """Remember `most` sessions at most."""
        self._most = most
        self._ranks: dict[tuple[str | None, str], int] = {}

    def rank_of(self, request: EngineCoreRequest) -> int | None:
        """Return the rank of the engine; None without a session, or before its second request."""
        return None if (key := _session(request)) is None else self._ranks.get(key)

    def note(self, request: EngineCoreRequest, rank: int) -> None:
        """Remember where a request is sent."""
        if (key := _session(request)) is None:
            return
        self._ranks.pop(key, None)
        self._ranks[key] = rank
        if len(self._ranks) > self._most:
            del self._ranks[next(iter(self._ranks))]


def _session(request: EngineCoreRequest) -> tuple[str | None, str] | None:
    retention = request.retention
    return None if retention is None else (request.cache_salt, retention.session)


class EngineChoice:
    """Chooses engines by the balancer; after a fault, that with the fewest requests in flight."""

    def __init__(
        self,
        plugins: PluginSet,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the balancer.

        Raises:
            PluginError: it cannot be built.
        """
        entry = plugins.one("balancers")
        self._faults = StepFaults.under(config.plugins)
        built: Any = plugins.create(
            entry, BalancerContext, num_engines=config.parallel.data, clock=clock
        )
        self._balancer: LoadBalancer = guard(
            built,
            "balancers",
            self._faults.reporter(entry.source, "the engine with the fewest requests is taken"),
            self._faults.calls("balancers", entry.source),
        )
        self.uses_cached_prefixes = built.uses_cached_prefixes

    def choose(self, request: EngineCoreRequest, engines: Sequence[Replica]) -> Replica:
        """Return the engine for a request, of one or more that accept requests."""
        if len(engines) == 1:
            return engines[0]
        return engines[self._balancer.choose(request, engines)]

    def faults(self) -> dict[str, StepFault]:
        """Return the failed decisions of the balancer, by its name."""
        return self._faults.report()

    def slow(self) -> dict[str, StepFault]:
        """Return the decisions that took too long, by the balancer's name."""
        return self._faults.slow()

    def close(self) -> None:
        """Close the balancer."""
        close_all([self._balancer])
