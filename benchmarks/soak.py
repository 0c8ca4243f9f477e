"""A server under load for minutes, with clients that go away and a plugin that fails.

    python benchmarks/soak.py
    python benchmarks/soak.py --model smollm2 --seconds 60 --json result.json
    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid 4711 --faulty 0

Without `--url` it starts `hardpoint serve`, by default on the scripted model, with a logits
processor that fails on demand. Streams send seeded requests; some of them go away, before the head
of the answer, at its first token, mid stream, half-closed or within their own body, and some use
the processor that fails. Every whole answer is compared with the one that the same request got
alone, before the load: neighbours of failing requests get the same tokens. A model whose results
depend on the batch may differ in near ties, which `--different` allows for.

When the load has ended and the server is idle, nothing of it may be left: no request, no block of
the KV cache, no process, descriptor or thread, and not more memory than `--memory` allows. The last
line is the verdict; exit code: 1 if something was left or an answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from soak_parts.disconnects import Point, disconnect
from soak_parts.holdings import Holdings
from soak_parts.metrics import IDLE, OPTIONAL, read_metrics

from hardpoint.bench.answers import RequestTimeline
from hardpoint.bench.client import LoadMeasurements, send
from hardpoint.bench.connection import Pool
from hardpoint.bench.measures import report
from hardpoint.bench.processes import allow_descriptors, run_on_uvloop
from hardpoint.bench.prompts import Costs, PromptGenerator, RequestFields
from hardpoint.bench.server_facts import find_model
from hardpoint.bench.server_process import ServerStart, running_server
from hardpoint.bench.target import Target
from hardpoint.simulation import Lengths, Objective, SyntheticLoad

SETTINGS = {
    "plugins.quarantine_after": "0",  # the processor keeps failing, until the end
    "stats.sinks": '["prometheus"]',
}
SCRIPTED = {
    "dtype": "float32",
    "load.use": "dummy",
    "attention.use": "hardpoint.testing:HistoryAttention",
}
SCRIPTED_MODEL = '{use="hardpoint.testing:ScriptedModel", name="ScriptedForCausalLM"}'
FAILING = "soak_parts.faulty:FailsAt"
_REQUEST_S = 120.0
_IDLE_S = 60.0
_IDLE_PERIOD_S = 0.2
_REST_S = 15.0
_REST_PERIOD_S = 0.5
_QUESTIONS = 40
_SIGMA = 0.4
"""Of the logarithm of lengths: 95 % are from 0.46 to 2.2 times the median."""
_CHECKED_AFTER = 8


@dataclass
class Counts:
    """The results of the load.

    Attributes:
        whole: timelines of the requests that were read to their end.
        compared: answers that were compared.
        wrong: requests with another answer than alone, by number of the question.
        failed: failures of the requests that use the failing processor, by kind.
        survived: such requests that ended well, since they were shorter.
        left: clients that went away, by where.
        refused_connections: number of refused connections of clients that wanted to go away.
    """

    whole: list[RequestTimeline] = field(default_factory=list)
    compared: int = 0
    wrong: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    left: Counter[str] = field(default_factory=Counter)
    refused_connections: int = 0


class Soak:
    """A load on a server, and its checks."""

    def __init__(self, target: Target, fields: RequestFields, options: argparse.Namespace) -> None:
        """Make one.

        Args:
            target: the server.
            fields: fields of the requests.
            options: options of the command line.
        """
        self._target, self._form = target, fields
        self._options = options
        load = SyntheticLoad(
            requests=_QUESTIONS,
            prompt=Lengths(median=options.input_tokens, sigma=_SIGMA),
            output=Lengths(median=options.output_tokens, sigma=_SIGMA),
            seed=options.seed,
        )
        prompts = PromptGenerator(fields, Costs(), str(options.seed))
        self._questions: list[dict[str, Any]] = []
        self._answers: list[str] = []
        for number, request in enumerate(load.generate()):
            body = msgspec.json.decode(prompts.body(request, {}))
            self._questions.append({**body, "temperature": 1.0, "seed": number})

    async def ask_alone(self, pool: Pool, numbers: range) -> list[str]:
        """Return the answers to questions that are asked one after the other.

        Raises:
            SystemExit: one failed.
        """
        texts = []
        for number in numbers:
            timeline = await send(pool, self._request(pool, number), _REQUEST_S, keep_text=True)
            if timeline.error:
                raise SystemExit(f"soak.py: a request without any load failed: {timeline.error}")
            texts.append(timeline.text)
        return texts

    async def prepare(self) -> None:
        """Keep the answers that are right."""
        pool = Pool(self._target)
        self._answers = await self.ask_alone(pool, range(_QUESTIONS))
        pool.close()

    async def load(self, seconds: float, seed: int) -> tuple[Counts, float]:
        """Send the load; return its counts and the share of a core that it took here."""
        counts, pool = Counts(), Pool(self._target)
        end, cpu, start = time.monotonic() + seconds, time.process_time(), time.perf_counter()

        async def stream(index: int) -> None:
            rng = random.Random(f"{seed}, {index}")
            while time.monotonic() < end:
                await self._one(pool, rng, counts)

        await asyncio.gather(*(stream(index) for index in range(self._options.streams)))
        pool.close()
        return counts, (time.process_time() - cpu) / (time.perf_counter() - start)

    async def _one(self, pool: Pool, rng: random.Random, counts: Counts) -> None:
        number = rng.randrange(_QUESTIONS)
        drawn = rng.random()
        if drawn < self._options.disconnects:
            point = rng.choice(list(Point))
            chunks = int(self._questions[number]["max_tokens"])
            try:
                await disconnect(pool, self._request(pool, number), point, rng, chunks)
                counts.left[point.value] += 1
            except OSError:
                counts.refused_connections += 1
        elif drawn < self._options.disconnects + self._options.faulty:
            at = rng.randrange(2 * int(self._questions[number]["max_tokens"]))
            extra = {"plugin_args": {"fails_at": {"tokens": at}}}
            request = self._request(pool, number, extra)
            timeline = await send(pool, request, _REQUEST_S, keep_text=True)
            if timeline.error:
                counts.failed[timeline.error] += 1
            else:
                counts.survived += 1
                self._compare(number, timeline, counts)
        else:
            request = self._request(pool, number)
            timeline = await send(pool, request, _REQUEST_S, keep_text=True)
            counts.whole.append(timeline)
            if not timeline.error:
                self._compare(number, timeline, counts)

    def _request(self, pool: Pool, number: int, extra: dict[str, Any] | None = None) -> bytes:
        body = msgspec.json.encode({**self._questions[number], **(extra or {})})
        return pool.request("POST", self._form.path, body)

    def _compare(self, number: int, timeline: RequestTimeline, counts: Counts) -> None:
        counts.compared += 1
        counts.wrong[number] += timeline.text != self._answers[number]

    async def wait_until_idle(self) -> tuple[dict[str, float], list[str]]:
        """Wait until no request and no block is in use; return the metrics, and what is left."""
        deadline = time.monotonic() + _IDLE_S
        while True:
            pool = Pool(self._target)
            found = await read_metrics(pool)
            pool.close()
            left = [
                f"{name}: not in /metrics" if name not in found else f"{name}: {found[name]:g}"
                for name in IDLE
                if found.get(name, -1.0) != 0
            ]
            if not left or time.monotonic() > deadline:
                return found, left
            await asyncio.sleep(_IDLE_PERIOD_S)

    async def check_again(self) -> list[str]:
        """Return which questions get another answer than before the load."""
        pool = Pool(self._target)
        numbers = range(_CHECKED_AFTER)
        again = await self.ask_alone(pool, numbers)
        pool.close()
        different = [number for number in numbers if again[number] != self._answers[number]]
        return [f"question {number} has another answer after the load" for number in different]


async def holdings_at_rest(pid: int, is_done: Callable[[Holdings, Holdings], bool]) -> Holdings:
    """Return the server's resources, as soon as it is at rest, or after a while.

    Args:
        pid: process id of the server.
        is_done: a predicate of what it held just before, and what it holds.
    """
    deadline = time.monotonic() + _REST_S
    last = Holdings.of(pid)
    while True:
        await asyncio.sleep(_REST_PERIOD_S)
        found = Holdings.of(pid)
        if is_done(last, found) or time.monotonic() > deadline:
            return found
        last = found


async def run(target: Target, pid: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Run all phases; return the figures and what is wrong."""
    pool = Pool(target)
    model = options.model if options.url and options.model else await find_model(pool)
    pool.close()
    fields = RequestFields(model=model, endpoint=options.endpoint, ignore_eos=False)
    soak = Soak(target, fields, options)
    await soak.prepare()
    before = None
    warm_up = min(60.0, 0.2 * options.seconds)
    print(f"warm-up of {warm_up:g} s, then {options.seconds:g} s", flush=True)
    await soak.load(warm_up, options.seed)
    first_metrics, left = await soak.wait_until_idle()
    problems = [f"left after the warm-up: {what}" for what in left]
    if pid is not None:
        before = await holdings_at_rest(pid, lambda old, new: not old.leaks(new, 1.0))
    start = time.perf_counter()
    counts, cpu_share = await soak.load(options.seconds, options.seed + 1)
    metrics, left = await soak.wait_until_idle()
    problems += [f"left after the load: {what}" for what in left]
    after = None
    if pid is not None and before is not None:
        reference = before
        after = await holdings_at_rest(pid, lambda _, new: not new.leaks(reference, options.memory))
        problems += after.leaks(before, options.memory)
    for name in OPTIONAL:
        if metrics.get(name, 0.0) > first_metrics.get(name, metrics.get(name, 0.0)):
            problems.append(f"{name}: {first_metrics[name]:g} before, {metrics[name]:g} after")
    problems += await soak.check_again()
    problems += wrong(counts, options.different)
    found, _ = report([LoadMeasurements(counts.whole, start, cpu_share)], Objective())
    return {
        **msgspec.to_builtins(found),
        "compared": counts.compared,
        "different": counts.wrong.total(),
        "left": dict(counts.left),
        "faulty": {"failed": dict(counts.failed), "ended_well": counts.survived},
        "metrics": metrics,
        "before": before and msgspec.to_builtins(before),
        "after": after and msgspec.to_builtins(after),
        "problems": problems,
    }


def wrong(counts: Counts, allowed: float) -> list[str]:
    """Return the problems that the load's answers show."""
    problems = []
    if failed := sum(bool(timeline.error) for timeline in counts.whole):
        problems.append(f"{failed} requests without a fault of their own failed")
    if counts.refused_connections:
        problems.append(f"{counts.refused_connections} connections were refused")
    different = counts.wrong.total()
    if different > allowed * counts.compared:
        problems.append(f"{different} of {counts.compared} answers differ from those without load")
    if not counts.compared:
        problems.append("no answer was compared")
    return problems


def print_report(result: dict[str, Any], seconds: float) -> None:
    """Print the figures and the verdict."""
    times = ", ".join(
        f"{name.upper()} {1e3 * result[name]['p50']:.1f} / {1e3 * result[name]['p99']:.1f}"
        for name in ("ttft", "tpot", "itl", "e2e")
    )
    print(
        f"soak of {seconds:g} s: {result['finished']} whole requests, "
        f"{result['request_rate']:.1f} per second; p50 / p99 in ms: {times}"
    )
    for kind, count in result["errors"].items():
        print(f"{count} failed: {kind}")
    for limit in result["client"]["limits"]:
        print(f"the client was the limit: {limit}")
    gone = ", ".join(f"{count} {where}" for where, count in sorted(result["left"].items()))
    print(f"clients that went away: {gone or 'none'}")
    faulty = result["faulty"]
    for kind, count in faulty["failed"].items():
        print(f"failing processor: {count} {kind}")
    print(f"failing processor: {faulty['ended_well']} ended before it failed")
    share = result["different"] / result["compared"] if result["compared"] else 0.0
    print(f"answers that differ from those without load: {share:.2%} of {result['compared']}")
    if result["before"]:
        for name, value in result["before"].items():
            print(f"{name}: {value:.0f} before, {result['after'][name]:.0f} after")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    verdict = "FAILED" if result["problems"] else "PASSED: nothing is left, no answer is wrong"
    print(f"soak: {verdict}")


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """Give the URL and the process of a server, which is started if none is given."""
    if options.url:
        yield options.url, options.pid
        return
    with tempfile.TemporaryDirectory() as folder:
        enabled = [json.dumps(FAILING)]
        settings = {**SETTINGS}
        model = options.model
        if not model:
            from hardpoint.testing import write_scripted_model

            model = str(write_scripted_model(Path(folder), max_position_embeddings=2048))
            settings |= SCRIPTED
            enabled.append(SCRIPTED_MODEL)
        settings["plugins.enable"] = f"[{', '.join(enabled)}]"
        settings |= dict(setting.split("=", 1) for setting in options.set)
        start = ServerStart(model=model, settings=[f"{k}={v}" for k, v in settings.items()])
        here = str(Path(__file__).parent)  # the failing plugin is imported from it
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        with running_server(start, environment=environment) as started:
            yield started.url, started.pid


def main() -> None:
    """Parse arguments, run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs; otherwise one is started")
    parser.add_argument("--pid", type=int, help="its process, to look at what it holds")
    parser.add_argument("--model", help="to start a server with; default: the scripted model")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="completions")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=64)
    share: Callable[[str], float] = float
    parser.add_argument("--disconnects", type=share, default=0.1, help="share of the requests")
    parser.add_argument("--faulty", type=share, default=0.05, help="share of the requests")
    parser.add_argument("--different", type=share, default=0.0, help="share of answers, allowed")
    parser.add_argument("--memory", type=float, default=32.0, help="MiB of growth, allowed")
    parser.add_argument("--input-tokens", type=int, default=60, help="median")
    parser.add_argument("--output-tokens", type=int, default=40, help="median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    allow_descriptors(2 * options.streams + 256)
    with server(options) as (url, pid):
        result = run_on_uvloop(run(Target.parse(url), pid, options))
    print_report(result, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if result["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
