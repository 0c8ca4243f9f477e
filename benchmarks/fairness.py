"""Time to first token of a small tenant next to one that sends ten times more: fcfs and fair.

    python benchmarks/fairness.py [--model smollm2] [--requests 20] [--json FILE]

Both policies get the same requests on the same engine, one after the other: the big tenant's all at
once, the small tenant's spread over the first half of the run. Printed are percentiles of the time
from a request's arrival to its first token, per tenant, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from hardpoint.configuration.loading import config_from
from hardpoint.core.build import build_engine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import RequestOutputKind, SamplingParams

BIG_PER_SMALL = 10


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    config, config_sources = config_from(
        {
            "scheduler": {"max_num_seqs": arguments.seqs},
            "kv_cache": {"prefix_caching": False},
        },
        {"model": arguments.model, "max_model_len": 512},
    )
    engine = build_engine(config, config_sources)
    report: dict[str, Any] = {}
    try:
        _serve(engine, arguments, small=2, seconds=0.0)  # warm up
        for policy in ("fcfs", "fair"):
            engine.set_policy(policy)
            seconds = report.get("fcfs", {}).get("seconds", arguments.seconds)
            report[policy] = _serve(engine, arguments, arguments.requests, seconds)
            _show(policy, report[policy])
    finally:
        engine.close()
    ratio = report["fair"]["small"]["p95"] / report["fcfs"]["small"]["p95"]
    print(f"small tenant's p95 under fair / under fcfs: {ratio:.3f} (aim: at most 0.2)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=20, help="requests of the small tenant")
    parser.add_argument("--seqs", type=int, default=8, help="limit of running requests")
    parser.add_argument("--tokens", type=int, default=24, help="output tokens per request")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the load")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _serve(
    engine: LLMEngine, arguments: argparse.Namespace, small: int, seconds: float
) -> dict[str, Any]:
    """Run the load; return percentiles of the time to first token by tenant."""
    rng = random.Random(1)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=arguments.tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
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


def _show(policy: str, report: dict[str, Any]) -> None:
    for tenant in ("small", "big"):
        found = report[tenant]
        print(
            f"{policy:5} {tenant:5} time to first token: p50 {found['p50']:6.2f} s, "
            f"p95 {found['p95']:6.2f} s"
        )
    print(f"{policy:5} finished after {report['seconds']:.1f} s")


if __name__ == "__main__":
    main()
