"""Measures of a simulated fleet, and their report."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from hardpoint.plugins import EngineCoreOutput, FinishReason


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """A service level objective, which a request meets or does not.

    Attributes:
        ttft: most seconds until its first token.
        tpot: most seconds per further token, in its mean.
    """

    ttft: float = 1.0
    tpot: float = 0.05


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a time in seconds; 0 without any request."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return those of values, interpolated between neighbours."""
        if not len(values):
            return cls()
        p50, p90, p99 = np.percentile(np.asarray(values, dtype=np.float64), (50, 90, 99))
        return cls(p50=float(p50), p90=float(p90), p99=float(p99), mean=float(np.mean(values)))


class DecisionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Real time of the balancer's decisions, which differs from run to run.

    Attributes:
        count: number of decisions.
        mean, p50, p99: microseconds of one.
    """

    count: int
    mean: float
    p50: float
    p99: float


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a simulation: the same for the same requests and settings, byte for byte.

    Attributes:
        balancer: name of the balancer.
        engines: number of engines at the start.
        requests: number of requests.
        finished: those that got all their tokens.
        refused: those that an engine refused or ended with an error.
        unfinished: those that have not ended, because no engine is left.
        refusals: how often each error came, the text of the first one by its kind.
        moved: how often a request went on at another engine.
        virtual_seconds: from the first request to the last output.
        steps: number of steps, of all engines together.
        preemptions: number of preemptions, of all engines together.
        prompt_tokens: tokens of the prompts that were begun.
        output_tokens: tokens that were generated.
        computed_tokens: tokens that engines computed.
        reuse: share of the prompt tokens that a cache had, from 0 to 1.
        ttft: time to the first token.
        tpot: mean time per further token of a request, of requests with several.
        objective: the service level objective.
        goodput: requests per second that met it.
        goodput_share: share of all requests that met it.
        imbalance: tokens computed by the engine that computed the most, over the mean of all.
        load_variation: standard deviation of the requests in flight at an engine over their mean,
            in the mean over the time in which there were any.
        faults: failed decisions, by the name of the component.
    """

    balancer: str
    engines: int
    requests: int
    finished: int
    refused: int
    unfinished: int
    refusals: dict[str, str]
    moved: int
    virtual_seconds: float
    steps: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    reuse: float
    ttft: Percentiles
    tpot: Percentiles
    objective: Objective
    goodput: float
    goodput_share: float
    imbalance: float
    load_variation: float
    faults: dict[str, int]


class _Progress:
    """A request that has not ended."""

    __slots__ = ("at", "first", "num_cached", "num_outputs", "num_prompt")

    def __init__(self, at: float, num_prompt: int) -> None:
        self.at = at
        self.num_prompt = num_prompt
        self.num_outputs = self.num_cached = 0
        self.first = math.nan


class Measures:
    """Collects what a report is made of; memory for a request that has ended is three numbers.

    Attributes:
        requests, finished, refused, num_moves: as in `FleetReport`.
        prompt_tokens, cached_tokens, output_tokens: tokens of requests that had any output.
        refusals: first text by kind of error.
        last_output: when the last output came, in seconds.
    """

    def __init__(self, objective: Objective) -> None:
        """Begin without requests."""
        self.objective = objective
        self.requests = self.finished = self.refused = self.num_moves = self.num_good = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.refusals: dict[str, str] = {}
        self.last_output = 0.0
        self.ttft, self.tpot = array("d"), array("d")
        self._decisions = array("d")
        self._live: dict[str, _Progress] = {}
        self._load = _LoadVariation()

    def sent(self, request_id: str, num_prompt: int, now: float) -> None:
        """Note a request of the trace."""
        self.requests += 1
        self._live[request_id] = _Progress(now, num_prompt)

    def decided(self, seconds: float) -> None:
        """Note the real time of a decision."""
        self._decisions.append(seconds)

    def moved(self, rank: int, now: float) -> None:
        """Note that a request leaves an engine that has died."""
        self.num_moves += 1
        self._load.change(rank, -1, now)

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
            return
        self.finished += 1
        ttft, further = progress.first - progress.at, progress.num_outputs - 1
        tpot = (now - progress.first) / further if further else 0.0
        self.ttft.append(ttft)
        if further:
            self.tpot.append(tpot)
        self.num_good += ttft <= self.objective.ttft and tpot <= self.objective.tpot

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
