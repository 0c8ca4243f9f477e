"""Reports of a simulated fleet: percentiles, tenants, conversations, curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

_MOST_SHOWN = 10  # conversations
_PIECES = 60  # of the time in plots, at most
_IN_PIECE = 10  # requests of one, in the mean

Vector = np.ndarray[Any, np.dtype[np.float64]]


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
    p95: float = 0.0
    p99: float = 0.0
    mean: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float] | Vector) -> Percentiles:
        """Return the percentiles of values, interpolated between neighbors."""
        if not len(values):
            return cls()
        percentiles = np.percentile(np.asarray(values, dtype=np.float64), (50, 90, 95, 99))
        p50, p90, p95, p99 = map(float, percentiles)
        return cls(p50=p50, p90=p90, p95=p95, p99=p99, mean=float(np.mean(values)))


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tenant.

    Attributes:
        finished: requests that got all their tokens.
        ttft, tpot, e2e: as of `FleetReport`.
        goodput_share: share of these that met the objective.
    """

    finished: int
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    goodput_share: float


class SimulatedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, by its finished requests.

    Attributes:
        session: its name.
        turns: number of requests.
        seconds: from its first request to its last output.
        waited: sum of the times to the first token.
        longest_wait: the longest of these.
    """

    session: str
    turns: int
    seconds: float
    waited: float
    longest_wait: float


class ConversationsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations: requests with the name of a session.

    Attributes:
        count: number of conversations.
        turns: requests of each, in the mean.
        seconds: from the first request to the last output, of those that finished.
        waited: sum of the times to the first token, of those that finished.
        goodput_share: share of the conversations of which all requests met the objective.
        longest: those that waited the longest, at most ten.
    """

    count: int
    turns: float
    seconds: Percentiles
    waited: Percentiles
    goodput_share: float
    longest: list[SimulatedConversation]


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
        virtual_seconds: from the start of the trace, which is 0 on the clock, to the last output.
        steps: number of steps, of all engines together.
        preemptions: number of preemptions, of all engines together.
        prompt_tokens: tokens of the prompts that were begun.
        output_tokens: tokens that were generated.
        computed_tokens: tokens that engines computed.
        reuse: share of the prompt tokens that a cache had, from 0 to 1.
        ttft: time to the first token.
        tpot: mean time per further token of a request, of requests with several.
        e2e: time to the last token.
        tenants: the same by the tag `tenant`, of requests that have one.
        conversations: those of requests with a session; None without any.
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
    e2e: Percentiles
    tenants: dict[str, GroupReport]
    conversations: ConversationsReport | None
    objective: Objective
    goodput: float
    goodput_share: float
    imbalance: float
    load_variation: float
    faults: dict[str, int]


@dataclass(frozen=True)
class FinishedRequests:
    """Finished requests: arrays of one length, in the order in which they ended.

    Attributes:
        at: when each was sent, in seconds.
        ttft, e2e: seconds to the first token, and to the last.
        tpot: mean seconds per further token; NaN without any.
        tenant, session: places in `tenants` and `sessions`.
        failed: place in `sessions` of each request that failed, or has not ended.
        tenants, sessions: names; the first one is None, for requests without.
        objective: the objective.
    """

    at: Vector
    ttft: Vector
    tpot: Vector
    e2e: Vector
    tenant: Vector
    session: Vector
    failed: Vector
    tenants: Sequence[str | None]
    sessions: Sequence[str | None]
    objective: Objective

    @property
    def is_good(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each met the objective."""
        meets_objective = (self.ttft <= self.objective.ttft) & ~(self.tpot > self.objective.tpot)
        return np.asarray(meets_objective)

    def times(self, chosen: Any = slice(None)) -> dict[str, Percentiles]:
        """Return percentiles of the times of some requests, by the name of the time."""
        tpot = self.tpot[chosen]
        return {
            "ttft": Percentiles.of(self.ttft[chosen]),
            "tpot": Percentiles.of(tpot[~np.isnan(tpot)]),
            "e2e": Percentiles.of(self.e2e[chosen]),
        }

    def by_tenant(self) -> dict[str, GroupReport]:
        """Return the report of each tenant that has finished requests, by its name."""
        reports = {}
        for place, name in enumerate(self.tenants):
            chosen = np.flatnonzero(self.tenant == place)
            if name is not None and len(chosen):
                reports[name] = GroupReport(
                    finished=len(chosen),
                    goodput_share=float(self.is_good[chosen].mean()),
                    **self.times(chosen),
                )
        return dict(sorted(reports.items()))

    def conversations(self) -> ConversationsReport | None:
        """Return the report of the conversations, None without any."""
        with_one, failed = np.flatnonzero(self.session), self.failed[self.failed > 0]
        num_requests = len(with_one) + len(failed)
        if not num_requests:
            return None
        order = with_one[np.argsort(self.session[with_one], kind="stable")]
        session = self.session[order].astype(np.int64)
        starts = np.flatnonzero(np.diff(session, prepend=-1))
        turns = np.diff(starts, append=len(order))
        began = np.minimum.reduceat(self.at[order], starts)
        seconds = np.maximum.reduceat((self.at + self.e2e)[order], starts) - began
        waited = np.add.reduceat(self.ttft[order], starts)
        longest = np.maximum.reduceat(self.ttft[order], starts)
        good = np.logical_and.reduceat(self.is_good[order], starts)
        good &= ~np.isin(session[starts], failed)
        count = len(np.union1d(session[starts], failed))
        worst = np.argsort(-waited, kind="stable")[:_MOST_SHOWN]
        return ConversationsReport(
            count=count,
            turns=num_requests / count,
            seconds=Percentiles.of(seconds),
            waited=Percentiles.of(waited),
            goodput_share=int(good.sum()) / count,
            longest=[
                SimulatedConversation(
                    session=str(self.sessions[session[starts[place]]]),
                    turns=int(turns[place]),
                    seconds=float(seconds[place]),
                    waited=float(waited[place]),
                    longest_wait=float(longest[place]),
                )
                for place in worst
            ],
        )

    def curves(self) -> dict[str, list[float]]:
        """Return the curves of plots, as lists.

        The percentiles 0 to 100 of the times, and by the second in which requests were sent, in
        pieces of equal length: `time` (their ends), `good` (share that met the objective) and
        `wait` (mean time to the first token). Pieces without requests are left out.
        """
        if not len(self.at):
            return {name: [] for name in ("ttft", "tpot", "e2e", "time", "good", "wait")}
        percents = np.arange(101)
        tpot = self.tpot[~np.isnan(self.tpot)]
        curves = {
            name: np.percentile(values, percents).tolist() if len(values) else []
            for name, values in (("ttft", self.ttft), ("tpot", tpot), ("e2e", self.e2e))
        }
        pieces = max(1, min(_PIECES, len(self.at) // _IN_PIECE))
        ends = np.linspace(0, max(float(self.at.max()), 1e-9), pieces + 1)[1:]
        piece = np.searchsorted(ends, self.at)
        count = np.bincount(piece, minlength=pieces)
        filled = count > 0
        for name, values in (("good", self.is_good), ("wait", self.ttft)):
            sums = np.bincount(piece, weights=values, minlength=pieces)
            curves[name] = (sums[filled] / count[filled]).tolist()
        return {**curves, "time": ends[filled].tolist()}
