"""Microseconds that a load balancer takes for a decision, by the number of engines.

    python benchmarks/balancers.py
    python benchmarks/balancers.py --decisions 10000 --engines 2 1000

No engine runs: each request is counted at the engine that it is sent to, four requests per engine
are in flight, and their prompts are computed after a while. Every second request belongs to one of
1000 sessions. The time is that of `choose` alone, in the median: other programs run, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from importlib.metadata import entry_points
from pathlib import Path

from engines import save
from tables import show_table

from hardpoint.plugins import BalancerContext, LoadBalancer
from hardpoint.testing import ScriptedEngines, scripted_request

BALANCERS = ("least_cost", "two_choices", "round_robin")
SESSIONS = 1000


def build(name: str, num_engines: int) -> LoadBalancer:
    """Return a built-in balancer with its default options."""
    (point,) = entry_points(group="hardpoint.balancers", name=name)
    cls: type[LoadBalancer] = point.load()
    options = cls.Options()
    clock = time.monotonic
    return cls(BalancerContext(name=name, options=options, num_engines=num_engines, clock=clock))


def microseconds(name: str, num_engines: int, decisions: int) -> float:
    """Return the median time of a decision."""
    balancer, engines = build(name, num_engines), ScriptedEngines(num_engines)
    sent: deque[str] = deque()
    spent, clock = [], time.perf_counter
    for number in range(decisions):
        session = f"s{number % (2 * SESSIONS)}" if number % 2 else None
        prompt = range(number % 50, number % 50 + 16 + number % 100)
        request = scripted_request(f"r{number}", prompt, session=session)
        if balancer.uses_cached_prefixes:
            engines.cached_prefixes(request)  # the one look-up for all engines
        began = clock()
        place = balancer.choose(request, engines.views)
        spent.append(clock() - began)
        engines.send(request, engines.views[place].rank)
        sent.append(request.request_id)
        if len(sent) > 4 * num_engines:
            engines.end(sent.popleft())
        if number % num_engines == 0:
            engines.compute()
    return statistics.median(spent) * 1e6


def measure(decisions: int, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Return the time of a decision by balancer and number of engines."""
    return {
        name: {str(size): microseconds(name, size, decisions) for size in sizes}
        for name in BALANCERS
    }


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--decisions", type=int, default=100_000, help="of each (default 100000)")
    parser.add_argument("--engines", nargs="*", type=int, default=[2, 4, 64, 1000])
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    results = measure(arguments.decisions, arguments.engines)
    rows = [
        [name, *(f"{value:.2f}" for value in times.values())] for name, times in results.items()
    ]
    title = f"microseconds of a decision, median of {arguments.decisions}"
    show_table(title, ("engines", *map(str, arguments.engines)), rows)
    save(arguments.json, results)


if __name__ == "__main__":
    main()
