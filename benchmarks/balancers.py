"""Microseconds that a load balancer takes for a decision, by the number of engines.

    python benchmarks/balancers.py
    python benchmarks/balancers.py --decisions 10000 --engines 2 1000

No engine runs: each request is counted at the engine that it is sent to, four requests per engine
are in flight, and their prompts are computed after a while. Every second request belongs to one of
1000 sessions. The time is that of `choose` alone, in the median: other programs run, too.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from importlib.metadata import entry_points

from options import options_of, save, show_table

from hardpoint.plugins import BalancerContext, LoadBalancer
from hardpoint.testing import ScriptedEngines, scripted_request

BALANCERS = ("least_cost", "two_choices", "round_robin")
SESSIONS = 1000


def microseconds(name: str, num_engines: int, decisions: int) -> float:
    """Return the median time of a decision."""
    (point,) = entry_points(group="hardpoint.balancers", name=name)
    cls: type[LoadBalancer] = point.load()
    sizes = {"num_engines": num_engines, "clock": time.monotonic}
    balancer = cls(BalancerContext(name=name, options=cls.Options(), **sizes))
    engines = ScriptedEngines(num_engines)
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


def main() -> None:
    """Measure, and print the table."""
    options = options_of(
        __doc__, decisions=(100_000, "of each"), engines=([2, 4, 64, 1000], "numbers of engines")
    )
    results = {
        name: {str(size): microseconds(name, size, options.decisions) for size in options.engines}
        for name in BALANCERS
    }
    rows = [
        [name, *(f"{value:.2f}" for value in times.values())] for name, times in results.items()
    ]
    title = f"microseconds of a decision, median of {options.decisions}"
    show_table(title, ("engines", *options.engines), rows)
    save(options.json, results)


if __name__ == "__main__":
    main()
