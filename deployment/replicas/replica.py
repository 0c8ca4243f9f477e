"""One engine of several, as its client, its group and balancers see it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from hardpoint.plugins import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from hardpoint.process.client.base import RemoteClient

from .prefix_index import PrefixIndex
from .sessions import Sessions
from .statistics import PrefillRate


class ReplicaClient(RemoteClient, Protocol):
    """The client of one engine of several."""

    @property
    def was_killed(self) -> bool:
        """Whether something outside ended the engine, so that no plugin is to blame."""


class ReplicaView:
    """Read-only view of an engine for balancers, as `EngineView` describes it."""

    __slots__ = ("_replica",)

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def rank(self) -> int:
        """The number of the engine."""
        return self._replica.rank

    @property
    def in_flight(self) -> int:
        """The requests that were sent there and have not ended."""
        return self._replica.in_flight

    @property
    def pending_prompt_tokens(self) -> int:
        """The tokens to compute of requests that have no output yet."""
        return self._replica.pending_prompt_tokens

    @property
    def num_waiting(self) -> int:
        """The requests that wait there, including requests on their way."""
        return self._replica.num_waiting

    @property
    def num_running(self) -> int:
        """The requests that run there."""
        return self._replica.num_running

    @property
    def kv_cache_usage(self) -> float:
        """The share of KV blocks that requests reference."""
        return self._replica.kv_cache_usage

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> int:
        """Return the length of the longest prefix of a prompt that the engine has cached."""
        return self._replica.cached_prefix_tokens(request)

    def has_session(self, request: EngineCoreRequest) -> bool:
        """Return whether the last request of the same session ran there."""
        return self._replica.has_session(request)

    def has_adapter(self, request: EngineCoreRequest) -> bool:
        """Return whether the request's adapter is loaded there."""
        return self._replica.has_adapter(request)


class Replica:
    """One engine of several.

    Attributes:
        rank: number of the engine.
        view: what balancers see of it.
        client: its client; None while it is started.
        stats: its last scheduler statistics.
        failure: the error that ended it before its start was complete.
        is_serving: whether it accepts requests.
        is_starting: whether it is started again.
        is_added: whether it was started while others served, for the first time.
        is_draining: whether it is about to end, once its requests have ended.
        is_leaving: whether its process was asked to end, so that it takes no more requests.
        is_paused: whether it was paused or put to sleep, so that what is sent there waits.
        is_reachable: whether it takes messages.
        blocked_since: when it took no message for the first time since it took one, in seconds;
            None if it took the last one.
    """

    def __init__(
        self,
        rank: int,
        sessions: Sessions,
        prefill_rate: PrefillRate,
        index: PrefixIndex | None = None,
        *,
        reports: bool = False,
    ) -> None:
        """Begin without a request.

        Args:
            index: prefixes that engines have cached; None if the balancer does not use it.
            reports: whether it reports its load.
        """
        self.rank = rank
        self.view = ReplicaView(self)
        self.client: ReplicaClient | None = None
        self.stats: SchedulerStats | None = None
        self.failure: Exception | None = None
        self.is_serving = False
        self.is_starting = False
        self.is_added = False
        self.is_draining = False
        self.is_leaving = False
        self.is_paused = False
        self.is_reachable = True
        self.blocked_since: float | None = None
        self.in_flight = 0
        self.pending_prompt_tokens = 0
        self.num_running = 0
        self.kv_cache_usage = 0.0
        self._reported_waiting = 0
        self._unseen: dict[str, bool] = {}  # what it has not reported yet, and whether it is live
        self._adapters: frozenset[str] = frozenset()
        self._sessions, self._index, self._reports = sessions, index, reports
        self._prefill_rate = prefill_rate
        self._busy_since = 0.0  # with prompts, while it has any to compute

    @property
    def open_client(self) -> ReplicaClient:
        """The client of an engine that has been started."""
        assert self.client is not None
        return self.client

    @property
    def num_waiting(self) -> int:
        """The requests that wait there, including requests on their way."""
        return self._reported_waiting + sum(self._unseen.values())

    def cached_prefix_tokens(self, request: EngineCoreRequest) -> int:
        """Return the length of the longest prefix of a prompt that the engine has cached."""
        index = self._index
        return 0 if index is None else index.cached_prefix_tokens_at(self.rank, request)

    def has_session(self, request: EngineCoreRequest) -> bool:
        """Return whether the last request of the same session ran there."""
        return self._sessions.rank_of(request) == self.rank

    def has_adapter(self, request: EngineCoreRequest) -> bool:
        """Return whether the request's adapter is loaded there."""
        return request.lora is None or request.lora.name in self._adapters

    def add(self, request_id: str, num_tokens: int) -> None:
        """Count a request that is sent there, and its tokens to compute."""
        self.in_flight += 1
        if not self.pending_prompt_tokens:
            self._busy_since = time.monotonic()
        self.pending_prompt_tokens += num_tokens
        if self._reports:
            self._unseen[request_id] = True

    def computed(self, num_tokens: int) -> None:
        """Count tokens as computed."""
        now = time.monotonic()
        self._prefill_rate.add(num_tokens, now - self._busy_since)
        self._busy_since = now
        self.pending_prompt_tokens -= num_tokens

    def remove(self, request_id: str, num_tokens: int) -> None:
        """Count a request as ended there, and its tokens that were not computed."""
        self.in_flight -= 1
        self.pending_prompt_tokens -= num_tokens
        if request_id in self._unseen:
            self._unseen[request_id] = False

    def read(self, outputs: EngineCoreOutputs) -> None:
        """Read the reports about the engine in outputs, and remove them."""
        if outputs.scheduler_stats is not None:
            self.stats = outputs.scheduler_stats
        if (changes := outputs.cache_changes) is not None:
            outputs.cache_changes = None
            if self._index is not None:
                self._index.follow(self.rank, changes, self.open_client.call)
        if (load := outputs.load) is None:
            return
        outputs.load = None
        self._reported_waiting, self.num_running = load.num_waiting, load.num_running
        self.kv_cache_usage, self.is_leaving = load.kv_cache_usage, load.is_leaving
        self._adapters = frozenset(load.adapters)
        if (last := load.last_request) in self._unseen:
            for request_id in list(self._unseen):
                del self._unseen[request_id]
                if request_id == last:
                    break


def set_starting(replicas: Sequence[Replica], *, is_starting: bool) -> None:
    """Note whether engines are started again."""
    for replica in replicas:
        replica.is_starting = is_starting
