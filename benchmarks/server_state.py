"""Resources of a server: processes, descriptors, threads and memory; requests and blocks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import psutil
from http_streams import Client

IDLE_S, IDLE_PERIOD_S = 60.0, 0.2
REST_S, REST_PERIOD_S = 15.0, 0.5
MIB = 1 << 20
TASKS = "asyncio tasks"
"""A figure that may be missing, and may not grow; the others are 0 without requests."""
NAMES = {
    "requests running": ("hardpoint:num_requests_running", "vllm:num_requests_running"),
    "requests waiting": ("hardpoint:num_requests_waiting", "vllm:num_requests_waiting"),
    "KV cache usage": ("hardpoint:kv_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    TASKS: ("hardpoint:asyncio_tasks",),
}
"""Figures, and the names that servers give them, of which the first that exists counts."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
Holdings = dict[str, float]
"""Numbers of processes, descriptors and threads, and MiB of resident memory."""


def holdings_of(pid: int) -> Holdings:
    """Return the resources that a process and its children hold now."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return {
        "processes": len(family),
        "descriptors": sum(member.num_fds() for member in family),
        "threads": sum(member.num_threads() for member in family),
        "memory": sum(member.memory_info().rss for member in family) / MIB,
    }


def leaks(before: Holdings, after: Holdings, memory_mib: float) -> list[str]:
    """Return the resources that grew, memory by more than `memory_mib`, in plain sentences."""
    problems = [
        f"{name}: {before[name]:.0f} before the load, {after[name]:.0f} after it"
        for name in ("processes", "descriptors", "threads")
        if after[name] > before[name]
    ]
    if (grown := after["memory"] - before["memory"]) > memory_mib:
        problems.append(f"memory: grew by {grown:.0f} MiB, more than {memory_mib:g}")
    return problems


async def holdings_at_rest(pid: int, is_done: Callable[[Holdings, Holdings], bool]) -> Holdings:
    """Return a server's resources, as soon as it is at rest, or after a while.

    Args:
        pid: process id of the server.
        is_done: a predicate of what it held just before, and what it holds.
    """
    deadline, last = time.monotonic() + REST_S, holdings_of(pid)
    while True:
        await asyncio.sleep(REST_PERIOD_S)
        holdings = holdings_of(pid)
        if is_done(last, holdings) or time.monotonic() > deadline:
            return holdings
        last = holdings


def parse_metrics(text: str) -> dict[str, float]:
    """Return the figures of a text in Prometheus' format, by the names of NAMES; label sums."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return {
        figure: next(sums[name] for name in names if name in sums)
        for figure, names in NAMES.items()
        if not sums.keys().isdisjoint(names)
    }


async def metrics_when_idle(client: Client) -> tuple[dict[str, float], list[str]]:
    """Wait until no request and no block is in use; return the figures, and the remaining uses."""
    deadline = time.monotonic() + IDLE_S
    while True:
        status, text = await client.ask("GET", "/metrics")
        metrics = parse_metrics(text) if status == 200 else {}
        left = [
            f"{name}: {metrics[name]:g}" if name in metrics else f"{name}: not in /metrics"
            for name in NAMES
            if name != TASKS and metrics.get(name) != 0
        ]
        if not left or time.monotonic() > deadline:
            return metrics, left
        await asyncio.sleep(IDLE_PERIOD_S)
