"""Reads the figures of a server's load from its /metrics."""

from __future__ import annotations

import re

from http_streams import Client

NAMES = {
    "requests running": ("hardpoint:num_requests_running", "vllm:num_requests_running"),
    "requests waiting": ("hardpoint:num_requests_waiting", "vllm:num_requests_waiting"),
    "KV cache usage": ("hardpoint:kv_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    "asyncio tasks": ("hardpoint:asyncio_tasks",),
}
"""What is read, and the names that servers give it, of which the first that exists counts."""
IDLE = ("requests running", "requests waiting", "KV cache usage")
"""What is 0 in a server without requests."""
OPTIONAL = ("asyncio tasks",)
"""What may be missing, and may not grow."""

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


async def read_metrics(client: Client) -> dict[str, float]:
    """Return the values of /metrics, by the names of NAMES; sums over all labels."""
    status, content = await client.ask(client.request("GET", "/metrics"))
    return parse_metrics(content.decode()) if status == 200 else {}


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of a text in Prometheus' format, as `read_metrics` does."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return {
        what: next(sums[name] for name in names if name in sums)
        for what, names in NAMES.items()
        if not sums.keys().isdisjoint(names)
    }
