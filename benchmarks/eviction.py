"""Hit rates of eviction policies on three synthetic workloads, in the engine's KV cache.

    PYTHONPATH=examples/acme_caching/src python benchmarks/eviction.py
    PYTHONPATH=examples/acme_caching/src python benchmarks/eviction.py --requests 8000 --seed 2

No model runs: requests are admitted to the block manager and freed, one after the other. A hit rate
is the share of prompt tokens that were found. "no limit" is a cache that holds everything.

* shared prompts: many system prompts, of which few are used often.
* chat: conversations, each turn of which begins with the ones before.
* scans: few system prompts, and runs of long documents, each read once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from acme_caching import AdaptiveReplacement, LeastFrequentlyUsed, TwoQueues
from eviction_traces import BLOCK, TRACES, Trace
from rich.console import Console
from rich.table import Table

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.plugins import EvictionPolicy
from hardpoint.testing import measure_hit_rate

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "2q": TwoQueues,
    "arc": AdaptiveReplacement,
}
SIZES = (256, 512)


def hit_rates(trace: Trace, num_blocks: int) -> dict[str, float]:
    """Return the hit rate of each policy."""
    return {
        name: measure_hit_rate(policy, trace, num_blocks=num_blocks, block_size=BLOCK)
        for name, policy in POLICIES.items()
    }


def measure(seed: int, requests: int, sizes: list[int]) -> list[dict[str, str | int | float]]:
    """Return the hit rates of each workload and size."""
    results: list[dict[str, str | int | float]] = []
    for name, make in TRACES.items():
        trace = make(seed, requests)
        everything = sum(len(prompt) // BLOCK + 1 for prompt in trace)
        limit = measure_hit_rate(LeastRecentlyUsed, trace, num_blocks=everything, block_size=BLOCK)
        for blocks in sizes:
            rates = hit_rates(trace, blocks)
            results.append({"trace": name, "blocks": blocks, **rates, "no limit": limit})
    return results


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=3000, help="per workload (default 3000)")
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="blocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    results = measure(arguments.seed, arguments.requests, arguments.sizes)
    table = Table(title="hit rate, share of prompt tokens")
    for title in results[0]:
        table.add_column(title, justify="left" if title == "trace" else "right")
    for result in results:
        table.add_row(*(f"{v:.1%}" if isinstance(v, float) else str(v) for v in result.values()))
    Console(width=100).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
