"""The report of a load, made of its timelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hardpoint.simulation import Objective, Percentiles
from hardpoint.simulation.reports import ConversationsReport, FinishedRequests, GroupReport

from .answers import RequestTimeline
from .client import LoadMeasurements

CPU_LIMIT = 0.7
"""Share of a core from which on a client process is reported to limit the load."""
LAG_LIMIT_S = 0.01
_SEVERAL_TOKENS = 1.05


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """How well the client kept up.

    Attributes:
        processes: number of client processes.
        connections: number of connections that they opened.
        cpu_share: share of a core that the busiest of them used.
        lag_p99: seconds that its event loop woke up late.
        late_p99: seconds that arrivals were sent late.
        limits: respects in which the client limited the load, in plain sentences.
    """

    processes: int
    connections: int
    cpu_share: float
    lag_p99: float
    late_p99: float
    limits: list[str]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a load; times are those of the requests that ended well, in seconds.

    Attributes:
        requests: requests that ended, well or not.
        finished: those that ended well.
        failed: the others.
        unfinished: those that had not ended when the load was interrupted.
        errors: number of failed requests by the kind of error.
        seconds: from the beginning of the load to the end of its last request.
        prompt_tokens, output_tokens: tokens of the finished requests, as the server counts them.
        request_rate: finished requests per second.
        output_rate: their output tokens per second.
        total_rate: their prompt and output tokens per second.
        reuse: share of the prompt tokens that a cache had; None if the server does not report it.
        tokens_per_chunk: output tokens of a chunk, in the mean.
        ttft: time to the first token.
        tpot: mean time per further token of a request, of requests with several.
        itl: time between two chunks with text.
        e2e: time to the end of the answer.
        tenants: times by tenant, of requests that have one.
        conversations: those of the load; None without any.
        objective: the service level objective.
        goodput: requests per second that met it.
        goodput_share: share of all requests that met it.
        client: how well the client kept up.
        notes: remarks for who reads the figures.
    """

    requests: int
    finished: int
    failed: int
    unfinished: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    request_rate: float
    output_rate: float
    total_rate: float
    reuse: float | None
    tokens_per_chunk: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    tenants: dict[str, GroupReport]
    conversations: ConversationsReport | None
    objective: Objective
    goodput: float
    goodput_share: float
    client: ClientReport
    notes: list[str]


def report(
    outcomes: Sequence[LoadMeasurements], objective: Objective
) -> tuple[BenchReport, Mapping[str, list[float]]]:
    """Return the report of a load, and the curves of its plots, as those of simulations."""
    timelines = [timeline for outcome in outcomes for timeline in outcome.timelines]
    good = [timeline for timeline in timelines if not timeline.error]
    failed = [timeline for timeline in timelines if timeline.error]
    start = min(outcome.start for outcome in outcomes)
    seconds = max(t.ended for t in timelines) - start if timelines else 0.0
    ended = _ended(good, failed, start, objective)
    prompts, outputs = sum(t.prompt_tokens or 0 for t in good), sum(map(_tokens, good))
    chunks = sum(t.chunks for t in good)
    num_good = int(ended.is_good.sum())

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    made = BenchReport(
        requests=len(timelines),
        finished=len(good),
        failed=len(failed),
        unfinished=sum(outcome.unfinished for outcome in outcomes),
        errors=dict(Counter(t.error for t in failed).most_common()),
        seconds=seconds,
        prompt_tokens=prompts,
        output_tokens=outputs,
        request_rate=rate(len(good)),
        output_rate=rate(outputs),
        total_rate=rate(prompts + outputs),
        reuse=_reuse(good),
        tokens_per_chunk=outputs / chunks if chunks else 0.0,
        itl=Percentiles.of([gap for t in good for gap in t.gaps]),
        tenants=ended.by_tenant(),
        conversations=ended.conversations(),
        objective=objective,
        goodput=rate(num_good),
        goodput_share=num_good / len(timelines) if timelines else 0.0,
        client=client_report(outcomes),
        notes=_notes(good, outputs, chunks),
        **ended.times(),
    )
    return made, ended.curves()


def _ended(
    good: Sequence[RequestTimeline],
    failed: Sequence[RequestTimeline],
    start: float,
    objective: Objective,
) -> FinishedRequests:
    """Return the times of requests that ended well; without text, the end counts as first token."""
    tenants: dict[str | None, int] = {None: 0}
    sessions: dict[str | None, int] = {None: 0}
    return FinishedRequests(
        at=_vector(t.sent - start for t in good),
        ttft=_vector((t.first or t.ended) - t.sent for t in good),
        tpot=_vector(map(_time_per_token, good)),
        e2e=_vector(t.ended - t.sent for t in good),
        tenant=_vector(tenants.setdefault(t.tenant, len(tenants)) for t in good),
        session=_vector(sessions.setdefault(t.session, len(sessions)) for t in good),
        failed=_vector(sessions.setdefault(t.session, len(sessions)) for t in failed),
        tenants=list(tenants),
        sessions=list(sessions),
        objective=objective,
    )


def _vector(values: Iterable[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.fromiter(values, dtype=np.float64)


def _tokens(timeline: RequestTimeline) -> int:
    return timeline.chunks if timeline.output_tokens is None else timeline.output_tokens


def _time_per_token(timeline: RequestTimeline) -> float:
    """Return the mean seconds of a further token; NaN without any."""
    further = _tokens(timeline) - 1
    if not timeline.chunks or further < 1:
        return math.nan
    return (timeline.last - timeline.first) / further


def _reuse(good: Sequence[RequestTimeline]) -> float | None:
    counted = [t for t in good if t.cached_tokens is not None]
    prompts = sum(t.prompt_tokens or 0 for t in counted)
    return sum(t.cached_tokens or 0 for t in counted) / prompts if prompts else None


def _notes(good: Sequence[RequestTimeline], outputs: int, chunks: int) -> list[str]:
    notes = []
    if any(t.output_tokens is None for t in good):
        notes.append(
            "The server sent no usage: a chunk counts as a token, prompts are not counted."
        )
    elif chunks and outputs / chunks > _SEVERAL_TOKENS:
        each_chunk = f"{outputs / chunks:.2f} tokens"
        notes.append(f"A chunk has {each_chunk} on average: ITL is the time between chunks.")
    if silent := sum(not t.chunks for t in good):
        notes.append(f"{silent} answers had no text: their end counts as their first token.")
    return notes


def client_report(outcomes: Sequence[LoadMeasurements]) -> ClientReport:
    """Return how well the client kept up, and in which respects it limited the load."""
    cpu = max(outcome.cpu_share for outcome in outcomes)
    lag = max(Percentiles.of(outcome.lags).p99 for outcome in outcomes)
    late = Percentiles.of([value for outcome in outcomes for value in outcome.late]).p99
    limits = []
    if cpu > CPU_LIMIT:
        limits.append(f"it used {cpu:.0%} of a core (up to {CPU_LIMIT:.0%} is sound)")
    if lag > LAG_LIMIT_S:
        limits.append(f"its event loop woke up {1e3 * lag:.0f} ms late (p99)")
    if late > LAG_LIMIT_S:
        limits.append(f"it sent arrivals {1e3 * late:.0f} ms late (p99)")
    return ClientReport(
        processes=len(outcomes),
        connections=sum(outcome.connections for outcome in outcomes),
        cpu_share=cpu,
        lag_p99=lag,
        late_p99=late,
        limits=limits,
    )
