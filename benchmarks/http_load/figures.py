"""Computes the figures of a load from its timelines."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from http_load.answers import Timeline
from http_load.drive import Outcome

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CPU_LIMIT = 0.7
"""Share of a core from which on a client process is reported to limit the load."""
LAG_LIMIT_S = 0.01
_SEVERAL_TOKENS = 1.05


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below a share of the values."""
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


def distribution(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return percentiles, mean and maximum in milliseconds, or None without a value."""
    ascending = sorted(seconds)
    if not ascending:
        return None
    found = {name: 1e3 * percentile(ascending, share) for name, share in PERCENTILES.items()}
    return {**found, "mean": 1e3 * statistics.fmean(ascending), "max": 1e3 * ascending[-1]}


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of a load, as they are written as JSON.

    Times and throughput are those of the requests that ended well; the others are counted by kind.
    """
    timelines = [timeline for outcome in outcomes for timeline in outcome.timelines]
    good = [timeline for timeline in timelines if not timeline.error]
    seconds = max(t.ended for t in timelines) - min(t.sent for t in timelines) if timelines else 0.0
    inputs = sum(t.prompt_tokens or 0 for t in good)
    outputs = sum(_tokens(t) for t in good)
    chunks = sum(t.chunks for t in good)
    return {
        "seconds": seconds,
        "requests": len(timelines),
        "failed": len(timelines) - len(good),
        "errors": dict(Counter(t.error for t in timelines if t.error).most_common()),
        "requests_per_second": len(good) / seconds if seconds else 0.0,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "output_tokens_per_second": outputs / seconds if seconds else 0.0,
        "total_tokens_per_second": (inputs + outputs) / seconds if seconds else 0.0,
        "tokens_per_chunk": outputs / chunks if chunks else 0.0,
        "ms": {
            "TTFT": distribution(t.first - t.sent for t in good if t.chunks),
            "TPOT": distribution(_time_per_token(good)),
            "ITL": distribution(gap for t in good for gap in t.gaps),
            "E2E": distribution(t.ended - t.sent for t in good),
        },
        "client": client_figures(outcomes),
        "notes": _notes(good, outputs, chunks),
    }


def _tokens(timeline: Timeline) -> int:
    return timeline.chunks if timeline.output_tokens is None else timeline.output_tokens


def _time_per_token(timelines: Iterable[Timeline]) -> Iterable[float]:
    for timeline in timelines:
        if timeline.chunks and (tokens := _tokens(timeline)) > 1:
            yield (timeline.last - timeline.first) / (tokens - 1)


def _notes(good: Sequence[Timeline], outputs: int, chunks: int) -> list[str]:
    notes = []
    if any(t.output_tokens is None for t in good):
        notes.append(
            "The server sent no usage: a chunk counts as a token, prompts are not counted."
        )
    elif chunks and outputs / chunks > _SEVERAL_TOKENS:
        each_chunk = f"{outputs / chunks:.2f} tokens"
        notes.append(f"A chunk has {each_chunk} on average: ITL is the time between chunks.")
    if silent := sum(not t.chunks for t in good):
        notes.append(f"{silent} answers had no text: they are in E2E only.")
    return notes


def client_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how well the client kept up, and in which respects it limited the load."""
    cpu = max(outcome.cpu_share for outcome in outcomes)
    lag = max(percentile(sorted(o.lags), 0.99) if o.lags else 0.0 for o in outcomes)
    late = sorted(value for outcome in outcomes for value in outcome.late)
    late_p99 = percentile(late, 0.99) if late else 0.0
    limits = []
    if cpu > CPU_LIMIT:
        limits.append(f"it used {cpu:.0%} of a core (up to {CPU_LIMIT:.0%} is sound)")
    if lag > LAG_LIMIT_S:
        limits.append(f"its event loop woke up {1e3 * lag:.0f} ms late (p99)")
    if late_p99 > LAG_LIMIT_S:
        limits.append(f"it sent arrivals {1e3 * late_p99:.0f} ms late (p99)")
    return {
        "processes": len(outcomes),
        "connections": sum(outcome.connections for outcome in outcomes),
        "cpu_share": cpu,
        "lag_p99_ms": 1e3 * lag,
        "late_p99_ms": 1e3 * late_p99,
        "limits": limits,
    }
