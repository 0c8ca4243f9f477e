"""Hit rates of eviction policies on three synthetic workloads, in the engine's KV cache.

    PYTHONPATH=examples/acme_caching/src python benchmarks/eviction.py

No model runs: requests are admitted to the block manager and freed, one after the other. A hit rate
is the share of prompt tokens that were found. "no limit" is a cache that holds everything.

* shared prompts: many system prompts, of which few are used often.
* chat: conversations, each turn of which begins with the ones before.
* scans: few system prompts, and runs of long documents, each read once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import msgspec
from acme_caching import AdaptiveReplacement, LeastFrequentlyUsed, TwoQueues
from options import options_of, save, show_table

from hardpoint.builtin_plugins.kv_cache.eviction import LeastRecentlyUsed
from hardpoint.plugins import EvictionPolicy
from hardpoint.simulation import Lengths, SyntheticLoad
from hardpoint.testing import measure_hit_rate

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "2q": TwoQueues,
    "arc": AdaptiveReplacement,
}
BLOCK = 16
LOADS: dict[str, tuple[SyntheticLoad, ...]] = {
    "shared prompts": (
        SyntheticLoad(prompt=Lengths(median=56, sigma=0.5), hot_prefixes=40, hot_tokens=256),
    ),
    "chat": (
        SyntheticLoad(
            prompt=Lengths(median=40, sigma=0.4),
            output=Lengths(median=80, sigma=0.4),
            hot_prefixes=1,
            hot_tokens=192,
            turns=5.0,
            rate=1.0,
            think_seconds=40.0,
        ),
    ),
    "scans": (
        SyntheticLoad(prompt=Lengths(median=32), hot_prefixes=12, hot_tokens=256, zipf=0.0),
        SyntheticLoad(prompt=Lengths(median=640)),
    ),
}
"""The second of two loads comes in runs between the first one's requests."""
RUNS = 30, 8
LONGEST = 2000  # tokens of a prompt; longer ones are left out


def prompts(loads: Sequence[SyntheticLoad], seed: int, count: int) -> list[list[int]]:
    """Return prompts as token ids, without a common token."""
    streams = [
        msgspec.structs.replace(load, requests=10 * count, seed=seed).generate() for load in loads
    ]
    token_ids: list[list[int]] = []
    texts: dict[tuple[int, int], range] = {}
    used = 0
    while len(token_ids) < count:
        for number, (stream, run) in enumerate(zip(streams, RUNS, strict=False)):
            short = (request for request in stream if request.prompt_length <= LONGEST)
            for request in itertools.islice(short, run):
                token_ids.append([])
                for segment in request.prompt:
                    key = number, segment.id
                    if key not in texts:
                        texts[key] = range(used, used + segment.length)
                        used += segment.length
                    token_ids[-1] += texts[key][: segment.length]
    return token_ids[:count]


def main() -> None:
    """Measure, and print the table."""
    options = options_of(
        __doc__, requests=(3000, "per workload"), sizes=([256, 512], "blocks"), seed=1
    )
    results: list[dict[str, str | int | float]] = []
    for name, loads in LOADS.items():
        trace = prompts(loads, options.seed, options.requests)
        everything = sum(len(prompt) // BLOCK + 1 for prompt in trace)
        measure = functools.partial(measure_hit_rate, prompts=trace, block_size=BLOCK)
        limit = measure(LeastRecentlyUsed, num_blocks=everything)
        for size in options.sizes:
            rates = {key: measure(policy, num_blocks=size) for key, policy in POLICIES.items()}
            results.append({"trace": name, "blocks": size, **rates, "no limit": limit})
    rows = [
        [f"{v:.1%}" if isinstance(v, float) else v for v in result.values()] for result in results
    ]
    show_table("hit rate, share of prompt tokens", results[0], rows)
    save(options.json, results)


if __name__ == "__main__":
    main()
