"""Measures of a simulated fleet, and their report."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection

import numpy as np

from hardpoint.plugins import EngineCoreOutput, FinishReason

from .reports import DecisionTimes, FinishedRequests, Objective, Percentiles
from .workload import TENANT, SimulatedRequest


class _Progress:
    """A request that has not ended."""

    __slots__ = ("at", "first", "num_cached", "num_outputs", "num_prompt", "session", "tenant")

    def __init__(self, at: float, num_prompt: int, tenant: int, session: int) -> None:
        self.at, self.tenant, self.session = at, tenant, session
        self.num_prompt = num_prompt
        self.num_outputs = self.num_cached = 0
        self.first = math.nan


class Measures:
    """Collects the values of a report; a request that has ended takes six numbers.

    Attributes:
        requests, finished, refused, num_moves: as in `FleetReport`.
        prompt_tokens, cached_tokens, output_tokens: tokens of requests that had any output.
        refusals: first text by kind of error.
        last_output: when the last output came, in seconds.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.requests = self.finished = self.refused = self.num_moves = self.num_good = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.refusals: dict[str, str] = {}
        self.last_output = 0.0
        self._at, self._ttft, self._tpot, self._e2e = (array("d") for _ in range(4))
        self._tenant, self._session = array("l"), array("l")
        self._refused_sessions = array("l")
        self._tenants: dict[str | None, int] = {None: 0}
        self._sessions: dict[str | None, int] = {None: 0}
        self._decisions = array("d")
        self._live: dict[str, _Progress] = {}
        self._load = _LoadVariation()

    def sent(self, request_id: str, request: SimulatedRequest, num_prompt: int, now: float) -> None:
        """Note a request of the trace."""
        self.requests += 1
        tenant = self._tenants.setdefault(request.tags.get(TENANT), len(self._tenants))
        session = self._sessions.setdefault(request.session, len(self._sessions))
        self._live[request_id] = _Progress(now, num_prompt, tenant, session)

    def decided(self, seconds: float) -> None:
        """Note the real time of a decision."""
        self._decisions.append(seconds)

    def moved(self) -> None:
        """Note that a request of an engine that has died goes on at another one."""
        self.num_moves += 1

    def set_engines(self, ranks: Collection[int], now: float) -> None:
        """Note which engines serve."""
        self._load.set_engines(ranks, now)

    def count_in_flight(self, rank: int, change: int, now: float) -> None:
        """Note that a request was sent to an engine, or has ended there."""
        self._load.change(rank, change, now)

    def read(self, output: EngineCoreOutput, now: float) -> None:
        """Note an output of a request."""
        progress = self._live[output.request_id]
        if output.num_cached_tokens is not None:
            progress.num_cached = output.num_cached_tokens
        if output.new_token_ids:
            if not progress.num_outputs:
                progress.first = now
                self.prompt_tokens += progress.num_prompt
                self.cached_tokens += progress.num_cached
            progress.num_outputs += len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._end(progress, output, now)

    def _end(self, progress: _Progress, output: EngineCoreOutput, now: float) -> None:
        self.last_output = now
        self.output_tokens += progress.num_outputs
        if output.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            self.refused += 1
            kind = output.error_kind or str(output.finish_reason)
            self.refusals.setdefault(kind, output.error or "")
            self._refused_sessions.append(progress.session)
            return
        self.finished += 1
        ttft, further = progress.first - progress.at, progress.num_outputs - 1
        tpot = (now - progress.first) / further if further else 0.0
        self._at.append(progress.at)
        self._ttft.append(ttft)
        self._tpot.append(tpot if further else math.nan)
        self._e2e.append(now - progress.at)
        self._tenant.append(progress.tenant)
        self._session.append(progress.session)
        self.num_good += ttft <= self.objective.ttft and tpot <= self.objective.tpot

    @property
    def ended(self) -> FinishedRequests:
        """Times of the finished requests."""
        unfinished = [progress.session for progress in self._live.values()]
        return FinishedRequests(
            at=np.array(self._at),
            ttft=np.array(self._ttft),
            tpot=np.array(self._tpot),
            e2e=np.array(self._e2e),
            tenant=np.array(self._tenant),
            session=np.array(self._session),
            failed=np.array([*self._refused_sessions, *unfinished], dtype=np.int64),
            tenants=list(self._tenants),
            sessions=list(self._sessions),
            objective=self.objective,
        )

    def load_variation(self, now: float) -> float:
        """Return `FleetReport.load_variation`."""
        return self._load.mean(now)

    def decision_times(self) -> DecisionTimes:
        """Return the real time of the decisions so far."""
        times = Percentiles.of(self._decisions)
        count = len(self._decisions)
        return DecisionTimes(
            count=count, mean=1e6 * times.mean, p50=1e6 * times.p50, p99=1e6 * times.p99
        )


class _LoadVariation:
    """The time-weighted coefficient of variation of the requests in flight, in O(1) per change."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sum = self._squares = 0
        self._since = self._area = self._seconds = 0.0

    def set_engines(self, ranks: Collection[int], now: float) -> None:
        self._pass(now)
        self._counts = {rank: self._counts.get(rank, 0) for rank in ranks}
        self._sum = sum(self._counts.values())
        self._squares = sum(count * count for count in self._counts.values())

    def change(self, rank: int, change: int, now: float) -> None:
        if (before := self._counts.get(rank)) is None:  # it has died, with what it had
            return
        self._pass(now)
        self._counts[rank] = before + change
        self._sum += change
        self._squares += change * (2 * before + change)

    def mean(self, now: float) -> float:
        self._pass(now)
        return self._area / self._seconds if self._seconds else 0.0

    def _pass(self, now: float) -> None:
        seconds, self._since = now - self._since, now
        if seconds and self._sum:
            variance = len(self._counts) * self._squares - self._sum * self._sum
            self._area += seconds * math.sqrt(max(variance, 0)) / self._sum
            self._seconds += seconds
