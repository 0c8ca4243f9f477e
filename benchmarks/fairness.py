"""Time to first token of a small tenant next to one with ten times the load: fcfs and fair.

    python benchmarks/fairness.py [--model smollm2] [--requests 20] [--json FILE]

Both policies get the same requests on the same engine, one after the other: the big tenant's all at
once, the small tenant's spread over the first half of the run. Printed are percentiles of the time
from a request's arrival to its first token, per tenant, and the ratio.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from options import options_of, save, show_table

from hardpoint.configuration.loading import config_from
from hardpoint.core.build import build_engine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import RequestOutputKind, SamplingParams

BIG_PER_SMALL = 10


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__,
        model="smollm2",
        requests=(20, "requests of the small tenant"),
        seqs=(8, "limit of running requests"),
        tokens=(24, "output tokens per request"),
        seconds=(20.0, "duration of the load"),
    )
    tables = {"scheduler": {"max_num_seqs": options.seqs}, "kv_cache": {"prefix_caching": False}}
    engine = build_engine(*config_from(tables, {"model": options.model, "max_model_len": 512}))
    report: dict[str, Any] = {}
    try:
        _serve(engine, options, small=2, seconds=0.0)  # warm up
        for policy in ("fcfs", "fair"):
            engine.set_policy(policy)
            seconds = report.get("fcfs", {}).get("seconds", options.seconds)
            report[policy] = _serve(engine, options, options.requests, seconds)
    finally:
        engine.close()
    rows = []
    for policy, figures in report.items():
        for tenant in ("small", "big"):
            times = *figures[tenant].values(), figures["seconds"]
            rows.append([f"{policy}, {tenant}", *(f"{seconds:.2f}" for seconds in times)])
    heads = ("policy, tenant", "TTFT p50", "TTFT p95", "whole load")
    show_table("seconds", heads, rows)
    ratio = report["fair"]["small"]["p95"] / report["fcfs"]["small"]["p95"]
    print(f"small tenant's p95 under fair / under fcfs: {ratio:.3f} (aim: at most 0.2)")
    save(options.json, report)


def _serve(
    engine: LLMEngine, arguments: argparse.Namespace, small: int, seconds: float
) -> dict[str, Any]:
    """Run the load; return percentiles of the time to first token by tenant."""
    rng = random.Random(1)
    kind = {"ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, **kind)
    # The small tenant's requests arrive in the first half, while the big one's queue is long.
    arrivals = [(0.0, "big")] * (small * BIG_PER_SMALL)
    arrivals += [(0.5 * seconds * i / small, "small") for i in range(small)]
    arrivals.sort()
    start = time.perf_counter()
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    while arrivals or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while arrivals and arrivals[0][0] <= now:
            due, tenant = arrivals.pop(0)
            request_id = f"{tenant}-{len(arrived)}"
            arrived[request_id] = due
            prompt = [rng.randrange(1000, 40_000) for _ in range(48)]
            engine.add_request(request_id, prompt, params, RequestExtras(tags={"tenant": tenant}))
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - start)
    report: dict[str, Any] = {"seconds": time.perf_counter() - start}
    for tenant in ("small", "big"):
        waits = sorted(first[name] - arrived[name] for name in arrived if name.startswith(tenant))
        cuts = statistics.quantiles(waits, n=20, method="inclusive")
        report[tenant] = {"p50": statistics.median(waits), "p95": cuts[-1]}
    return report


if __name__ == "__main__":
    main()
